"""Numbers printed in the papers, for settings that match ours.

`published.csv` is package data: paper and table, dataset, backbone, method, target domain, accuracy and spread in
percent. A baseline of the same name differs between papers by several points, because their protocols differ. A row is
therefore shown with its paper and table. Runs have it next to them only when they are of the same method (not of a
variant), under the paper's own protocol. That is a preset of the shipped experiment with nothing changed.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from fedsim.common.errors import UserError
from fedsim.common.lists import keys_of
from fedsim.data.benchmarks import AVERAGE
from fedsim.records.differences import ABSENT, comparable_settings, method_words, used_settings, value_text, with_values
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
# The columns of a file of more papers that a user adds.
TEXTS = ("paper", "dataset", "backbone", "method", "target_domain")
NEEDED = (*TEXTS, "accuracy_percent", "std_percent")


@cache
def _everything() -> pd.DataFrame:
    frame = pd.read_csv(FILE, keep_default_na=False, na_values=[""])
    camelyon = frame["dataset"] == "Camelyon17"  # gPerXAN names the hospitals H1 to H5, WILDS's metadata 0 to 4
    names = frame.loc[camelyon, "target_domain"]
    frame.loc[camelyon, "target_domain"] = names.str.replace(r"\d", _one_less, regex=True)
    return frame


def _one_less(number: re.Match[str]) -> str:
    return str(int(number.group()) - 1)


@cache
def federated() -> pd.DataFrame:
    """All rows of published.csv but those of methods that train on pooled data."""
    frame = _everything()
    is_of_csac = frame["paper"].str.startswith("CSAC")
    is_pooled = is_of_csac & frame["method"].isin(POOLED)
    return frame[~is_pooled].reset_index(drop=True)


def setting(experiment: Experiment) -> tuple[str, str] | None:
    """(dataset, backbone) as the papers print them, or None where our setting is not theirs.

    The papers use the whole data set, one client per domain, 224-pixel images and ImageNet weights (Rotated MNIST:
    28 pixels, CSAC's variant, random weights; Camelyon17: 96 pixels).
    """
    data, model = experiment.data, experiment.model
    dataset = DATASETS.get(data.dataset)
    backbone = BACKBONES.get(model.backbone)
    if dataset is None or backbone is None:
        return None
    if data.fraction != 1 or data.source_test or data.is_dealt or lacks_domains(dataset, data.domains):
        return None
    if data.clients_per_domain != 1 or data.image_size != IMAGE_SIZES.get(dataset, 224):
        return None
    if dataset == "RotatedMNIST":
        is_theirs = data.variant == "csac" and model.weights == "none"
    else:
        is_theirs = model.weights == "imagenet"
    return (dataset, backbone) if is_theirs else None


def lacks_domains(dataset: str, domains: Sequence[str]) -> bool:
    """Whether a list of domains lacks some of the printed ones; an empty list means all."""
    if not domains:
        return False
    frame = federated()
    printed = frame.loc[frame["dataset"] == dataset, "target_domain"]
    keys = set(map(domain_key, printed[printed != "average"]))
    return not keys <= set(map(domain_key, domains))


@dataclass(frozen=True)
class RunsOfTable:
    """The runs next to which papers' rows may be shown; each field has a value for each run.

    labels: a label other than the method's name is a variant
    lines: the row of our table that a run is in; a paper's row needs one row of ours with its protocol
    recorded: environment.json. Parts that its recipe does not have are no difference; its defaults are the values where
        a protocol gives none.
    """

    experiments: Mapping[str, Experiment]
    labels: Mapping[str, str]
    lines: Mapping[str, str]
    recorded: Mapping[str, Mapping[str, Any]]


def comparable_rows(runs: RunsOfTable, targets: Iterable[str]) -> tuple[pd.DataFrame, list[str]]:
    """The papers' rows of methods that we ran as the paper did, and notes on why other rows are left out."""
    experiments = list(runs.experiments.values())
    first = experiments[0]
    if why := _why_none(experiments):
        nothing = pd.DataFrame(columns=COLUMNS)
        if first.data.dataset not in DATASETS:
            return nothing, []
        return nothing, [f"No published number {why}"]
    names = dict.fromkeys(experiment.method_name for experiment in experiments)
    rows = published_rows(first, names, targets)
    shown = [rows[:0]]
    left_out: dict[tuple[str, str], list[str]] = {}  # {(paper, reason): the methods}
    for (method, source), printed in rows.groupby(["method", "source"], sort=False):
        paper = source.split(" Table")[0]
        if reason := _reason(paper, method, runs):
            methods = left_out.setdefault((paper, reason), [])
            methods.append(method)
        else:
            shown.append(printed)
    notes = []
    for (paper, reason), methods in left_out.items():
        named = ", ".join(methods)
        notes.append(f"No published number of {paper} next to {named}: {reason}.")
    return pd.concat(shown, ignore_index=True), notes


def _why_none(experiments: Sequence[Experiment]) -> str:
    """Why no paper's number can stand next to these runs; empty where one can."""
    settings = {setting(experiment) for experiment in experiments}
    if len(settings) > 1:
        return "next to rows with different data sets, backbones or settings of the papers."
    if None not in settings:
        return ""
    dataset = DATASETS.get(experiments[0].data.dataset, "")
    return (
        f"of {dataset}: the papers have all images of all domains, one client for each, images of "
        f"{IMAGE_SIZES.get(dataset, 224)} pixels, their own backbones, and the weights that these start from."
    )


def published_rows(experiment: Experiment, methods: Iterable[str], targets: Iterable[str]) -> pd.DataFrame:
    """Published numbers for our methods in this experiment's setting; empty when no paper has this setting.

    Columns: label, method (ours), source (paper and table), target (our name, or `average`), mean, std (fractions).
    A paper that prints one method in several tables gives one row, from its fullest table.
    """
    dataset, backbone = setting(experiment) or ("", "")
    frame = federated()
    of_dataset = frame[frame["dataset"] == dataset]
    of_network = of_dataset[of_dataset["backbone"] == backbone]
    return as_ours(of_network, methods, targets)


def as_ours(frame: pd.DataFrame, methods: Iterable[str], targets: Iterable[str]) -> pd.DataFrame:
    """Rows in the form of published.csv for one data set and backbone, under our names of methods and targets."""
    ours = {squeeze(method): method for method in methods}
    domains = {domain_key(target): target for target in targets}
    domains[AVERAGE] = AVERAGE
    squeezed = frame["method"].map(_squeezed_method)
    keys = frame["target_domain"].map(domain_key)
    rows = frame.assign(
        ours=squeezed.map(ours.get),
        target=keys.map(domains.get),
        paper_name=frame["paper"].str.split(" Table").str[0],
    )
    rows = _fullest(rows.dropna(subset=["ours", "target"]))
    # A printed average is shown only when ours is over the domains that are printed.
    if set(keys) | {AVERAGE} != set(domains):
        rows = rows[rows["target"] != AVERAGE]
    table = pd.DataFrame(
        {
            "label": rows["method"].replace(SHOWN),
            "method": rows["ours"],
            "source": rows["paper"],
            "target": rows["target"],
            "mean": _fraction(rows["accuracy_percent"]),
            "std": _fraction(rows["std_percent"]),
        }
    )
    return table.reset_index(drop=True)


def _fullest(rows: pd.DataFrame) -> pd.DataFrame:
    """Of several tables of one paper with the same method, the first of those with the most columns."""
    tables = rows.groupby(["ours", "paper"])
    ordered = rows.assign(size=tables["target"].transform("size"))
    ordered = ordered.sort_values("size", ascending=False, kind="stable")
    papers = ordered.groupby(["ours", "paper_name"])
    source = papers["paper"].transform("first")
    return ordered[ordered["paper"] == source].sort_index()


def _reason(paper: str, method: str, runs: RunsOfTable) -> str:
    """Why a paper's number of a method is not shown next to our runs; empty when it is shown."""
    ours = {}
    for run, experiment in runs.experiments.items():
        if experiment.method_name == method:
            ours[run] = experiment
    plain = [run for run in ours if runs.labels[run] == method]
    if not plain:
        variants = dict.fromkeys(runs.labels[run] for run in ours)
        return f"the runs are variants ({', '.join(variants)})"
    # Runs of one label have one recipe: settings that a run has besides one without any only repeat defaults.
    settings = [method_words(ours[run]) for run in plain]
    repeats_defaults = "" in settings
    differences: dict[str, list[str]] = {}  # {row of our table: what differs}
    for run in plain:
        protocol = protocol_of(paper, ours[run])
        if protocol is None:
            return f"its protocol is not shipped for {ours[run].data.dataset}"
        texts = differences.setdefault(runs.lines[run], [])
        record = runs.recorded.get(run, {})
        for text in _run_differences(ours[run], protocol, record):
            if not (repeats_defaults and text.startswith("method.")):
                texts.append(text)
    least = min(differences.values(), key=len)
    return f"not its protocol ({shortened(least)})" if least else ""


def _run_differences(experiment: Experiment, protocol: Experiment, record: Mapping[str, Any]) -> list[str]:
    """What differs between a run and a protocol, without parts that the recorded recipe does not have."""
    with_defaults = with_values(protocol, record.get("defaults", {}))
    ours = used_settings(experiment, record)
    theirs = used_settings(with_defaults, record)
    return protocol_differences(ours, theirs)


def protocol_differences(ours: Experiment, theirs: Experiment) -> list[str]:
    """A text like `data.holdout is 0.1, there 0.2` for every setting in which a run differs from a protocol."""
    here = _protocol_settings(ours)
    there = _protocol_settings(theirs)
    texts = []
    for key in keys_of([there, here]):
        if here.get(key) != there.get(key):
            value = value_text(here.get(key, ABSENT))
            printed = value_text(there.get(key, ABSENT))
            texts.append(f"{key} is {value}, there {printed}")
    return texts


def shortened(differences: Iterable[str]) -> str:
    """The first few of these texts in one line, without repetitions."""
    texts = list(dict.fromkeys(differences))
    shown = "; ".join(texts[:SHOWN_DIFFERENCES])
    more = len(texts) - SHOWN_DIFFERENCES
    return f"{shown} and {more} more" if more > 0 else shown


def _fraction(percent: pd.Series) -> pd.Series:
    """Printed percent as fractions. Unrounded, the 0.45 of a paper would be 0.5 in one table and 0.4 in another."""
    return (percent / 100).round(6)


def printed_numbers(paper: str, experiment: Experiment) -> pd.DataFrame:
    """The values of published.csv that a table prints for an experiment's data set and backbone.

    Columns: method (as printed), target (squeezed by `domain_key`), mean, std (fractions; NaN where none is printed).
    """
    frame = _everything()
    dataset = DATASETS.get(experiment.data.dataset)
    backbone = BACKBONES.get(experiment.model.backbone)
    is_dataset = frame["dataset"] == dataset
    is_backbone = frame["backbone"] == backbone
    is_paper = frame["paper"] == paper
    frame = frame[is_dataset & is_backbone & is_paper]
    table = pd.DataFrame(
        {
            "method": frame["method"],
            "target": frame["target_domain"].map(domain_key),
            "mean": _fraction(frame["accuracy_percent"]),
            "std": _fraction(frame["std_percent"]),
        }
    )
    return table.reset_index(drop=True)


def added_rows(
    file: Path,
    experiment: Experiment,
    methods: Iterable[str],
    targets: Iterable[str],
) -> tuple[pd.DataFrame, list[str]]:
    """(the rows of a user's file of this data set, backbone and these methods, a note on them).

    The file has the form of published.csv. Other settings are not compared, because fedsim does not know the papers'
    protocols. Raises UserError for a file that cannot be read or lacks a column, and for an accuracy that is no number
    from 0 to 100.
    """
    frame = _read_added(file)
    data, backbone = experiment.data.dataset, experiment.model.backbone
    names = {
        "dataset": (data, DATASETS.get(data, data)),
        "backbone": (backbone, BACKBONES.get(backbone, backbone)),
    }
    for column, ours in names.items():
        printed = frame[column].astype(str).map(squeeze)
        squeezed = [squeeze(name) for name in ours]
        frame = frame[printed.isin(squeezed)]
    rows = as_ours(frame, methods, targets)
    notes = []
    has_average = AVERAGE in set(frame["target_domain"].map(domain_key))
    if has_average and AVERAGE not in set(rows["target"]):
        notes.append(f"Averages of {file} are not shown: they are over other domains than those of these runs, or it "
                     "does not print these.")  # fmt: skip
    if rows.empty:
        return rows, [f"{file}: no row of {data}, {backbone}, these methods and domains.", *notes]
    return rows, [f"Rows of {file} are shown without a check that their protocol is that of these runs.", *notes]


def _read_added(file: Path) -> pd.DataFrame:
    """The rows of a user's file with its numbers checked."""
    if not file.is_file():
        raise UserError(f"--published {file}: no such file")
    try:
        frame = pd.read_csv(
            file,
            keep_default_na=False,
            na_values=[""],
            dtype=dict.fromkeys(TEXTS, str),
        )
    except ValueError as error:
        raise UserError(f"--published {file}: not a readable CSV file: {error}") from None
    lacking = [name for name in NEEDED if name not in frame]
    if lacking:
        columns = ", ".join(lacking)
        raise UserError(f"--published {file}: no column {columns}; needed: {', '.join(NEEDED)}")
    for name in TEXTS:
        frame[name] = frame[name].fillna("")
    for name in ("accuracy_percent", "std_percent"):
        numbers = pd.to_numeric(frame[name], errors="coerce")
        is_no_number = numbers.isna() & frame[name].notna()
        is_wrong = is_no_number | ~numbers.fillna(0).between(0, 100)
        if is_wrong.any():
            line = is_wrong.idxmax() + 2
            raise UserError(f"--published {file}: line {line}: {name} is no number from 0 to 100")
        frame[name] = numbers
    return frame


def protocol_of(paper: str, experiment: Experiment) -> Experiment | None:
    """The paper's protocol for the run's data set, backbone and method; None where no shipped experiment has it."""
    dataset, backbone = experiment.data.dataset, experiment.model.backbone
    presets = PROTOCOLS.get(paper, {})
    preset = presets.get((dataset, backbone))
    if preset is None:
        return None
    method = f"method.name={experiment.method_name}"
    try:
        return read_experiment(dataset, [method], preset)
    except UserError:  # a preset that is no longer there
        return None


def _protocol_settings(experiment: Experiment) -> dict[str, object]:
    """The settings that belong to a protocol; a list of domains that names all of them is left out."""
    data = experiment.data
    dataset = DATASETS.get(data.dataset)
    free = [*FREE_KEYS]
    if dataset and not lacks_domains(dataset, data.domains):
        free.append("data.domains")
    settings = comparable_settings(experiment)
    for key in free:
        settings.pop(key, None)
    return settings


def _squeezed_method(printed: str) -> str:
    return squeeze(METHODS.get(printed) or printed)


def squeeze(name: str) -> str:
    return re.sub(r"[^a-z0-9+]", "", name.lower())


def domain_key(name: str) -> str:
    """`Real World`, `real_world` and `RealWorld` are one domain; so are `M15`, `15` and `rotated_15`."""
    squeezed = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(m|rot|rotated|rotation)(\d+)(deg)?$", r"\2", squeezed)
