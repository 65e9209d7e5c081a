"""What a run says about its data before the first round."""

import json

import pytest
from image_trees import write_tree
from support import run_small, small_experiment

from fedsim.data.catalog import BENCHMARKS
from fedsim.run.remarks import data_remarks


def test_more_images_than_published():
    pacs, even = BENCHMARKS["pacs"], [1] * 7
    assert data_remarks(pacs, {"photo": 1670, "sketch/0": 3929}, [even], "photo", even) == []
    (said,) = data_remarks(pacs, {"photo": 1670, "sketch/0": 3930}, [even], "photo", even)
    assert said.startswith("sketch has 3,930 images, and PACS was published with 3,929;")


@pytest.mark.parametrize("sources", [[[1] * 6 + [0], [2] * 6 + [0]]])
def test_classes_that_no_one_trains(sources):
    pacs = BENCHMARKS["pacs"]
    (said,) = data_remarks(pacs, {}, sources, "photo", [1] * 7)
    assert said.startswith("no client has training images of person, which photo is tested on;")
    assert data_remarks(pacs, {}, sources, "photo", [1] * 6 + [0]) == []
    assert data_remarks(pacs, {}, [*sources, ()], "photo", [1] * 7) == []  # a client has not answered yet


def test_a_run_says_and_records_it(tmp_path, caplog):
    root = write_tree(tmp_path / "tree", ("a", "b"), ("cat", "dog"), 6)
    write_tree(tmp_path / "tree", ("c",), ("cat", "emu"), 7, seed=100)
    data = {"dataset": "folder", "root": str(root), "domains": [], "classes": ["cat", "dog", "emu"], "fraction": 1}
    experiment = small_experiment(tmp_path / "out", data=data, train={"rounds": 1}, run={"target": "c"})
    folder, _ = run_small(experiment)
    said = json.loads((folder / "environment.json").read_text())["data_remarks"]
    assert said == [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said[0].startswith("no client has training images of emu, which c is tested on")
