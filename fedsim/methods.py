"""The map: every method as a recipe of exchangeable parts. Start reading here.

A row names the parts in which the method differs from FedAvg. `a+b` combines two rows; `method.guiding_head.weight=0.25`
sets a part's field; `method.weights="uniform"` exchanges a part; `method.add=["guiding_head"]` adds one.
"""

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Any

import pydantic
from torch import nn

from clients.batches import BalancedBudget, Shuffled
from clients.calibration import SemanticCalibration
from clients.ccst import CrossClientStyle
from clients.elcfs import EpisodicStep
from clients.fedig import ClientAgnostic
from clients.generalization_gap import GeneralizationGap
from clients.guiding_head import GuidingHead
from clients.parts import Augment, Batches, Contributor, Report, Step, Term
from clients.steps import SupervisedStep
from clients.terms import LabelSmoothing, Proximal
from fedsim.combinations import check_batch_norm
from fedsim.data import benchmark
from fedsim.errors import UserError
from fedsim.experiment import Experiment, nearest
from fedsim.models import build_model
from fedsim.models.infer import RULES, EvalMode, Infer, ZeroShotAdapter
from fedsim.models.mixstyle import MixStyle
from fedsim.models.norms import BIN, DSON, IBN, XAN, BatchNorm, MixIG
from strategies.banks import AmplitudeBank, StyleBank
from strategies.divergence import SemanticDivergence
from strategies.generalization import GeneralizationAdjustment
from strategies.parts import Bank, ByExamples, Everything, Fuse, Share, Uniform, WeightedMean, Weights
from strategies.sharing import WithoutBatchNorm, WithoutStatistics


@dataclass(frozen=True)
class Recipe:
    """A method: one part per question (see the design's table); every default is FedAvg's."""

    share: Share = Everything()
    weights: Weights = ByExamples()
    fuse: Fuse = WeightedMean()
    banks: tuple[Bank, ...] = ()
    client: Step = SupervisedStep()
    terms: tuple[Term, ...] = ()
    batches: Batches = Shuffled()
    augment: Augment | None = None
    reports: tuple[Report, ...] = ()
    norm: Any = BatchNorm()
    inserts: tuple[Any, ...] = ()
    infer: Infer = EvalMode()
    pooled: bool = False
    paper: str = ""
    discloses: str = "model updates"

    def label(self, method: str) -> str:
        """Name of the method in results; a part with `tag` shows it, as in `ccst(pixel)`."""
        tags = [part.tag for _, part in parts_of(self) if getattr(part, "tag", "")]
        return f"{method}({', '.join(tags)})" if tags else method

    def contributors(self) -> dict[str, Contributor]:
        """Client parts that contribute to a bank, by the bank's name."""
        return {part.bank: part for _, part in parts_of(self) if isinstance(part, Contributor) and part.bank}

    def contributor(self, bank: str) -> Contributor:
        """The client part that contributes to a bank."""
        return self.contributors()[bank]

    def disclosure(self) -> str:
        """What leaves the clients: the row's own text and what each part with `discloses` adds."""
        parts = [part.discloses for _, part in parts_of(self) if getattr(part, "discloses", "")]
        return "; ".join([self.discloses, *parts])


METHODS: dict[str, Recipe] = {
    "fedavg": Recipe(paper="McMahan et al., AISTATS 2017"),
    "fedprox": Recipe(terms=(Proximal(),), paper="Li et al., MLSys 2020"),
    "fedbn": Recipe(share=WithoutBatchNorm(), paper="Li et al., ICLR 2021",
                    discloses="as FedAvg: batch norm is uploaded for the unseen domain's model"),
    "silobn": Recipe(share=WithoutStatistics(), paper="Andreux et al., DCL 2020",
                     discloses="as FedAvg: statistics are uploaded for the unseen domain's model"),
    "fedsb": Recipe(terms=(LabelSmoothing(0.01),), batches=BalancedBudget(2880), weights=Uniform(),
                    paper="Soltany et al., ICASSP 2025"),
    "deepall": Recipe(pooled=True, paper="pooled empirical risk, the reference that is not federated",
                      discloses="all raw data"),
    "gperxan": Recipe(norm=XAN(), share=WithoutBatchNorm("xan"), terms=(GuidingHead(0.5),),
                      paper="Le et al., CVPR 2024",
                      discloses="as FedAvg: the batch-norm side is uploaded for the unseen domain's model"),
    "feddg-ga": Recipe(weights=GeneralizationAdjustment(0.2), reports=(GeneralizationGap(),),
                       paper="Zhang et al., CVPR 2023",
                       discloses="one number per round more than FedAvg: how much better the client's own model fits"),
    "csac": Recipe(client=SemanticCalibration(), fuse=SemanticDivergence("l2"), paper="Yuan et al., TKDE 2023",
                   discloses="more than FedAvg once: a model trained to convergence on the client's data alone"),
    "ccst": Recipe(augment=CrossClientStyle(), banks=(StyleBank(),), paper="Chen et al., WACV 2023"),
    "elcfs": Recipe(client=EpisodicStep(), banks=(AmplitudeBank(),), paper="Liu et al., CVPR 2021 (FedDG)"),
    "fedig": Recipe(norm=MixIG(), share=WithoutBatchNorm(mirror=True), client=ClientAgnostic(),
                    paper="client-agnostic learning, ICLR 2023 submission: FedIG",
                    discloses="as FedAvg: the batch-norm side goes up, its average comes down"),
    "fedig-a": Recipe(norm=MixIG(adapter=True), share=WithoutBatchNorm(mirror=True), client=ClientAgnostic(),
                      infer=ZeroShotAdapter(), paper="the same with zero-shot adapters: FedIG-A",
                      discloses="as FedIG, and the adapters' weights"),
    "mixstyle": Recipe(inserts=(MixStyle(),), paper="Zhou et al., ICLR 2021, inside FedAvg"),
    "gfedavg": Recipe(terms=(GuidingHead(0.5),), paper="gPerXAN Table 4: guiding head on FedAvg (BN)"),
    "gfedavg-ibn": Recipe(norm=IBN(), terms=(GuidingHead(0.5),), paper="gPerXAN Table 4: I-BN"),
    "gfedavg-dson": Recipe(norm=DSON(), terms=(GuidingHead(0.5),), paper="gPerXAN Table 4: DSON"),
}

LIST_SLOTS = ("terms", "banks", "reports", "inserts")
PARTS: dict[str, tuple[type, ...]] = {
    "share": (Everything, WithoutBatchNorm, WithoutStatistics),
    "weights": (ByExamples, Uniform, GeneralizationAdjustment),
    "fuse": (WeightedMean, SemanticDivergence),
    "banks": (StyleBank, AmplitudeBank),
    "client": (SupervisedStep, ClientAgnostic, SemanticCalibration, EpisodicStep),
    "terms": (LabelSmoothing, Proximal, GuidingHead),
    "batches": (Shuffled, BalancedBudget),
    "augment": (CrossClientStyle,),
    "reports": (GeneralizationGap,),
    "norm": (BatchNorm, XAN, IBN, DSON, BIN, MixIG),
    "inserts": (MixStyle,),
    "infer": RULES,
}


def part_name(part: Any) -> str:
    """Settings name of a part (or its class): `GuidingHead` -> `guiding_head`, `XAN` -> `xan`."""
    name = (part if isinstance(part, type) else type(part)).__name__
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def parts_of(recipe: Recipe) -> list[tuple[str, Any]]:
    """(slot, part) of everything in a recipe."""
    pairs: list[tuple[str, Any]] = []
    for slot in PARTS:
        value = getattr(recipe, slot)
        pairs += [(slot, part) for part in (value if slot in LIST_SLOTS else (value,)) if part is not None]
    return pairs


def build_recipe(experiment: Experiment) -> Recipe:
    """The recipe of `[method]`, with its overrides; UserError for unknown names and for parts that do not fit."""
    settings = dict(experiment.method)
    name = settings.pop("name")
    recipe = functools.reduce(combine, [(part, _row(part)) for part in name.split("+")])[1]
    added = settings.pop("add", [])
    for key in [key for key in settings if key in PARTS]:
        recipe = _exchange(recipe, key, settings.pop(key))
    for part in [added] if isinstance(added, str) else added:
        slot, kind = _find_part(part)
        recipe = dataclasses.replace(recipe, **{slot: (*getattr(recipe, slot), kind()) if slot in LIST_SLOTS else kind()})
    recipe = _complete(recipe)
    present = {part_name(part) for _, part in parts_of(recipe)}
    for key, fields in experiment.parts.items():
        _find_part(key)
        if key in present and key not in settings:
            recipe = _set_fields(recipe, key, fields, name)
        elif key in present and isinstance(settings[key], dict):
            settings[key] = {**fields, **settings[key]}
    for key, fields in settings.items():
        recipe = _set_fields(recipe, key, fields, name)
    check_recipe(recipe, name)
    for _, part in parts_of(recipe):
        if hasattr(part, "check"):  # what a part needs of the data, the model or this machine
            part.check(experiment)
    return recipe


def _row(name: str) -> Recipe:
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}; {nearest(name, METHODS)}known: {', '.join(METHODS)}")
    return METHODS[name]


def combine(a: tuple[str, Recipe], b: tuple[str, Recipe]) -> tuple[str, Recipe]:
    """Both rows in one: lists are joined, a part that differs from FedAvg's wins; two different ones are refused."""
    changes: dict[str, Any] = {}
    for slot in PARTS:
        first, second, standard = getattr(a[1], slot), getattr(b[1], slot), getattr(Recipe(), slot)
        if slot in LIST_SLOTS:
            changes[slot] = first + tuple(part for part in second if part not in first)
        elif second != standard and first not in (standard, second):
            raise UserError(f"{a[0]} and {b[0]} cannot be combined: {slot} is {part_name(first)} in one and "
                            f"{part_name(second)} in the other")
        else:
            changes[slot] = second if second != standard else first
    changes["pooled"] = a[1].pooled or b[1].pooled
    for text in ("paper", "discloses"):
        changes[text] = "; ".join(dict.fromkeys(value for value in (getattr(a[1], text), getattr(b[1], text)) if value))
    return f"{a[0]}+{b[0]}", Recipe(**changes)


def _find_part(name: Any, slot: str = "") -> tuple[str, type]:
    known = {part_name(kind): (key, kind) for key, kinds in PARTS.items() if slot in ("", key) for kind in kinds}
    if name not in known:
        raise UserError(f"method{'.' + slot if slot else ''}: no part {name!r}; {nearest(str(name), known)}"
                        f"known: {', '.join(known) or 'none'}")
    return known[name]


def _exchange(recipe: Recipe, slot: str, value: Any) -> Recipe:
    """Recipe with the parts of one slot replaced by named ones; `"none"` empties an optional slot."""
    if slot in LIST_SLOTS:
        names = [value] if isinstance(value, str) else value
        return dataclasses.replace(recipe, **{slot: tuple(_find_part(name, slot)[1]() for name in names)})
    if slot == "augment" and value == "none":
        return dataclasses.replace(recipe, augment=None)
    kind = _find_part(value, slot)[1]
    return recipe if isinstance(getattr(recipe, slot), kind) else dataclasses.replace(recipe, **{slot: kind()})


def _complete(recipe: Recipe) -> Recipe:
    """Adds what a part requires and the recipe lacks: `requires = {"reports": "generalization_gap"}`."""
    for _, part in parts_of(recipe):
        for slot, name in getattr(part, "requires", {}).items():
            kind = _find_part(name, slot)[1]
            if not any(isinstance(present, kind) for present in getattr(recipe, slot)):
                recipe = dataclasses.replace(recipe, **{slot: (*getattr(recipe, slot), kind())})
    return recipe


def _set_fields(recipe: Recipe, key: str, fields: Any, method: str) -> Recipe:
    """Recipe with fields of the part called `key` changed and checked."""
    present = {part_name(part): (slot, part) for slot, part in parts_of(recipe)}
    if key not in present:
        hint = " (add it with method.add)" if key in {part_name(kind) for kinds in PARTS.values() for kind in kinds} else ""
        raise UserError(f"method {method!r} has no part {key!r}{hint}; {nearest(key, present)}it has: {', '.join(present)}")
    if not isinstance(fields, dict):
        raise UserError(f"method.{key} is a part; set its fields, e.g. method.{key}.FIELD={fields!r}")
    slot, part = present[key]
    known = [field.name for field in dataclasses.fields(part)]
    for field in fields:
        if field not in known:
            raise UserError(f"method.{key} has no field {field!r}; {nearest(field, known)}known: {', '.join(known)}")
    values = {field: getattr(part, field) for field in known} | fields
    try:
        changed = pydantic.TypeAdapter(type(part)).validate_python(values)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        raise UserError(f"method.{key}.{problem['loc'][0]}: {problem['msg']} (got {problem['input']!r})") from None
    value = tuple(changed if member is part else member for member in getattr(recipe, slot)) if slot in LIST_SLOTS else changed
    return dataclasses.replace(recipe, **{slot: value})


def check_recipe(recipe: Recipe, name: str) -> None:
    """Refuse combinations that make no sense, in one line."""
    if not recipe.fuse.uses_weights and not isinstance(recipe.weights, ByExamples | Uniform):
        raise UserError(f"{name}: {part_name(recipe.fuse)} weighs every tensor by itself, so {part_name(recipe.weights)} "
                        "would have no effect; use one of the two")
    scope = getattr(recipe.share, "scope", "all")
    if scope == "xan" and not isinstance(recipe.norm, XAN):
        raise UserError(f"{name}: without_batch_norm with scope 'xan' needs norm 'xan', not {part_name(recipe.norm)!r}")
    check_batch_norm(recipe, name)
    contributors, banks = recipe.contributors(), {bank.name: bank for bank in recipe.banks}
    for bank in contributors.keys() - banks.keys():
        raise UserError(f"{name}: {part_name(contributors[bank])} needs the bank {bank!r}; add it to method.banks")
    for bank in banks.keys() - contributors.keys():
        raise UserError(f"{name}: no part contributes to {part_name(banks[bank])}; take it out of method.banks")
    if not getattr(recipe.share, "upload", True) and not recipe.infer.transductive:
        raise UserError(f"{name}: without the upload of batch norm no model for the unseen domain exists; keep upload = "
                        "true, or re-estimate the statistics there with method.infer = 'recompute'")
    if recipe.pooled and (recipe.banks or recipe.client.prelude or not isinstance(recipe.share, Everything)):
        raise UserError(f"{name}: all source data are pooled on one client, so parts that exchange something between "
                        "clients have no meaning; use a federated method")


def build_net(experiment: Experiment, recipe: Recipe) -> nn.Module:
    """The experiment's network with the recipe's normalisation, from the run's seed."""
    bench = benchmark(experiment.data)
    net = build_model(experiment.model, len(bench.classes), bench.channels, experiment.data.image_size, recipe.norm,
                      experiment.run.seed)
    for part in recipe.inserts:
        part.apply(net)
    if recipe.client.needs_levels and not net.levels:
        raise UserError(f"{part_name(recipe.client)} aligns convolutional feature maps, and {experiment.model.backbone} "
                        "has none; use a ResNet, DenseNet, AlexNet or the digits CNN")
    return net


def find_recipe(name: str) -> Recipe:
    """Recipe of a row or a combination `a+b`, with the papers' values."""
    return build_recipe(Experiment(method={"name": name}))
