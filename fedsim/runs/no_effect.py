"""Says, or refuses, settings that would be recorded and compared, but on which no number of the run depends.

What a setting needs stands at its field (`fedsim.settings.effect`); this module knows what holds in a run.
"""

from collections.abc import Iterator, Sequence

from fedsim.common.errors import UserError
from fedsim.common.tasks import TASKS
from fedsim.data import BENCHMARKS, Benchmark
from fedsim.data.array_rows import EMBEDDED, PARTITIONED
from fedsim.data.reader import reader_class
from fedsim.methods.part_settings import make, method_facts
from fedsim.methods.recipe import Recipe
from fedsim.models.infer.base import EvalMode, Infer
from fedsim.models.net import Net
from fedsim.models.norms.placement import batch_norm_paths
from fedsim.parts.part import part_name
from fedsim.settings.effect import Facts, Only, Size, Trait, in_words, unmet
from fedsim.settings.experiment import SECTIONS, Experiment
from fedsim.settings.run import NO_TARGET
from strategies.parts import Share
from strategies.share.everything import Everything


def data_facts(experiment: Experiment, bench: Benchmark) -> Facts:
    """Returns what the settings and the data set say."""
    return {
        Trait.MASKS: TASKS[bench.task].maps,
        Trait.IMAGES: bench.images,
        Trait.TENSORS: not bench.images,
        Trait.COLOURS: bench.channels == 3,
        Trait.FOLDERS: reader_class(bench).takes_lists,
        Trait.ROOT: reader_class(bench).reads_root and bench.name not in (PARTITIONED, *EMBEDDED),
        Trait.OUTSIDE: experiment.data.dataset not in BENCHMARKS,
        Trait.UNSEEN: experiment.run.target != NO_TARGET,
        Trait.BOTTLENECK: experiment.model.bottleneck > 0,
        Trait.NO_BOTTLENECK: experiment.model.bottleneck == 0,
    }


def run_facts(net: Net, examples: Sequence[int], tested: int, adapt_share: float) -> Facts:
    """Returns what the network and the sites say.

    examples: training images by client. tested: images of the unseen domain
    """
    return {
        Trait.STEM: bool(batch_norm_paths(net, ())),
        Size.CLIENT_IMAGES: max(examples, default=0),
        Size.CLIENTS: len(examples),
        Size.TARGET_IMAGES: round(tested * adapt_share / (1 - adapt_share)),
    }


def no_effect_notes(experiment: Experiment, recipe: Recipe, row: Recipe, facts: Facts) -> list[str]:
    """Returns a line for each changed setting on which nothing depends in this run.

    row: the recipe of the method's row
    """
    facts = {**facts, **method_facts(recipe)}
    notes = []
    for section, name, needs in _idle_settings(experiment, facts):
        notes.append(_no_effect_note(f"{section}.", name, needs))
    usual_parts = {type(part): part for _, part in row.pairs}
    for part in dict.fromkeys(part for _, part in recipe.pairs):
        usual = usual_parts.get(type(part)) or make(type(part))
        prefix = f"method.{part_name(part)}."
        for name, needs in unmet(part, usual, facts).items():
            notes.append(_no_effect_note(prefix, name, needs))
    return notes


def _no_effect_note(prefix: str, name: str, needs: tuple[Only, ...]) -> str:
    """Returns the line on a setting without effect. prefix: the table of the setting, with a point behind it"""
    return f"{prefix}{name} has no effect here, only with {in_words(needs, prefix)}"


def share_notes(net: Net, share: Share) -> list[str]:
    """Returns a line where a share rule finds no tensor to keep, such as FedBN on a network without batch norm."""
    if isinstance(share, Everything) or share.partial:
        return []
    keeps_some = not {*share.place(net).values()} <= {"shared", "frozen"}
    if keeps_some:
        return []
    return [f"method.share has no effect here: {part_name(share)} finds nothing to keep back in this network, "
            "which is shared whole, as in FedAvg"]  # fmt: skip


def infer_notes(experiment: Experiment, infer: Infer) -> list[str]:
    """Returns a line where no domain is unseen and sources validate by eval mode, not by the inference rule."""
    if experiment.run.target != NO_TARGET or infer.on_sources or isinstance(infer, EvalMode):
        return []
    return [f"method.infer has no effect on the numbers of this run: {part_name(infer)} predicts on an unseen domain, "
            "and the sources validate by eval_mode; fedsim evaluate uses it"]  # fmt: skip


def refuse_no_effect(experiment: Experiment, bench: Benchmark) -> None:
    """Raises UserError for the first changed setting of a section that has no effect and whose field says `refused`.

    Who sets an epsilon, for example, believes the run to be private. A grid over the other setting says itself where
    there is an effect.
    """
    for section, name, needs in _idle_settings(experiment, data_facts(experiment, bench)):
        if not needs[0].refused:
            continue
        others = [f"{section}.{other}=" for one in needs for other in one.others]
        if not any(other in experiment.run.label for other in others):
            effect = in_words(needs, f"{section}.")
            raise UserError(f"{section}.{name} has an effect only with {effect}; leave it out")


def _idle_settings(experiment: Experiment, facts: Facts) -> Iterator[tuple[str, str, tuple[Only, ...]]]:
    """Yields (section, setting, what it needs) of each changed setting without effect."""
    for section, kind in SECTIONS.items():
        settings = getattr(experiment, section)
        for name, needs in unmet(settings, kind(), facts).items():
            yield section, name, needs
