"""The card of a trained model: its training data and method, its results, and what to know before using it."""

import json
from pathlib import Path

import pandas as pd

from fedsim.data import source_domains
from fedsim.export.trained import TrainedModel
from fedsim.models.backbones import find_backbone
from fedsim.results.environment import all_environments
from fedsim.tasks import task_in


def card(model: TrainedModel) -> str:
    """Markdown text with data, method, domains, results, licence of the weights, limits and versions."""
    experiment, plan = model.experiment, model.plan
    method = plan.recipe.label(experiment.method_name)
    sources = source_domains(experiment.data, experiment.run.target, plan.data)
    sections = {
        f"{plan.data.title}: {method}": _summary(model, method),
        "Data": [
            f"Data set: {plan.data.title} ({plan.data.source or 'own images'}).",
            f"Trained on {', '.join(sources)}. No image of {experiment.run.target} was trained on.",
            f"Outputs: {', '.join(model.classes)}.",
        ],
        "Images": [
            f"{model.channels} channel(s), {model.image_size} x {model.image_size} pixels, both sides resized "
            "(bilinear, antialiased), values in [0, 1]; the model normalizes them itself.",
        ],
        "Method": [
            f"{method} ({plan.recipe.paper or 'no paper named'}), {experiment.train.rounds} rounds, seed "
            f"{experiment.run.seed}; inference rule {type(plan.recipe.infer).__name__}.",
            f"In addition to the model, clients disclosed: {plan.recipe.disclosure()}.",
        ],
        "Results": [*_results(model.file.parent), *([f"\n{model.remark}."] if model.remark else [])],
        "Weights": _weights(model),
        "Limits": [
            "The numbers were measured on one unseen domain with one seed. They may be different on another domain or "
            "with other cameras; measure them with `fedsim evaluate` before you rely on the model.",
        ],
        "Versions": _versions(model.file.parent),
    }
    parts = [f"{'#' if index == 0 else '##'} {title}\n\n" + "\n".join(lines)
             for index, (title, lines) in enumerate(sections.items())]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _summary(model: TrainedModel, method: str) -> list[str]:
    task, backbone = model.plan.data.task, model.experiment.model.backbone
    return [f"Model of images for {task}, {backbone}, trained by federated domain generalization "
            f"({method}). File: {model.file.name} of {'/'.join(model.file.parent.parts[-4:])}."]  # fmt: skip


def _results(folder: Path) -> list[str]:
    file = folder / "summary.csv"
    if not file.is_file():
        return ["The run has not finished; there is no summary."]
    row = pd.read_csv(file).iloc[0]
    task = task_in(row.index, "last_target_")
    return [
        f"| selection | round | {task.title} on the unseen domain | mean validation {task.title} on the sources |",
        "|---|---|---|---|",
        *(
            f"| {label} | {row[f'{key}_round']:.0f} | {100 * row[f'{key}_target_{task.metric}']:.1f} % | "
            f"{100 * row[f'{key}_mean_validation_{task.metric}']:.1f} % |"
            for key, label in (("best_validation", "best source validation (`best`)"), ("last", "last round (`last`)"))
        ),
    ]


def _weights(model: TrainedModel) -> list[str]:
    settings = model.experiment.model
    if settings.weights == "none":
        return ["Trained from random weights."]
    row = find_backbone(settings)
    licence = row.licence if settings.weights in row.sources else ""
    stated = f"licence: {licence}" if licence else "licence: not known to fedsim, see where they come from"
    return [f"Started from the weights `{settings.weights}` of {settings.backbone} ({stated}). ImageNet's images have "
            "terms of their own."]  # fmt: skip


def _versions(folder: Path) -> list[str]:
    file = folder / "environment.json"
    if not file.is_file():
        return ["Not recorded."]
    wanted = ("fedsim", "torch", "torchvision", "timm", "flwr")
    lines = []
    for rounds, table in all_environments(json.loads(file.read_text(encoding="utf-8"))):
        packages = table.get("packages", {})
        named = ", ".join(f"{name} {packages[name]}" for name in wanted if name in packages)
        lines.append(f"{rounds.strip().capitalize()}: {named}." if rounds else f"{named}.")
    return ["\n\n".join(lines)]
