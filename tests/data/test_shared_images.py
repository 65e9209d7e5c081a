"""Copies of the unseen domain's images in a source domain: counted by bytes, refused above a share, said below it."""

import json
import shutil

import numpy as np
import pytest
from image_trees import write_tree
from matplotlib.figure import Figure

from fedsim.common.errors import UserError
from fedsim.data import beside, load_client
from fedsim.data.shared_images import MOST_SHARED, shared_images
from fedsim.results import compare, read_runs
from fedsim.results.report import write_report
from fedsim.runtime.launch import launch
from fedsim.settings import DataSettings
from fedsim.settings.experiment import from_table


@pytest.fixture
def tree(tmp_path):
    return write_tree(tmp_path / "images", ["art", "photo", "sketch"], ["cat", "dog"], 15)


def settings(tree, **changes):
    return DataSettings(dataset="folder", root=str(tree), cache=str(tree.parent / "cache"), image_size=16, **changes)


def copy(tree, count, to="art", label="dog"):
    """Copy images of photo/cat under other names into a class of another domain."""
    for file in sorted((tree / "photo" / "cat").glob("*.png"))[:count]:
        shutil.copy(file, tree / to / label / f"copy-{file.name}")


def run(tree):
    place = {"target": "photo", "threads": 1, "output": str(tree.parent / "out"), "device": "cpu", "processes": 1}
    model, train = {"backbone": "digits-cnn-bn", "weights": "none"}, {"rounds": 1, "batch_size": 8}
    table = {"name": "own", "data": settings(tree).model_dump(), "model": model, "train": train, "run": place}
    return launch(from_table(table))


def test_copies_are_counted_by_their_bytes(tree):
    """Whatever their names and labels are. A file that is in two source domains counts once in the sum."""
    assert shared_images(settings(tree), "photo").record() == {}
    copy(tree, 3)
    copy(tree, 2, to="sketch", label="cat")
    found = shared_images(settings(tree), "photo")
    assert found.record() == {"target": "photo", "images": 30, "shared": 3, "sources": {"art": 3, "sketch": 2}}
    assert found.text() == "3 of the 30 images of photo (10.0 %) are also in art (3), sketch (2), byte for byte"
    assert shared_images(settings(tree, domains=["photo", "sketch"]), "photo").shared == 2
    assert shared_images(settings(tree), "sketch").sources == {"art": 2, "photo": 2}
    rotations = shared_images(DataSettings(dataset="digits"), "rot0")  # which have no files of their own
    assert (rotations.shared, rotations.text(), rotations.record()) == (0, "", {})
    copy(tree, 1, to="photo")  # the unseen domain has it twice
    assert shared_images(settings(tree), "photo").shared == 4


def test_the_digests_are_kept_with_the_decoded_images(tree, monkeypatch):
    """After the images are decoded no file is read for them. An entry of an earlier version gets them once."""
    copy(tree, 2)
    for domain in ("art", "photo", "sketch"):
        load_client(settings(tree), domain)
    kept = sorted((tree.parent / "cache").rglob("digests.npy"))
    assert len(kept) == 3
    for damage in (lambda: [file.unlink() for file in kept], lambda: np.save(kept[0], np.zeros((2, 3)))):
        damage()
        assert shared_images(settings(tree), "photo").shared == 2
        assert sorted((tree.parent / "cache").rglob("digests.npy")) == kept
    monkeypatch.setattr(beside, "digest", lambda content: pytest.fail("a file was read"))
    assert shared_images(settings(tree), "photo").shared == 2


def test_many_copies_are_refused_and_few_are_said_in_run_table_and_report(tree, caplog, monkeypatch):
    assert MOST_SHARED == 0.1
    copy(tree, 4)
    with pytest.raises(UserError, match=r"4 of the 30 images of photo \(13.3 %\) are also in art \(4\).*At most 10%"):
        run(tree)
    assert not list((tree.parent / "out").iterdir())
    assert shared_images(settings(tree), "sketch").shared == 0
    next((tree / "art" / "dog").glob("copy-*")).unlink()
    with caplog.at_level("WARNING", logger="fedsim"):
        folder = run(tree)
    assert any("3 of the 30 images of photo (10.0 %)" in record.getMessage() for record in caplog.records)
    assert json.loads((folder / "environment.json").read_text())["shared_images"]["shared"] == 3
    said = "source domains have the same files: 3 of 30 images of photo (in art 3)"
    assert any(said in note for note in compare(read_runs(tree.parent / "out")).notes)
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    assert said in write_report(tree.parent / "out").read_text()
