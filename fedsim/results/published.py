"""Numbers printed in the papers, for settings that match ours.

`published.csv` is package data: paper and table, dataset, backbone, method, target domain, accuracy and spread in
percent. A baseline of the same name differs between papers by several points, because their protocols differ. A row is
therefore shown with its paper and table. It is shown only beside runs of the same method (not of a variant) under the
paper's own protocol, which is a preset of the shipped experiment with nothing changed.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from fedsim.common.errors import UserError
from fedsim.results.differences import ABSENT, comparable_settings, method_words, used_settings, value_text, with_values
from fedsim.settings.experiment import Experiment, read_experiment

FILE = Path(__file__).with_name("published.csv")
DATASETS = {
    "pacs": "PACS",
    "vlcs": "VLCS",
    "office-home": "OfficeHome",
    "rotated-mnist": "RotatedMNIST",
    "camelyon17": "Camelyon17",
}
BACKBONES = {
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "densenet121": "DenseNet-121",
    "alexnet": "AlexNet",
    "digits-cnn": "MNIST-CNN",
}
IMAGE_SIZES = {"RotatedMNIST": 28, "Camelyon17": 96}
# Printed name -> our name. Other names are compared without case and punctuation.
METHODS = {
    "FedAvg w/ MixStyle": "mixstyle",
    "FedAvg w/ RSC": "rsc",
    "RandAug": "randaugment",
    "SFA": "sfa-s",
    # «FedDG» in CSAC's and FedIG-A's tables is the amplitude exchange of Liu et al. (ELCFS), not FedDG-GA.
    "FedDG": "elcfs",
}
SHOWN = {"FedDG": "FedDG (ELCFS)"}
# CSAC's tables list these among federated methods, although they train on the pooled source data.
POOLED = ("JiGen", "MASF", "DGER", "DMG", "FACT", "Epi-FCR", "MixStyle", "EISNet", "CrossGrad", "MetaReg", "FeaCri")
# The preset with a paper's protocol, by paper, data set and backbone; an empty one is the file's base settings.
PROTOCOLS = {
    "CSAC": {("rotated-mnist", "digits-cnn"): "", ("vlcs", "alexnet"): "csac-alexnet"}
    | {(data, "resnet18"): "csac" for data in ("pacs", "vlcs")},
    "FedIG-A": {(data, "resnet18"): "fedig" for data in ("pacs", "vlcs", "office-home")},
    "gPerXAN": {("camelyon17", "densenet121"): "gperxan"}
    | {(data, "resnet50"): "gperxan" for data in ("pacs", "office-home")},
}
FREE_KEYS = ("data.split_seed",)  # no part of a protocol: the images that a seed draws (the table reports it)
SHOWN_DIFFERENCES = 4
COLUMNS = ["label", "method", "source", "target", "mean", "std"]


@cache
def _everything() -> pd.DataFrame:
    frame = pd.read_csv(FILE, keep_default_na=False, na_values=[""])
    camelyon = frame["dataset"] == "Camelyon17"  # gPerXAN names the hospitals H1 to H5, WILDS's metadata 0 to 4
    counted = frame.loc[camelyon, "target_domain"].str.replace(r"\d", lambda k: str(int(k.group()) - 1), regex=True)
    frame.loc[camelyon, "target_domain"] = counted
    return frame


@cache
def federated() -> pd.DataFrame:
    """All rows of published.csv but those of methods that train on pooled data."""
    frame = _everything()
    pooled = frame["paper"].str.startswith("CSAC") & frame["method"].isin(POOLED)
    return frame[~pooled].reset_index(drop=True)


def setting(experiment: Experiment) -> tuple[str, str] | None:
    """(dataset, backbone) as the papers print them, or None where our setting is not theirs.

    The papers use the whole data set, one client per domain, 224-pixel images and ImageNet weights (Rotated MNIST:
    28 pixels, CSAC's variant, random weights; Camelyon17: 96 pixels).
    """
    data, model = experiment.data, experiment.model
    dataset, backbone = DATASETS.get(data.dataset), BACKBONES.get(model.backbone)
    if dataset is None or backbone is None or data.image_size != IMAGE_SIZES.get(dataset, 224):
        return None
    if data.fraction != 1 or data.clients_per_domain != 1 or data.mix or _lacks_domains(dataset, data.domains):
        return None
    if dataset == "RotatedMNIST":
        return (dataset, backbone) if data.variant == "csac" and model.weights == "none" else None
    return (dataset, backbone) if model.weights == "imagenet" else None


def _lacks_domains(dataset: str, domains: Sequence[str]) -> bool:
    """Whether a list of domains lacks some of the printed ones; an empty list means all."""
    if not domains:
        return False
    frame = federated()
    printed = set(frame.loc[frame["dataset"] == dataset, "target_domain"]) - {"average"}
    return not {domain_key(name) for name in printed} <= {domain_key(name) for name in domains}


def beside(
    experiments: Mapping[str, Experiment],
    labels: Mapping[str, str],
    lines: Mapping[str, str],
    targets: Iterable[str],
    recorded: Mapping[str, Mapping[str, Any]],
) -> tuple[pd.DataFrame, list[str]]:
    """The papers' rows of methods that we ran as the paper did, and notes on why other rows are left out.

    experiments, labels: settings and label of each run. A label other than the method's name is a variant. lines: the
    row of our table that a run is in; a paper's row needs one row of ours with its protocol.
    recorded: environment.json of each run. Parts that its recipe does not have are no difference; its defaults are the
    values where a protocol gives none.
    """
    first, settings = next(iter(experiments.values())), {setting(experiment) for experiment in experiments.values()}
    name, why = DATASETS.get(first.data.dataset, ""), ""
    if len(settings) > 1:
        why = "beside rows with different data sets, backbones or settings of the papers."
    elif None in settings:
        why = f"of {name}: the papers have all images of all domains, one client for each, images of "
        why += f"{IMAGE_SIZES.get(name, 224)} pixels, their own backbones, and the weights that these start from."
    if why:
        return pd.DataFrame(columns=COLUMNS), [f"No published number {why}"] if name else []
    rows = published_rows(first, dict.fromkeys(one.method_name for one in experiments.values()), targets)
    kept = []
    left_out: dict[tuple[str, str], list[str]] = {}  # the methods by paper and reason
    for (method, source), own in rows.groupby(["method", "source"], sort=False):
        paper = source.split(" Table")[0]
        if reason := _reason(paper, method, experiments, labels, lines, recorded):
            left_out.setdefault((paper, reason), []).append(method)
        else:
            kept.append(own)
    notes = [
        f"No published number of {paper} beside {', '.join(methods)}: {reason}."
        for (paper, reason), methods in left_out.items()
    ]
    return (pd.concat(kept, ignore_index=True) if kept else rows[:0]), notes


def published_rows(experiment: Experiment, methods: Iterable[str], targets: Iterable[str]) -> pd.DataFrame:
    """Published numbers for our methods in this experiment's setting; empty when no paper has this setting.

    Columns: label, method (ours), source (paper and table), target (our name, or `average`), mean, std (fractions).
    A paper that prints one method in several tables gives one row, from its fullest table.
    """
    found, frame = setting(experiment) or ("", ""), federated()
    return as_ours(frame[(frame["dataset"] == found[0]) & (frame["backbone"] == found[1])], methods, targets)


def as_ours(frame: pd.DataFrame, methods: Iterable[str], targets: Iterable[str]) -> pd.DataFrame:
    """Rows in the form of published.csv for one data set and backbone, under our names of methods and targets."""
    ours = {squeeze(method): method for method in methods}
    domains = {domain_key(target): target for target in targets} | {"average": "average"}
    rows = frame.assign(
        method_name=frame["method"].map(lambda name: ours.get(squeeze(METHODS.get(name) or name))),
        target=frame["target_domain"].map(lambda name: domains.get(domain_key(name))),
        paper_name=frame["paper"].str.split(" Table").str[0],
    ).dropna(subset=["method_name", "target"])
    # Of several tables of one paper with the same method, the first of those with the most columns.
    size = rows.groupby(["method_name", "paper"])["target"].transform("size")
    rows = rows.assign(size=size).sort_values("size", ascending=False, kind="stable")
    source = rows.groupby(["method_name", "paper_name"])["paper"].transform("first")
    rows = rows[rows["paper"] == source].sort_index()
    # A printed average is over all of the data set's domains; it is shown only when ours is over all of them too.
    if not set(frame["target_domain"].map(domain_key)) <= set(domains):
        rows = rows[rows["target"] != "average"]
    return pd.DataFrame(
        {
            "label": rows["method"].replace(SHOWN),
            "method": rows["method_name"],
            "source": rows["paper"],
            "target": rows["target"],
            "mean": _fraction(rows["accuracy_percent"]),
            "std": _fraction(rows["std_percent"]),
        }
    ).reset_index(drop=True)


def _reason(
    paper: str,
    method: str,
    experiments: Mapping[str, Experiment],
    labels: Mapping[str, str],
    lines: Mapping[str, str],
    recorded: Mapping[str, Mapping[str, Any]],
) -> str:
    """Why a paper's number of a method is not shown beside our runs; empty when it is shown."""
    own = {run: experiment for run, experiment in experiments.items() if experiment.method_name == method}
    plain = [run for run in own if labels[run] == method]
    if not plain:
        variants = ", ".join(dict.fromkeys(labels[run] for run in own))
        return f"the runs are variants ({variants})"
    # Runs of one label have one recipe: settings that a run has beside one without any only repeat defaults.
    bare = any(not method_words(own[run]) for run in plain)
    found: dict[str, list[str]] = {}
    for run in plain:
        protocol = protocol_of(paper, own[run])
        if protocol is None:
            return f"its protocol is not shipped for {own[run].data.dataset}"
        record = recorded.get(run, {})
        theirs = used_settings(with_values(protocol, record.get("defaults", {})), record)
        differences = protocol_differences(used_settings(own[run], record), theirs)
        found.setdefault(lines[run], []).extend(
            text for text in differences if not (bare and text.startswith("method."))
        )
    least = min(found.values(), key=len)
    return f"not its protocol ({shortened(least)})" if least else ""


def protocol_differences(ours: Experiment, theirs: Experiment) -> list[str]:
    """A text like `data.holdout is 0.1, there 0.2` for every setting in which a run differs from a protocol."""
    own, other = _protocol_settings(ours), _protocol_settings(theirs)
    return [
        f"{key} is {value_text(own.get(key, ABSENT))}, there {value_text(other.get(key, ABSENT))}"
        for key in dict.fromkeys([*other, *own])
        if own.get(key) != other.get(key)
    ]


def shortened(differences: Iterable[str]) -> str:
    """The first few of these texts in one line, without repetitions."""
    found = list(dict.fromkeys(differences))
    more = f" and {len(found) - SHOWN_DIFFERENCES} more" if len(found) > SHOWN_DIFFERENCES else ""
    return "; ".join(found[:SHOWN_DIFFERENCES]) + more


def _fraction(percent: pd.Series) -> pd.Series:
    """Printed percent as fractions. Unrounded, the 0.45 of a paper would be 0.5 in one table and 0.4 in another."""
    return (percent / 100).round(6)


def printed_numbers(paper: str, experiment: Experiment) -> pd.DataFrame:
    """The values of published.csv that a table prints for an experiment's data set and backbone.

    Columns: method (as printed), target (squeezed by `domain_key`), mean, std (fractions; NaN where none is printed).
    """
    data, model = DATASETS.get(experiment.data.dataset), BACKBONES.get(experiment.model.backbone)
    frame = _everything()
    frame = frame[(frame["paper"] == paper) & (frame["dataset"] == data) & (frame["backbone"] == model)]
    return pd.DataFrame(
        {
            "method": frame["method"],
            "target": frame["target_domain"].map(domain_key),
            "mean": _fraction(frame["accuracy_percent"]),
            "std": _fraction(frame["std_percent"]),
        }
    ).reset_index(drop=True)


def protocol_of(paper: str, experiment: Experiment) -> Experiment | None:
    """The paper's protocol for the run's data set, backbone and method; None where no shipped experiment has it."""
    preset = PROTOCOLS.get(paper, {}).get((experiment.data.dataset, experiment.model.backbone))
    if preset is None:
        return None
    try:
        return read_experiment(experiment.data.dataset, [f"method.name={experiment.method_name}"], preset)
    except UserError:  # a preset that is no longer there
        return None


def _protocol_settings(experiment: Experiment) -> dict[str, object]:
    """The settings that belong to a protocol; a list of domains that names all of them is left out."""
    data = experiment.data
    known = DATASETS.get(data.dataset)
    free = {*FREE_KEYS} | ({"data.domains"} if known and not _lacks_domains(known, data.domains) else set())
    return {key: value for key, value in comparable_settings(experiment).items() if key not in free}


def squeeze(name: str) -> str:
    return re.sub(r"[^a-z0-9+]", "", name.lower())


def domain_key(name: str) -> str:
    """`Real World`, `real_world` and `RealWorld` are one domain; so are `M15`, `15` and `rotated_15`."""
    squeezed = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(m|rot|rotated|rotation)(\d+)(deg)?$", r"\2", squeezed)
