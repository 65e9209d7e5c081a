"""What a run records of tensors that are no images, so that its model can be used where the data are not."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedsim.common.tasks import TASKS
from fedsim.data.row import Benchmark
from fedsim.data.scaling import Scale


def tensor_record(bench: Benchmark) -> dict[str, Any]:
    """The facts of the data set that environment.json has; empty for images."""
    record: dict[str, Any] = {}
    if not bench.images:
        record["tensors"] = {
            "shape": list(bench.shape),
            "features": list(bench.features),
            "numeric": bench.numeric,
        }
    if bench.structures and not TASKS[bench.task].maps:
        record["targets"] = list(bench.structures)
    return record


def recorded_unit(recorded: Mapping[str, Any]) -> str:
    """What one example of a recorded run is called, in the plural: that of its data set's row (`Benchmark.unit`)."""
    facts = recorded.get("tensors")
    if not facts:
        return "images"
    return "rows" if facts["features"] else "examples"


def with_recorded_shape(bench: Benchmark, recorded: Mapping[str, Any]) -> Benchmark:
    """The row with the shape and features that a run recorded."""
    targets = recorded.get("targets", bench.structures)
    bench = replace(bench, structures=tuple(targets))
    facts = recorded.get("tensors")
    if not facts:
        return bench
    return replace(
        bench,
        shape=tuple(facts["shape"]),
        features=tuple(facts["features"]),
        numeric=facts["numeric"],
    )


def scale_record(scale: Scale | None) -> dict[str, Any]:
    """What environment.json has of a scale; empty without one."""
    if not scale:
        return {}
    numbers = {"mean": list(scale.mean), "std": list(scale.std)}
    return {"scale": numbers}


def recorded_scale(recorded: Mapping[str, Any]) -> Scale | None:
    """The scale by which a run standardized its features; None for a run that has none."""
    facts = recorded.get("scale")
    if not facts:
        return None
    return Scale(tuple(facts["mean"]), tuple(facts["std"]))
