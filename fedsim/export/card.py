"""The card of a trained model: its training data and method, its results, and what to know before using it."""

from pathlib import Path

import pandas as pd

from fedsim.common.doubt import Doubt
from fedsim.common.errors import UserError
from fedsim.common.tasks import task_in
from fedsim.data import source_domains
from fedsim.export.trained import SELECTED, TrainedModel
from fedsim.models.backbones import find_backbone
from fedsim.models.infer.base import EvalMode
from fedsim.parts.part import part_name
from fedsim.records.environment import all_environments, read_environment
from fedsim.records.readers import AGAIN
from fedsim.records.record_files import read_record
from fedsim.records.selection import primary_column
from fedsim.runs.doubt import DISCLOSED
from fedsim.settings import RunSettings

PACKAGES = ("fedsim", "torch", "torchvision", "timm", "flwr")  # whose versions a card names
SUMS = (
    "once: the number, the sum and the sum of squares of every feature, and of the target of a regression, over the "
    "training rows (data.scale)"
)
OWN = "your own images"  # the source of rows that read a user's data


def card(model: TrainedModel) -> str:
    """Markdown text with data, method, domains, results, licence of the weights, limits and versions."""
    experiment, data = model.experiment, model.plan.data
    method = model.plan.recipe.label(experiment.method_name)
    name = experiment.name if data.source.startswith(OWN) else data.title
    sections = {
        "Data": [
            f"Data set: {data.title} ({data.source or OWN}).",
            *_domains(model),
            f"Outputs: {', '.join(model.classes)}.",
        ],
        "Images" if data.images else "Inputs": [_inputs(model)],
        "Method": _method(model, method),
        "Results": _results(model),
        **({"Doubt": _doubt(model, model.doubt)} if model.doubt else {}),
        "Weights": _weights(model),
        "Limits": [
            "Numbers of a run are of one unseen domain with one seed. They may be different on another domain or with "
            "other cameras; measure them with `fedsim evaluate` before you rely on the model.",
        ],
        "Versions": _versions(model.file.parent),
    }
    if model.remark:
        sections["Results"].append(f"\n{model.remark}.")
    parts = [f"# {name}: {method}", *_summary(model, method)]
    for title, lines in sections.items():
        parts += [f"## {title}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _method(model: TrainedModel, method: str) -> list[str]:
    """Its paper, how long it was trained, and what clients disclosed."""
    recipe = model.plan.recipe
    stopped = read_environment(model.file.parent).get("stopped", {})
    rounds = stopped.get("after_round", model.experiment.train.rounds)
    disclosed = [recipe.disclosure()]
    disclosed += [SUMS] if model.scale else []
    disclosed += [DISCLOSED] if model.experiment.run.doubt else []
    return [
        f"{method} ({recipe.paper or 'no paper named'}), {rounds} round{'s' if rounds > 1 else ''}, seed "
        f"{model.experiment.run.seed}; inference rule {_rule(model)}.",
        f"Clients disclosed: {'; '.join(disclosed)}.",
    ]


def _doubt(model: TrainedModel, doubt: Doubt) -> list[str]:
    """What was fitted to the sources' validation, and what it was worth on the unseen domain."""
    share = f"{100 * (1 - doubt.alpha):g} %"
    lines = [
        f"The sources fitted the temperature {doubt.temperature:.4g}, by which the logits are divided, and the "
        f"threshold {doubt.threshold:g} for sets of classes (1 - probability) that shall have the true class in "
        f"{share} of all cases. That holds for domains like the sources, and for no other.",
    ]
    summary = read_record(model.file.parent / "summary.csv")
    columns = ["target_coverage", "target_set_size"]
    if not summary.empty and set(columns) <= set(summary.columns):
        covered, size = summary.iloc[0][columns]
        lines.append(f"On {model.experiment.run.target} {100 * covered:.1f} % of the sets had the true class, with "
                     f"{size:.2f} classes in a set.")  # fmt: skip
    return ["\n\n".join(lines)]


def _inputs(model: TrainedModel) -> str:
    """What the model takes."""
    data = model.plan.data
    if data.images:
        return (
            f"{model.channels} channel(s), {model.image_size} x {model.image_size} pixels, both sides resized "
            "(bilinear, antialiased), values in [0, 1]; the model normalizes them itself."
        )
    names = f": {', '.join(data.features)}" if data.features else ""
    scaling = "standardized before"
    if model.feature_scale:
        scaling = "the model standardizes them itself; NaN is a missing value"
    return f"float32 tensors of the shape {list(data.shape)}{names}; {scaling}."


def _summary(model: TrainedModel, method: str) -> list[str]:
    task, backbone = model.plan.data.task, model.experiment.model.backbone
    how = "by federated domain generalization"
    if model.plan.recipe.pooled:
        how = "on the pooled data of all source domains, not federated"
    return [f"Model of {model.plan.data.unit} for {task}, {backbone}, trained {how} "
            f"({method}). File: {model.file.name} of {'/'.join(model.file.parent.parts[-4:])}."]  # fmt: skip


def _domains(model: TrainedModel) -> list[str]:
    """Which domains trained, which one selected the round, and what was used of the unseen one."""
    data, run, plan = model.experiment.data, model.experiment.run, model.plan
    unit = plan.data.unit
    unseen = f"No {unit.removesuffix('s')} of {run.target} was trained on."
    if plan.recipe.uses_target_unlabelled:
        unseen = (f"{100 * data.adapt_share:.0f} % of the {unit} of {run.target}, the unseen domain, were trained on "
                  f"without their labels; the results are of its other {unit}.")  # fmt: skip
    sources = ", ".join(source_domains(data, run.target, plan.data))
    chosen = [f"No one trained on {run.validation_domain}, which selected the round."] if run.validation_domain else []
    return [f"Trained on {sources}. {unseen}", *chosen]


def _rule(model: TrainedModel) -> str:
    """The inference rule of this file: a personal model has no tensors of other clients and predicts by itself."""
    rule = model.plan.recipe.infer
    return part_name(EvalMode() if rule.bank and model.own is None else rule)


def _results(model: TrainedModel) -> list[str]:
    """The lines of a table with the accuracy of the selected and the last round, or one line that says why not."""
    folder = model.file.parent
    if model.file.stem not in SELECTED:
        return [f"The run did not measure {model.file.name}; its numbers are of the global model."]
    records = {name: read_record(folder / name) for name in ("summary.csv", "rounds.csv")}
    for name, frame in records.items():
        if frame.empty:
            return [f"The run has not finished, or its records are elsewhere: there is no {name}."]
    summary = records["summary.csv"].iloc[0]
    rounds = records["rounds.csv"].set_index("round")
    task = task_in(summary.index, "last_target_")
    column = primary_column(model.experiment, task.metric)
    selected, validation = _validation_texts(model.experiment.run, task.title)
    lines = [
        f"| selection | round | {task.title} on the unseen domain | {validation} |",
        "|---|---|---|---|",
    ]
    for rule, label in {"best_validation": f"{selected} (`best`)", "last": "last round (`last`)"}.items():
        chosen = summary[f"{rule}_round"]
        if pd.isna(chosen):  # no round has a validation
            lines.append(f"| {label} | none | - | - |")
            continue
        if column not in rounds or chosen not in rounds.index:
            raise UserError(
                f"{folder / 'rounds.csv'}: it lacks {column!r} of round {chosen:.0f}, which summary.csv names; {AGAIN}"
            )
        numbers = [summary[f"{rule}_target_{task.metric}"], rounds.loc[chosen, column]]
        lines.append(" | ".join([f"| {label}", f"{chosen:.0f}", *map(task.text, numbers), ""]).rstrip())
    return lines


def _validation_texts(run: RunSettings, metric: str) -> tuple[str, str]:
    """(how the round was selected, what the column of its validation holds), in words."""
    if run.validation_domain:
        return f"best on {run.validation_domain}", f"validation {metric} on {run.validation_domain}"
    if run.select_on == "local":
        return "best validation of the local models", f"mean validation {metric} of the local models"
    return "best source validation", f"mean validation {metric} on the sources"


def _weights(model: TrainedModel) -> list[str]:
    settings = model.experiment.model
    if settings.weights == "none":
        return ["Trained from random weights."]
    row = find_backbone(settings)
    licence = row.licence if settings.weights in row.sources else ""
    stated = f"licence: {licence}" if licence else "licence: not known to fedsim, see where they come from"
    images = "ImageNet's images have terms of their own."
    if settings.weights not in ("imagenet", "package"):  # `hub` and files may be of any training
        images = "The images on which they were trained may have terms of their own."
    return [f"Started from the weights `{settings.weights}` of {settings.backbone} ({stated}). {images}"]


def _versions(folder: Path) -> list[str]:
    recorded = read_environment(folder)
    if not recorded:
        return ["Not recorded."]
    lines = []
    for rounds, table in all_environments(recorded):
        packages = table.get("packages", {})
        named = ", ".join(f"{name} {packages[name]}" for name in PACKAGES if name in packages)
        lines.append(f"{rounds.strip().capitalize()}: {named}." if rounds else f"{named}.")
    return ["\n\n".join(lines)]
