"""Every data set by name: a run of one round finishes on a tiny tree in the published layout."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from support import numbers

from fedsim.common.errors import UserError
from fedsim.data import BENCHMARKS, find_data
from fedsim.runtime.launch import launch
from fedsim.settings.experiment import Experiment, from_table, read_experiment

SIDE = 16
TWO_DOMAINS = {"domainnet": ["clipart", "real"], "domainnet-mini": ["clipart", "real"]}  # hundreds of classes


def image(path: Path, seed: int = 0, side: int = SIDE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def classes_tree(root: Path, name: str, each: int = 3) -> None:
    """domain/class/image."""
    row = BENCHMARKS[name]
    for place, domain in enumerate(TWO_DOMAINS.get(name, row.domains)):
        for label, class_ in enumerate(row.classes):
            for number in range(each):
                image(root / domain / class_ / f"{number}.png", 10_000 * place + 7 * label + number)


def digits_dg(root: Path) -> None:
    for place, domain in enumerate(BENCHMARKS["digits-dg"].domains):
        for part, count in (("train", 2), ("val", 1)):
            for digit in range(10):
                for number in range(count):
                    image(root / domain / part / str(digit) / f"{number}.png", 10 * place + digit)


def camelyon17(root: Path) -> None:
    rows = [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for index in range(60):
        slide = f"patient_{index:03d}_node_0"
        image(root / "patches" / slide / f"patch_{slide}_x_{index}_y_64.png", index, 96)
        rows.append(f"{index},{index:03d},0,{index},64,{index % 2},{index},{index // 12},0")
    (root / "metadata.csv").write_text("\n".join(rows) + "\n")


def fed_isic2019(root: Path) -> None:
    rows = ["image,target,center,fold,fold2"]
    for index in range(96):
        image(root / "ISIC_2019_Training_Input_preprocessed" / f"ISIC_{index:07d}.jpg", index)
        rows.append(f"ISIC_{index:07d},{index % 8},{index // 16},{'train' if index % 3 else 'test'},x")
    (root / "train_test_split").write_text("\n".join(rows) + "\n")


def rotated_mnist(root: Path) -> None:
    """The four IDX files: magic number, sizes, bytes."""
    draw = np.random.default_rng(0)
    (root / "raw").mkdir()
    for part, count in (("train", 1200), ("t10k", 200)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        sizes = (0x803, count, 28, 28)
        header = b"".join(number.to_bytes(4, "big") for number in sizes)
        pixels = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8).tobytes()
        (root / "raw" / f"{part}-images-idx3-ubyte").write_bytes(header + pixels)
        (root / "raw" / f"{part}-labels-idx1-ubyte").write_bytes(
            (0x801).to_bytes(4, "big") + count.to_bytes(4, "big") + labels.tobytes()
        )


TREES: dict[str, tuple[str, Callable[[Path], None] | None]] = {
    "pacs": ("PACS", None),
    "vlcs": ("VLCS", None),
    "office-home": ("OfficeHomeDataset_10072016", None),
    "terra-incognita": ("terra_incognita", None),
    "domainnet": ("DomainNet", None),
    "domainnet-mini": ("domainnet126", None),
    "office-caltech-10": ("office_caltech_10", None),
    "office-caltech-home": ("OfficeCaltechHome", None),
    "digits-dg": ("digits_dg", digits_dg),
    "camelyon17": ("camelyon17_v1.0", camelyon17),
    "fed-isic2019": ("fed_isic2019", fed_isic2019),
    "rotated-mnist": ("MNIST", rotated_mnist),
}
QUICK = ("digits-dg", "camelyon17")  # data sets that are not read like a plain tree


def tiny(name: str, tmp_path: Path, **sections: dict) -> Experiment:
    """One round of the smallest network on the row's data."""
    table = {
        "name": name,
        "data": {
            "dataset": name, "root": str(tmp_path / "data"), "cache": str(tmp_path / "cache"), "image_size": SIDE,
            "holdout": 0.34, "domains": TWO_DOMAINS.get(name, []),
        },
        "train": {"rounds": 1, "batch_size": 8},
        "run": {"output": str(tmp_path / "out"), "threads": 1, "device": "cpu"},
    }  # fmt: skip
    for section, values in sections.items():
        table[section] = {**table.get(section, {}), **values}
    return from_table(table)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in TREES])
def test_a_round_on_the_published_layout(name, tmp_path, monkeypatch):
    """All domains of the row are there: the last one is tested, and all others train."""
    monkeypatch.setitem(BENCHMARKS, name, replace(BENCHMARKS[name], counts=None, class_counts=None))
    folder, make = TREES[name]
    root = tmp_path / "data" / folder
    root.mkdir(parents=True)
    make(root) if make else classes_tree(root, name)
    experiment = tiny(name, tmp_path)
    find_data(experiment.data)
    run = launch(experiment)
    domains = TWO_DOMAINS.get(name, list(BENCHMARKS[name].domains))
    assert run == tmp_path / "out" / name / "fedavg" / domains[-1] / "seed0"
    clients, rounds = numbers(run / "clients.csv"), numbers(run / "rounds.csv")
    assert sorted(clients["domain"].unique()) == sorted(domains[:-1])
    assert rounds["target_accuracy"].between(0, 1).all()
    assert np.isfinite(rounds["train_loss"].dropna()).all()
    assert len(rounds["train_loss"].dropna()) == 1


@pytest.mark.parametrize("name", TREES)
def test_files_that_are_not_there_are_missed_before_anything_is_read(name, tmp_path):
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "data"))):
        find_data(tiny(name, tmp_path).data)


def test_every_row_of_files_is_tried_here():
    embedded, forms = {"digits", "digit-masks"}, {"folder", "table", "hugging-face", "masks"}
    assert set(BENCHMARKS) == set(TREES) | embedded | forms


def fundus(root: Path) -> None:
    """Sites with images and masks: 255 is the background, 128 the disc, and 0 the cup inside the disc."""
    rows, columns = np.mgrid[:48, :48]
    for site in range(1, 5):
        for number in range(6):
            image(root / f"Domain{site}" / "image" / f"g{number}.png", 10 * site + number, 48)
            distance = np.hypot(rows - 20 - number, columns - 24)
            mask = np.select([distance < 5, distance < 10], [0, 128], 255).astype(np.uint8)
            path = root / f"Domain{site}" / "mask" / f"g{number}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(mask).save(path)


def test_the_fundus_protocol_runs(tmp_path):
    """Two rounds of configs/fundus.toml with ELCFS on a tree in its layout, at 32 pixels with the small U-Net."""
    fundus(tmp_path)
    words = ["data.image_size=32", "model.backbone=unet-small", "train.rounds=2", "run.threads=1", "run.device=cpu",
             "method.name=elcfs", "run.target=Domain4", f"data.root={tmp_path}", f"data.cache={tmp_path / 'c'}",
             f"run.output={tmp_path / 'out'}"]  # fmt: skip
    experiment = read_experiment("fundus", words)
    run = launch(experiment)
    rounds = numbers(run / "rounds.csv")
    assert rounds["round"].tolist() == [0, 1, 2]
    assert rounds[["target_dice", "mean_validation_dice"]].stack().dropna().between(0, 1).all()
    assert np.isfinite(rounds["train_loss"].dropna()).all()
    summary = pd.read_csv(run / "summary.csv").iloc[0]
    assert {"last_target_dice", "best_validation_target_dice"} <= set(summary.index)
