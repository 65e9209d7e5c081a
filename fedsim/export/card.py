"""The card of a trained model: its training data and method, its results, and what to know before using it."""

from pathlib import Path

import pandas as pd

from fedsim.common.errors import UserError
from fedsim.common.tasks import task_in
from fedsim.data import source_domains
from fedsim.export.trained import SELECTED, TrainedModel
from fedsim.models.backbones import find_backbone
from fedsim.models.infer.base import EvalMode
from fedsim.parts.part import part_name
from fedsim.results.environment import all_environments, read_environment
from fedsim.results.record_files import AGAIN, read_record
from fedsim.results.selection import validation_column

OWN = "your own images"  # the source of rows that read a user's data


def card(model: TrainedModel) -> str:
    """Markdown text with data, method, domains, results, licence of the weights, limits and versions."""
    experiment, plan = model.experiment, model.plan
    method = plan.recipe.label(experiment.method_name)
    own = plan.data.source.startswith(OWN)
    rounds = experiment.train.rounds
    sections = {
        f"{experiment.name if own else plan.data.title}: {method}": _summary(model, method),
        "Data": [
            f"Data set: {plan.data.title} ({plan.data.source or OWN}).",
            *_domains(model),
            f"Outputs: {', '.join(model.classes)}.",
        ],
        "Images": [
            f"{model.channels} channel(s), {model.image_size} x {model.image_size} pixels, both sides resized "
            "(bilinear, antialiased), values in [0, 1]; the model normalizes them itself.",
        ],
        "Method": [
            f"{method} ({plan.recipe.paper or 'no paper named'}), {rounds} round{'s' if rounds > 1 else ''}, seed "
            f"{experiment.run.seed}; inference rule {_rule(model)}.",
            f"Clients disclosed: {plan.recipe.disclosure()}.",
        ],
        "Results": [*_results(model), *([f"\n{model.remark}."] if model.remark else [])],
        "Weights": _weights(model),
        "Limits": [
            "Numbers of a run are of one unseen domain with one seed. They may be different on another domain or with "
            "other cameras; measure them with `fedsim evaluate` before you rely on the model.",
        ],
        "Versions": _versions(model.file.parent),
    }
    parts = [f"{'#' if index == 0 else '##'} {title}\n\n" + "\n".join(lines)
             for index, (title, lines) in enumerate(sections.items())]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _summary(model: TrainedModel, method: str) -> list[str]:
    task, backbone = model.plan.data.task, model.experiment.model.backbone
    how = "by federated domain generalization"
    if model.plan.recipe.pooled:
        how = "on the pooled data of all source domains, not federated"
    return [f"Model of images for {task}, {backbone}, trained {how} "
            f"({method}). File: {model.file.name} of {'/'.join(model.file.parent.parts[-4:])}."]  # fmt: skip


def _domains(model: TrainedModel) -> list[str]:
    """Which domains trained, which one selected the round, and what was used of the unseen one."""
    data, run, plan = model.experiment.data, model.experiment.run, model.plan
    unseen = f"No image of {run.target} was trained on."
    if plan.recipe.uses_target_unlabelled:
        unseen = (f"{100 * data.adapt_share:.0f} % of the images of {run.target}, the unseen domain, were trained on "
                  "without their labels; the results are of its other images.")  # fmt: skip
    sources = ", ".join(source_domains(data, run.target, plan.data))
    chosen = [f"No one trained on {run.validation_domain}, which selected the round."] if run.validation_domain else []
    return [f"Trained on {sources}. {unseen}", *chosen]


def _rule(model: TrainedModel) -> str:
    """The inference rule of this file: a personal model has no tensors of other clients and predicts by itself."""
    rule = model.plan.recipe.infer
    return part_name(EvalMode() if rule.bank and model.own is None else rule)


def _results(model: TrainedModel) -> list[str]:
    folder, run = model.file.parent, model.experiment.run
    if model.file.stem not in SELECTED:
        return [f"The run did not measure {model.file.name}; its numbers are of the global model."]
    records = {name: read_record(folder / name) for name in ("summary.csv", "rounds.csv")}
    if missing := [name for name, frame in records.items() if frame.empty]:
        return [f"The run has not finished, or its records are elsewhere: there is no {missing[0]}."]
    row, rounds = records["summary.csv"].iloc[0], records["rounds.csv"].set_index("round")
    task = task_in(row.index, "last_target_")
    column = validation_column(model.experiment, task.metric)
    selected = {"aggregated": "best source validation", "local": "best validation of the local models"}[run.select_on]
    validation = {"aggregated": "on the sources", "local": "of the local models"}[run.select_on]
    if run.validation_domain:
        selected, validation = f"best on {run.validation_domain}", f"on {run.validation_domain}"
    mean = "" if run.validation_domain else "mean "
    lines = [
        f"| selection | round | {task.title} on the unseen domain | {mean}validation {task.title} {validation} |",
        "|---|---|---|---|",
    ]
    for key, label in (("best_validation", f"{selected} (`best`)"), ("last", "last round (`last`)")):
        chosen, score = row[f"{key}_round"], row[f"{key}_target_{task.metric}"]
        if pd.isna(chosen):  # no round has a validation
            lines.append(f"| {label} | none | - | - |")
        elif column not in rounds or chosen not in rounds.index:
            what = f"{column!r} of round {chosen:.0f}"
            raise UserError(f"{folder / 'rounds.csv'}: it lacks {what}, which summary.csv names; {AGAIN}")
        else:
            lines.append(f"| {label} | {chosen:.0f} | {100 * score:.1f} % | {100 * rounds.loc[chosen, column]:.1f} % |")
    return lines


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
    wanted = ("fedsim", "torch", "torchvision", "timm", "flwr")
    lines = []
    for rounds, table in all_environments(recorded):
        packages = table.get("packages", {})
        named = ", ".join(f"{name} {packages[name]}" for name in wanted if name in packages)
        lines.append(f"{rounds.strip().capitalize()}: {named}." if rounds else f"{named}.")
    return ["\n\n".join(lines)]
