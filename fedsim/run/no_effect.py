"""Refuses settings that would be recorded and compared, but on which no number of the run depends."""

from collections.abc import Iterator

from fedsim.data import BENCHMARKS, Benchmark
from fedsim.errors import UserError
from fedsim.experiment import Experiment

OWN_IMAGES = ("folder", "table", "hugging-face")  # data sets whose classes the settings may name
WITH_COLUMNS = ("table", "hugging-face")


def refuse_no_effect(experiment: Experiment, found: Benchmark) -> None:
    """UserError for the first setting that differs from its default and has no effect with the other settings."""
    for section, name, needed in _idle(experiment, found):
        settings = getattr(experiment, section)
        if getattr(settings, name) != type(settings).model_fields[name].default:
            raise UserError(f"{section}.{name} has an effect only with {needed}; leave it out")


def _idle(experiment: Experiment, found: Benchmark) -> Iterator[tuple[str, str, str]]:
    """(section, setting, what it needs) of the settings without effect.

    What a data set of another package reads is not known here, so that nothing is said about it.
    """
    data = experiment.data
    if data.clients_per_domain == 1 and not data.mix:
        yield "data", "partition", "data.clients_per_domain above 1, or with data.mix"
        yield "data", "alpha", "data.clients_per_domain above 1, or with data.mix"
    if found.task == "classification":
        yield "data", "mask_threshold", "data that have masks"
        yield "data", "largest_component", "data that have masks"
    if experiment.model.head != "text":
        yield "model", "prompt", "model.head = 'text'"
    if data.dataset in BENCHMARKS:
        if data.dataset not in OWN_IMAGES:
            yield "data", "classes", f"data.dataset = {', '.join(OWN_IMAGES)}"
        if data.dataset not in WITH_COLUMNS:
            yield "data", "columns", f"data.dataset = {', '.join(WITH_COLUMNS)}"
        if data.dataset != "masks":
            yield "data", "structures", "data.dataset = 'masks'"
        if not found.variants:
            yield "data", "variant", "data.dataset = 'rotated-mnist'"
