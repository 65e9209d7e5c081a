"""The card of a trained model: its training data and method, its results, and what to know before using it."""

from pathlib import Path

import pandas as pd

from fedsim.analysis.provenance import shared_notes
from fedsim.common.doubt import Doubt
from fedsim.common.errors import UserError
from fedsim.common.tasks import task_in
from fedsim.data import source_domains
from fedsim.export.trained import SELECTED, TrainedModel, output_of, scaling_of
from fedsim.models.backbones import find_backbone
from fedsim.models.infer.base import EvalMode
from fedsim.parts.part import part_name
from fedsim.records.environment import all_environments, read_environment
from fedsim.records.readers import AGAIN
from fedsim.records.record_files import read_record
from fedsim.records.selection import BY_TITLES, primary_column
from fedsim.runs.attacked_data import liar_notes
from fedsim.runs.doubt import DISCLOSED
from fedsim.settings import RunSettings
from fedsim.settings.run import NO_TARGET

PACKAGES = ("fedsim", "torch", "torchvision", "timm", "flwr")  # whose versions a card names
SUMS = (
    "once: the number, the sum and the sum of squares of every feature, and of the target of a regression, over the "
    "training rows (data.scale)"
)
OWN = "your own images"  # the source of rows that read a user's data
LIMITS = (
    "Numbers of a run are of one unseen domain with one seed. They may be different on another domain or with other "
    "devices; measure them with `fedsim evaluate` before you rely on the model."
)

LIMITS_OF_ALL = (
    "All numbers are of domains that the model was trained on. They may be lower on another domain or with other "
    "devices; measure them with `fedsim evaluate` before you rely on the model."
)


def card(model: TrainedModel) -> str:
    """Returns a Markdown text with data, method, domains, results, licence of the weights, limits and versions.

    Raises UserError when the records of the run contradict each other.
    """
    experiment = model.experiment
    data = model.plan.data
    method = model.plan.recipe.label(experiment.method_name)
    inputs = "Images" if data.images else "Inputs"
    sections = {
        "Data": _data(model),
        inputs: [_inputs(model)],
        "Method": _method(model, method),
        "Results": _results(model),
    }
    if model.remark:
        sections["Results"].append(f"\n{model.remark}.")
    if model.doubt:
        sections["Doubt"] = _doubt(model, model.doubt)
    sections["Weights"] = _weights(model)
    sections["Limits"] = [LIMITS_OF_ALL if experiment.run.target == NO_TARGET else LIMITS]
    recorded = {str(model.file): read_environment(model.file.parent)}
    for text in shared_notes(recorded):
        sections["Limits"].append(f"\n{text}")
    for text in liar_notes(experiment):
        sections["Limits"].append(f"\n{text[0].upper()}{text[1:]}.")
    sections["Versions"] = _versions(model.file.parent)
    name = data.title
    if data.source.startswith(OWN):
        name = experiment.name
    parts = [f"# {name}: {method}", _summary(model, method)]
    for title, lines in sections.items():
        parts += [f"## {title}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _method(model: TrainedModel, method: str) -> list[str]:
    """The method's paper, how long it was trained, and what clients disclosed."""
    recipe = model.plan.recipe
    paper = recipe.paper or "no paper named"
    stopped = read_environment(model.file.parent).get("stopped", {})
    rounds = stopped.get("after_round", model.experiment.train.rounds)
    duration = f"{rounds} rounds" if rounds > 1 else f"{rounds} round"
    seed = model.experiment.run.seed
    disclosed = [recipe.disclosure()]
    if model.scale:
        disclosed.append(SUMS)
    if model.experiment.run.doubt:
        disclosed.append(DISCLOSED)
    return [
        f"{method} ({paper}), {duration}, seed {seed}; inference rule {_rule(model)}.",
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
    if doubt.remark:
        lines.append(doubt.remark)
    summary = read_record(model.file.parent / "summary.csv")
    columns = ["target_coverage", "target_set_size"]
    if not summary.empty and set(columns) <= set(summary.columns):
        covered, size = summary.iloc[0][columns]
        target = model.experiment.run.target
        lines.append(
            f"On {target} {100 * covered:.1f} % of the sets had the true class, with {size:.2f} classes in a set."
        )
    return ["\n\n".join(lines)]


def _inputs(model: TrainedModel) -> str:
    """What the model takes: images of a size, or tensors of a shape."""
    data = model.plan.data
    if data.images:
        return (
            f"{model.channels} channel(s), {model.image_size} x {model.image_size} pixels, both sides resized "
            "(bilinear, antialiased), values in [0, 1]; the model normalizes them itself."
        )
    names = ""
    if data.features:
        names = f": {', '.join(data.features)}"
    return f"float32 tensors of the shape {list(data.shape)}{names}; {scaling_of(model)}."


def _summary(model: TrainedModel, method: str) -> str:
    """The task and the backbone of the model, how it was trained, and its file."""
    data = model.plan.data
    backbone = model.experiment.model.backbone
    how = "by federated domain generalization"
    if model.plan.recipe.pooled:
        how = "on the pooled data of all source domains, not federated"
    folder = "/".join(model.file.parent.parts[-4:])
    file = f"{model.file.name} of {folder}"
    return f"Model of {data.unit} for {data.task}, {backbone}, trained {how} ({method}). File: {file}."


def _data(model: TrainedModel) -> list[str]:
    """The data set with its source, the domains, and the names of the outputs."""
    data = model.plan.data
    return [
        f"Data set: {data.title} ({data.source or OWN}).",
        *_domains(model),
        f"Outputs: {', '.join(model.classes)}; {output_of(model)}.",
    ]


def _domains(model: TrainedModel) -> list[str]:
    """Which domains trained, which one selected the round, and what was used of the unseen one."""
    plan = model.plan
    data = model.experiment.data
    run = model.experiment.run
    unit = plan.data.unit
    unseen = f"The domain {run.target} is the unseen one."
    if not read_environment(model.file.parent).get("shared_images"):
        unseen = f"No {unit.removesuffix('s')} of {run.target} was trained on."
    if run.target == NO_TARGET:
        unseen = "No domain was left out, so that no number here says how the model does on a new one."
    if plan.recipe.uses_target_unlabelled:
        share = f"{100 * data.adapt_share:.0f} %"
        unseen = (
            f"{share} of the {unit} of {run.target}, the unseen domain, were trained on without their labels; the "
            f"results are of its other {unit}."
        )
    sources = ", ".join(source_domains(data, run.target, plan.data))
    lines = [f"Trained on {sources}. {unseen}"]
    if run.validation_domain:
        lines.append(f"No one trained on {run.validation_domain}, which selected the round.")
    return lines


def _rule(model: TrainedModel) -> str:
    """The inference rule of this file: a personal model has no tensors of other clients and predicts by itself."""
    rule = model.inference_rule
    if rule.bank and model.own is None:
        return part_name(EvalMode())
    return part_name(rule)


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
    labels = {"best_validation": f"{selected} (`best`)", "last": "last round (`last`)"}
    lines = [
        f"| selection | round | {task.title} on the unseen domain | {validation} |",
        "|---|---|---|---|",
    ]
    for rule, label in labels.items():
        chosen = summary[f"{rule}_round"]
        if pd.isna(chosen):  # no round has a validation
            lines.append(f"| {label} | none | - | - |")
            continue
        on_sources = task.text(_validation(rounds, column, chosen, folder))
        on_target = "-"
        if model.experiment.run.target != NO_TARGET:
            on_target = task.text(summary[f"{rule}_target_{task.metric}"])
        lines.append(f"| {label} | {chosen:.0f} | {on_target} | {on_sources} |")
    return lines


def _validation(rounds: pd.DataFrame, column: str, chosen: float, folder: Path) -> float:
    """Returns the validation of a round from the records, whose index is the round; UserError where they lack it."""
    if column not in rounds or chosen not in rounds.index:
        file = folder / "rounds.csv"
        raise UserError(f"{file}: it lacks {column!r} of round {chosen:.0f}, which summary.csv names; {AGAIN}")
    return rounds.loc[chosen, column]


def _validation_texts(run: RunSettings, metric: str) -> tuple[str, str]:
    """Returns (how the round was selected, what the column of its validation holds), in words."""
    selected, validation = "best source validation", f"mean validation {metric} on the sources"
    if run.validation_domain:
        selected = f"best on {run.validation_domain}"
        validation = f"validation {metric} on {run.validation_domain}"
    elif run.select_on == "local":
        selected = "best validation of the local models"
        validation = f"mean validation {metric} of the local models"
    if run.select_by != "primary":
        selected += f", by {BY_TITLES[run.select_by]}"
    return selected, validation


def _weights(model: TrainedModel) -> list[str]:
    """The weights from which the training started, and their licence."""
    settings = model.experiment.model
    if settings.weights == "none":
        return ["Trained from random weights."]
    row = find_backbone(settings)
    licence = "not known to fedsim, see where they come from"
    if row.licence and settings.weights in row.sources:
        licence = row.licence
    images = "ImageNet's images have terms of their own."
    if settings.weights not in ("imagenet", "package"):  # `hub` and files may be of any training
        images = "The images on which they were trained may have terms of their own."
    weights = f"`{settings.weights}` of {settings.backbone}"
    return [f"Started from the weights {weights} (licence: {licence}). {images}"]


def _versions(folder: Path) -> list[str]:
    """The versions of PACKAGES in each environment in which the run had rounds."""
    recorded = read_environment(folder)
    if not recorded:
        return ["Not recorded."]
    lines = []
    for rounds, table in all_environments(recorded):
        packages = table.get("packages", {})
        versions = ", ".join(f"{name} {packages[name]}" for name in PACKAGES if name in packages)
        if rounds:
            versions = f"{rounds.strip().capitalize()}: {versions}"
        lines.append(f"{versions}.")
    return ["\n\n".join(lines)]
