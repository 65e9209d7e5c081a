"""Refuses settings that would be recorded and compared, but on which no number of the run depends."""

from collections.abc import Iterator

from fedsim.common.errors import UserError
from fedsim.data import BENCHMARKS, Benchmark
from fedsim.data.lists import reads_lists
from fedsim.methods.recipe import Recipe
from fedsim.parts.part import part_name
from fedsim.settings import Settings
from fedsim.settings.experiment import Experiment

OWN_IMAGES = ("folder", "table", "hugging-face")  # data sets whose classes the settings may name
WITH_COLUMNS = ("table", "hugging-face")
PRIVATE = "train.dp_clip above 0, which makes a run private"
LISTED = "data.split = 'lists' or data.test_split = 'list'"


def no_effect_remarks(experiment: Experiment, recipe: Recipe) -> list[str]:
    """What is said, and not refused, because a sweep over the other setting is usual (1 and 4 clients per domain, or
    methods)."""
    said = [f"{name} has no effect here, only with {needed}" for name, needed in _idle_in_a_grid(experiment)]
    apart = [part_name(part) for part in recipe.client_parts() if not part.compiles]
    if experiment.train.compile != "off" and apart:
        said.append(
            f"train.compile has no effect here: {apart[0]} does not train by the network's plain pass, "
            "which is what it compiles"
        )
    return said


def _idle_in_a_grid(experiment: Experiment) -> Iterator[tuple[str, str]]:
    data, model = experiment.data, experiment.model
    several = "data.clients_per_domain above 1, or with data.mix"
    if data.clients_per_domain == 1 and not data.mix:
        for name in ("partition", "alpha"):
            if _changed(data, name):
                yield f"data.{name}", several
    if model.head != "text" and _changed(model, "prompt"):
        yield "model.prompt", "model.head = 'text'"
    if _in_grid(experiment, "train.dp_clip") and not experiment.train.dp_clip:
        for name in ("dp_epsilon", "dp_delta"):
            if _changed(experiment.train, name):
                yield f"train.{name}", PRIVATE
    if _in_grid(experiment, "data.split", "data.test_split") and not reads_lists(data) and _changed(data, "lists"):
        yield "data.lists", LISTED


def _in_grid(experiment: Experiment, *keys: str) -> bool:
    """Whether the run is a cell of a grid or a trial of a search over one of these settings, which its label names."""
    return any(f"{key}=" in experiment.run.label for key in keys)


def _changed(settings: Settings, name: str) -> bool:
    return getattr(settings, name) != type(settings).model_fields[name].default


def refuse_no_effect(experiment: Experiment, found: Benchmark) -> None:
    """UserError for the first setting that differs from its default and has no effect with the other settings.

    It is also one for a `data.fraction` that only the clients would have.
    """
    for section, name, needed in _idle(experiment, found):
        if _changed(getattr(experiment, section), name):
            raise UserError(f"{section}.{name} has an effect only with {needed}; leave it out")
    if experiment.data.fraction < 1 and experiment.data.test_split == "list":
        raise UserError("data.fraction takes no share of the images that data.test_split = 'list' tests; leave it at 1")


def _idle(experiment: Experiment, found: Benchmark) -> Iterator[tuple[str, str, str]]:
    """(section, setting, what it needs) of the settings without effect.

    What a data set of another package reads is not known here, so that nothing is said about it.
    """
    data = experiment.data
    # Who sets an epsilon believes the run to be private. A grid over the clip says itself which runs are not.
    if not experiment.train.dp_clip and not _in_grid(experiment, "train.dp_clip"):
        yield "train", "dp_epsilon", PRIVATE
        yield "train", "dp_delta", PRIVATE
    if found.task == "classification":
        yield "data", "mask_threshold", "data that have masks"
        yield "data", "largest_component", "data that have masks"
    if data.dataset in BENCHMARKS:
        if not reads_lists(data) and not _in_grid(experiment, "data.split", "data.test_split"):
            yield "data", "lists", LISTED
        if data.dataset not in OWN_IMAGES:
            yield "data", "classes", f"data.dataset = {' or '.join(OWN_IMAGES)}"
        if data.dataset not in WITH_COLUMNS:
            yield "data", "columns", f"data.dataset = {' or '.join(WITH_COLUMNS)}"
        if data.dataset != "masks":
            yield "data", "structures", "data.dataset = 'masks'"
        if not found.variants:
            yield "data", "variant", "data.dataset = 'rotated-mnist'"
