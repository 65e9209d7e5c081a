"""What a run says about its data before the first round, and `fedsim methods NAME --data CONFIG` about its bytes."""

import json

import pytest
from image_trees import write_tree
from support import numbers, run_small, small_experiment, tiny_experiment

from fedsim.data.catalog import BENCHMARKS
from fedsim.methods.table import METHODS
from fedsim.run.plan import resolve
from fedsim.run.remarks import data_remarks
from fedsim.run.traffic import traffic
from fedsim.run.work import budget_remarks
from fedsim.settings.experiment import read_experiment


def test_a_run_says_and_records_it(tmp_path, caplog):
    root = write_tree(tmp_path / "tree", ("a", "b"), ("cat", "dog"), 6)
    write_tree(tmp_path / "tree", ("c",), ("cat", "emu"), 7, seed=100)
    data = {"dataset": "folder", "root": str(root), "domains": [], "classes": ["cat", "dog", "emu"], "fraction": 1}
    experiment = small_experiment(tmp_path / "out", data=data, train={"rounds": 1}, run={"target": "c"})
    folder, _ = run_small(experiment)
    said = json.loads((folder / "environment.json").read_text())["data_remarks"]
    assert said == [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said[0].startswith("no client has training images of emu, which c is tested on")


def test_a_method_that_trains_much_more_than_fedavg_says_so():
    """134 images in batches of 32 are 5 steps: (1,800 + 3 * 5) / (3 * 5) = 121, for 5 clients."""
    csac = ["method.name=csac", "method.semantic_calibration.acquire_iterations=1800"]
    plans = [
        resolve(read_experiment("digits", ["train.rounds=3", "train.batch_size=32", "train.epochs=1", *more]))
        for more in (csac, [*csac, "train.budget=images"], ["method.name=fedprox"])
    ]
    said, *silent = [budget_remarks(plan, [134] * 5) for plan in plans]
    assert silent == [[], []]
    assert said[0].startswith("csac trains on 120 times the images of FedAvg and takes 120 times its steps, 9,000 of ")


def test_more_images_than_published_and_classes_that_no_one_trains():
    pacs, even, person = BENCHMARKS["pacs"], [1] * 7, [1] * 6 + [0]
    assert data_remarks(pacs, {"photo": 1670, "sketch/0": 3929}, [even], "photo", even) == []
    (said,) = data_remarks(pacs, {"photo": 1670, "sketch/0": 3930}, [even], "photo", even)
    assert said.startswith("sketch has 3,930 images, and PACS was published with 3,929;")
    sources = [person, [2] * 6 + [0]]
    (said,) = data_remarks(pacs, {}, sources, "photo", even)
    assert said.startswith("no client has training images of person, which photo is tested on;")
    assert data_remarks(pacs, {}, sources, "photo", person) == []
    assert data_remarks(pacs, {}, [*sources, ()], "photo", even) == []  # a client has not answered yet


@pytest.mark.parametrize("method", ["perada", "scaffold", "fedig", "copa", "plan"])
def test_bytes_are_those_of_clients_csv(method, tmp_path):
    """Sums per client and round, and bytes of each bank, are equal from round 2 on, when every bank is filled."""
    model = dict(text.removeprefix("model.").split("=") for text in METHODS[method].tried_with)
    experiment = tiny_experiment(tmp_path, method, model=model, data={"image_size": 16} if model else {})
    folder, _ = run_small(experiment)
    clients = numbers(folder / "clients.csv").query("round == 2")
    rows = [row for row in traffic(resolve(experiment)) if row.when == "round"]
    for way in ("down", "up"):
        assert (clients[f"bytes_{way}"] == sum(getattr(row, way) for row in rows)).all()
    banks = {row.record.removeprefix("bank "): row for row in rows if row.record.startswith("bank ") and row.down}
    for name, row in banks.items():
        assert (clients[f"bytes_down_{name}"] == row.down).all()
    assert bool(banks) == (method in ("scaffold", "fedig", "copa"))


def test_amounts_that_depend_on_the_data_are_unknown():
    rows = {row.record: row for row in traffic(resolve(tiny_experiment("unused", "fada")))}
    assert rows["bank target_features"].down is None
    assert rows["target_attention"].when == rows["target_training"].when == "visit"
