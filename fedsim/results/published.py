"""Numbers printed in the papers, for settings that match ours.

`published.csv` is package data: paper and table, dataset, backbone, method, target domain, accuracy and spread in
percent. Same-named baselines differ between papers by points because of protocol: a row always carries its paper and
table, and is shown only where dataset, backbone, image size and initial weights are the paper's.
"""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pandas as pd

from fedsim.experiment import Experiment

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
# Printed name -> ours. Names not listed here are compared after dropping case and punctuation.
METHODS = {
    "FedAvg w/ MixStyle": "mixstyle",
    "FedAvg w/ RSC": "rsc",
    "RandAug": "randaugment",
    # «FedDG» in CSAC's and FedIG-A's tables is the amplitude exchange of Liu et al. (ELCFS), not FedDG-GA.
    "FedDG": "elcfs",
}
SHOWN = {"FedDG": "FedDG (ELCFS)"}
# CSAC's tables put these beside federated methods although they train on the pooled source data.
POOLED = ("JiGen", "MASF", "DGER", "DMG", "FACT", "Epi-FCR", "MixStyle", "EISNet", "CrossGrad", "MetaReg", "FeaCri")
PAPER_NOTES = {
    "gPerXAN": "gPerXAN: mean of 3 runs, no spread printed",
    "CSAC": "CSAC: ± is the standard error of 5 runs; its released code picks the best round on the target, "
    "take its own row as an upper estimate",
    "FedIG-A": "FedIG-A: ± is the standard deviation of 4 runs",
}


@cache
def _published() -> pd.DataFrame:
    frame = pd.read_csv(FILE, keep_default_na=False, na_values=[""])
    pooled = frame["paper"].str.startswith("CSAC") & frame["method"].isin(POOLED)
    return frame[~pooled].reset_index(drop=True)


def setting(experiment: Experiment) -> tuple[str, str] | None:
    """(dataset, backbone) as the papers print them, or None where our setting is not theirs.

    Theirs: the whole data set, one client per domain, 224-pixel images and ImageNet weights (Rotated MNIST: 28 pixels,
    CSAC's variant, random weights; Camelyon17: 96 pixels).
    """
    data, model = experiment.data, experiment.model
    dataset, backbone = DATASETS.get(data.dataset), BACKBONES.get(model.backbone)
    if dataset is None or backbone is None or data.image_size != IMAGE_SIZES.get(dataset, 224):
        return None
    if data.fraction != 1 or data.clients_per_domain != 1 or (data.domains and _lacks_domains(dataset, data.domains)):
        return None
    if dataset == "RotatedMNIST":
        return (dataset, backbone) if data.variant == "csac" and model.weights == "none" else None
    return (dataset, backbone) if model.weights == "imagenet" else None


def _lacks_domains(dataset: str, domains: Iterable[str]) -> bool:
    frame = _published()
    printed = set(frame.loc[frame["dataset"] == dataset, "target_domain"]) - {"average"}
    return not {_domain(name) for name in printed} <= {_domain(name) for name in domains}


def published_rows(experiment: Experiment, methods: Iterable[str], targets: Iterable[str]) -> pd.DataFrame:
    """Published numbers for our methods in this experiment's setting; empty where the setting is not a paper's.

    Columns: label, method (ours), source (paper and table), target (our name, or `average`), mean, std (fractions).
    A paper that prints one method in several tables gives one row, from its fullest table.
    """
    columns = ["label", "method", "source", "target", "mean", "std"]
    found = setting(experiment)
    if found is None:
        return pd.DataFrame(columns=columns)
    frame = _published()
    frame = frame[(frame["dataset"] == found[0]) & (frame["backbone"] == found[1])]
    ours = {_squeeze(method): method for method in methods}
    domains = {_domain(target): target for target in targets} | {"average": "average"}
    rows = frame.assign(
        method_name=frame["method"].map(lambda name: ours.get(_squeeze(METHODS.get(name, name)))),
        target=frame["target_domain"].map(lambda name: domains.get(_domain(name))),
        paper_name=frame["paper"].str.split(" Table").str[0],
    ).dropna(subset=["method_name", "target"])
    # Of several tables of one paper with the same method, the first of those with the most columns.
    size = rows.groupby(["method_name", "paper"])["target"].transform("size")
    rows = rows.assign(size=size).sort_values("size", ascending=False, kind="stable")
    source = rows.groupby(["method_name", "paper_name"])["paper"].transform("first")
    rows = rows[rows["paper"] == source].sort_index()
    # A printed average is over all of the data set's domains: it stands beside ours only where ours is, too.
    if not set(frame["target_domain"].map(_domain)) <= set(domains):
        rows = rows[rows["target"] != "average"]
    result = pd.DataFrame(
        {
            "label": rows["method"].replace(SHOWN),
            "method": rows["method_name"],
            "source": rows["paper"],
            "target": rows["target"],
            "mean": (rows["accuracy_percent"] / 100).round(6),
            "std": (rows["std_percent"] / 100).round(6),
        }
    )
    return result.reset_index(drop=True)


def paper_notes(sources: Iterable[str]) -> list[str]:
    """What a paper's ± and its protocol are, for the papers among the sources."""
    papers = dict.fromkeys(source.split(" Table")[0] for source in sources)
    return [PAPER_NOTES[paper] for paper in papers if paper in PAPER_NOTES]


def _squeeze(name: str) -> str:
    return re.sub(r"[^a-z0-9+]", "", name.lower())


def _domain(name: str) -> str:
    """`Real World`, `real_world` and `RealWorld` are one domain; so are `M15`, `15` and `rotated_15`."""
    squeezed = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(m|rot|rotated|rotation)(\d+)(deg)?$", r"\2", squeezed)
