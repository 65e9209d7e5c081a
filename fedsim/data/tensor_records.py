"""What a run records of tensors that are no images, so that its model can be used where the data are not."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedsim.common.tasks import TASKS
from fedsim.data.row import Benchmark
from fedsim.data.scaling import Scale


def tensor_record(bench: Benchmark) -> dict[str, Any]:
    """The facts of the data set that environment.json has; empty for images."""
    targets = {"targets": list(bench.structures)} if bench.structures and not TASKS[bench.task].maps else {}
    if bench.images:
        return targets
    facts = {"shape": list(bench.shape), "features": list(bench.features), "numeric": bench.numeric}
    return {"tensors": facts} | targets


def with_recorded_shape(bench: Benchmark, recorded: Mapping[str, Any]) -> Benchmark:
    """The row with the shape and features that a run recorded."""
    facts = recorded.get("tensors")
    bench = replace(bench, structures=tuple(recorded.get("targets", bench.structures)))
    if not facts:
        return bench
    features = tuple(facts["features"])
    return replace(bench, shape=tuple(facts["shape"]), features=features, numeric=facts["numeric"])


def scale_record(scale: Scale | None) -> dict[str, Any]:
    """What environment.json has of a scale; empty without one."""
    return {"scale": {"mean": list(scale.mean), "std": list(scale.std)}} if scale else {}


def recorded_scale(recorded: Mapping[str, Any]) -> Scale | None:
    """The scale by which a run standardized its features; None for a run that has none."""
    facts = recorded.get("scale")
    return Scale(tuple(facts["mean"]), tuple(facts["std"])) if facts else None
