"""Copies: of the unseen domain's images, of a whole domain, between source domains, and pictures that look alike."""

import json
import shutil

import numpy as np
import pytest
from image_trees import write_tree
from matplotlib.figure import Figure
from PIL import Image

from fedsim.analysis import compare
from fedsim.analysis.provenance import provenance_notes, shared_notes
from fedsim.analysis.report import write_report
from fedsim.common.errors import UserError
from fedsim.data import benchmark, cached_digests, load_client
from fedsim.data.cache import Entry
from fedsim.data.cached_digests import image_looks
from fedsim.data.fingerprint import difference, fingerprints, refuse_equal_domains
from fedsim.data.image_tree import ImageTree
from fedsim.data.shared_images import MOST_SHARED, near_copies, shared_images
from fedsim.records import read_runs
from fedsim.runtime.launch import launch
from fedsim.settings import DataSettings
from fedsim.settings.experiment import from_table


@pytest.fixture
def tree(tmp_path):
    return write_tree(tmp_path / "images", ["art", "photo", "sketch"], ["cat", "dog"], 15)


def settings(tree, **changes):
    return DataSettings(
        dataset="folder", root=str(tree), cache=str(tree.parent / "cache"), **{"image_size": 16, **changes}
    )


def copy(tree, count, to="art", label="dog"):
    for file in sorted((tree / "photo" / "cat").glob("*.png"))[:count]:
        shutil.copy(file, tree / to / label / f"copy-{file.name}")


def run(tree, **more):
    place = {"target": "photo", "threads": 1, "output": str(tree.parent / "out"), "device": "cpu", "processes": 1}
    model, train = {"backbone": "digits-cnn-bn", "weights": "none"}, {"rounds": 1, "batch_size": 8}
    table = {"name": "own", "data": settings(tree).model_dump(), "model": model, "train": train, "run": place | more}
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
    found, said = shared_images(settings(tree), "photo"), "2 of the 31 images of photo are also in another class, "
    assert (found.shared, found.notes()[1]) == (4, said + "byte for byte")


def test_the_digests_are_kept_with_the_decoded_images(tree, monkeypatch):
    """After the images are decoded no file is read for them. An entry that lost them gets them once."""
    copy(tree, 2)
    for domain in ("art", "photo", "sketch"):
        load_client(settings(tree), domain)
    kept = sorted((tree.parent / "cache").rglob("digests.npy"))
    assert len(kept) == 3
    for damage in (lambda: [file.unlink() for file in kept], lambda: np.save(kept[0], np.zeros((2, 3)))):
        damage()
        assert shared_images(settings(tree), "photo").shared == 2
        assert sorted((tree.parent / "cache").rglob("digests.npy")) == kept
    monkeypatch.setattr(cached_digests, "digests_of", lambda listing: pytest.fail("a file was read"))
    assert shared_images(settings(tree), "photo").shared == 2


def test_many_copies_are_refused_and_few_are_said_in_run_table_and_report(tree, caplog, monkeypatch):
    assert MOST_SHARED == 0.1
    copy(tree, 4)
    for more in ({}, {"validation_domain": "art"}):  # on which the round would be selected
        with pytest.raises(UserError, match=r"4 of the 30 images of photo \(13.3 %\) are also in art .*At most 10%"):
            run(tree, **more)
    assert not list((tree.parent / "out").iterdir())
    next((tree / "art" / "dog").glob("copy-*")).unlink()
    folder = run(tree)
    assert any("3 of the 30 images of photo (10.0 %)" in record.getMessage() for record in caplog.records)
    assert json.loads((folder / "environment.json").read_text())["shared_images"]["shared"] == 3
    said = "domains that train or select have the same files: 3 of 30 images of photo (in art 3)"
    assert any(said in note for note in compare(read_runs(tree.parent / "out")).notes)
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    assert said in write_report(tree.parent / "out").read_text()


def picture(seed):
    few = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(few).resize((90, 80), Image.Resampling.BICUBIC)


@pytest.mark.parametrize(("ending", "options"), [("bmp", {}), ("jpg", {"quality": 90})])
def test_the_same_picture_in_training_and_validation_is_said(tree, ending, options):
    """Each picture of art is there twice. Only pairs that the split parts, and inside one class, count."""
    for name, first in (("cat", 100), ("dog", 200)):
        for file in (tree / "art" / name).iterdir():
            file.unlink()
        for seed in range(first, first + 10):
            picture(seed).save(tree / "art" / name / f"{seed}.png")
            picture(seed).save(tree / "art" / name / f"{seed}-again.{ending}", **options)
    data = settings(tree, holdout=0.3, image_size=64)
    found, client = shared_images(data, "sketch"), load_client(data, "art")
    files = np.array([name.split("/")[-1].split(".")[0].split("-")[0] for name in listing_of(data, "art").files])
    parted, count = int(np.isin(files[client.validation], files[client.train]).sum()), len(client.validation)
    assert 0 < parted < count
    assert found.record() == {"validation": {"art": (parted, count)}}
    said = f"{parted} of the {count} validation images of art look like a training image of their class"
    assert found.notes() == [said]
    assert shared_notes({"run": {"shared_images": found.record()}}) == [f"Copies: {said}."]


def listing_of(data, domain):
    return ImageTree(data, benchmark(data)).listing(domain)


def test_two_source_domains_with_the_same_files_are_one_remark(tree):
    copy(tree, 4)
    data, said = settings(tree), "art and photo share 4 images, 13.3% of the smaller domain, byte for byte"
    assert shared_images(data, "sketch").notes() == [said]
    data._validation_domain = "photo"
    assert shared_images(data, "sketch").notes() == [said]


def test_looks_by_hand(tmp_path):
    """A side of 20 pixels has parts of 2 and 3; a part that differs by 4 is another picture, 3 is the same."""
    pixels = np.zeros((20, 20, 3), np.uint8)
    pixels[:2, :2] = (10, 20, 30)
    pixels[2:5, 2:5, 0] = np.arange(9).reshape(3, 3)
    tree = write_tree(tmp_path / "images", ["art"], ["cat", "dog"], 1)
    Image.fromarray(pixels).save(tree / "art" / "cat" / "000.png")
    found = image_looks(Entry(listing_of(settings(tree), "art"), "folder", "art", 20, tmp_path / "cache"))
    looks = found[0].reshape(3, 8, 8)
    assert looks[:, 0, 0].tolist() == [10, 20, 30]
    assert looks[0, 1, 1] == 4
    others = np.array([[10, 20], [100, 100]], np.uint8)
    assert [near_copies(np.array([own], np.uint8), others) for own in ([13, 17], [14, 20], [6, 24])] == [1, 0, 0]


SAID = r"the domains 'art' and 'copy' of .* have the same 8 images with the same labels; remove one"


@pytest.fixture
def copied(tree_settings, tmp_path):
    data, copy = tree_settings(), tmp_path / "images" / "copy"
    assert len(fingerprints(data)) == 3
    shutil.copytree(tmp_path / "images" / "art", copy)
    return data, copy


def test_a_copied_linked_or_renamed_domain_is_refused(copied):
    data, copy = copied
    with pytest.raises(UserError, match=SAID):
        fingerprints(data)
    assert len(fingerprints(data.model_copy(update={"domains": ["copy", "photo"]}))) == 2
    (copy / "cat" / "000.png").rename(copy / "cat" / "other.png")
    with pytest.raises(UserError, match=SAID):
        fingerprints(data)
    (copy / "cat" / "other.png").rename(copy / "dog" / "other.png")  # another label
    assert len(fingerprints(data)) == 4
    shutil.rmtree(copy)
    copy.symlink_to(copy.parent / "art")
    with pytest.raises(UserError, match=SAID):
        fingerprints(data)


def test_the_sites_of_a_deployment_are_compared(tree_settings):
    """Two sites of one domain may have the same folder, of which each takes its own part; digits are rotations."""
    found = benchmark(tree_settings())
    own, other = ({"images": 8, "content": letter * 20} for letter in "ab")
    refuse_equal_domains(found, {"art/0": own, "art/1": own, "photo": other})
    with pytest.raises(UserError, match=SAID):
        refuse_equal_domains(found, {"art": own, "photo": other, "copy": own})
    for dataset in ("digits", "digit-masks"):
        assert len({own["content"] for own in fingerprints(DataSettings(dataset=dataset)).values()}) == 1


def test_a_new_folder_beside_the_chosen_domains_is_noticed(copied):
    """What fingerprints of a run on the old splits differ in."""
    data, copy = copied
    chosen = data.model_copy(update={"domains": ["art", "photo", "sketch"]})
    shutil.rmtree(copy)
    before = fingerprints(chosen)
    assert [own["environment"] for own in before.values()] == [0, 1, 2]
    assert difference(before, before) == ""
    shutil.copytree(copy.parent / "photo" / "cat", copy.parent / "cartoon" / "cat")
    shutil.copytree(copy.parent / "sketch" / "dog", copy.parent / "cartoon" / "dog")
    assert "photo: it was domain 1 of all and is domain 2 now" in difference(before, fingerprints(chosen))


def test_a_comparison_of_runs_with_other_splits_says_so():
    runs = {name: {"data": {"photo": {"environment": number}}} for name, number in (("one", 0), ("two", 1))}
    (said,) = provenance_notes(runs)
    assert "number of photo among all domains, which seeds its split, 0 (one), 1 (two)" in said
    assert provenance_notes({"one": runs["one"], "old": {"data": {"photo": {}}}}) == []
