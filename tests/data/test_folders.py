"""Image trees on disk: order, labels, counts and messages."""

import shutil

import numpy as np
import pytest

from fedsim.common.errors import UserError
from fedsim.data.benchmarks import benchmark
from fedsim.data.catalog import BENCHMARKS
from fedsim.data.folders import dataset_folder, list_domain
from fedsim.settings import DataSettings

PACS = BENCHMARKS["pacs"]


def write_names(folder, domain, counts, classes=PACS.classes):
    """Empty files named like images: listing reads names only."""
    for name, count in zip(classes, counts):
        (folder / domain / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            (folder / domain / name / f"pic_{index:03}.jpg").touch()


def test_label_is_the_rank_of_the_class_folder(tree_settings):
    data = tree_settings()
    listing = list_domain(data, benchmark(data), "photo")
    assert listing.files[:2] == ("cat/000.png", "cat/001.png")
    assert listing.labels.tolist() == [0] * 4 + [1] * 4
    assert [file.split("/")[0] for file in listing.files] == [("cat", "dog")[label] for label in listing.labels]


def test_order_equals_torchvisions_image_folder(tree_settings, tmp_path):
    from torchvision.datasets import ImageFolder

    data = tree_settings()
    nested = tmp_path / "images" / "photo" / "cat" / "more"
    nested.mkdir()
    for path in sorted((tmp_path / "images" / "photo" / "cat").glob("00[01].png")):
        path.rename(nested / path.name)
    listing = list_domain(data, benchmark(data), "photo")
    samples = ImageFolder(str(tmp_path / "images" / "photo")).samples
    assert [(str(listing.folder / file), label) for file, label in zip(listing.files, listing.labels)] == samples


def test_root_may_hold_the_domains_or_the_data_set(tmp_path):
    write_names(tmp_path / "deep" / "PACS", "photo", PACS.class_counts["photo"])
    for root in (tmp_path / "deep", tmp_path / "deep" / "PACS"):
        data = DataSettings(dataset="pacs", root=str(root))
        assert dataset_folder(data, PACS) == tmp_path / "deep" / "PACS"
        listing = list_domain(data, PACS, "photo")
        assert np.bincount(listing.labels).tolist() == list(PACS.class_counts["photo"])


def test_real_pacs_counts(real_data):
    data = DataSettings(dataset="pacs", root=str(real_data))
    for domain in PACS.domains:
        listing = list_domain(data, PACS, domain)
        assert tuple(np.bincount(listing.labels)) == PACS.class_counts[domain]
        assert {file.split("/")[0] for file, label in zip(listing.files, listing.labels) if label == 3} == {"guitar"}


def test_more_images_than_the_benchmark_are_accepted(tmp_path):
    write_names(tmp_path, "photo", [count + 1 for count in PACS.class_counts["photo"]])
    assert len(list_domain(DataSettings(dataset="pacs", root=str(tmp_path)), PACS, "photo").files) == 1670 + 7


def test_folders_of_programs_and_loops_of_links_are_no_images(tree_settings, tmp_path):
    """Thumbnails would be copies of training images in the validation part."""
    data, cat = tree_settings(), tmp_path / "images" / "photo" / "cat"
    before = list_domain(data, benchmark(data), "photo").files
    for name in ("@eaDir", ".thumbnails", "__MACOSX"):
        shutil.copytree(tmp_path / "images" / "art" / "cat", cat / name)
    shutil.copytree(tmp_path / "images" / "art", tmp_path / "images" / "photo" / "@eaDir")
    (cat / "loop").symlink_to(cat)
    (cat / "parent").symlink_to(tmp_path / "images" / "photo")
    files = list_domain(data, benchmark(data), "photo").files
    assert [file for file in files if not file.startswith("cat/parent/")] == list(before)
    assert sorted(file for file in files if file.startswith("cat/parent/")) == [
        f"cat/parent/dog/{index:03}.png" for index in range(4)
    ]


def test_shortfall_names_domain_class_and_counts(tmp_path):
    write_names(tmp_path, "photo", (189, 202, 182, 150, 199, 280, 431))
    with pytest.raises(UserError) as error:
        list_domain(DataSettings(dataset="pacs", root=str(tmp_path)), PACS, "photo")
    message = str(error.value)
    assert "PACS photo is incomplete" in message
    assert "guitar has 150 of 186 images, person has 431 of 432 images" in message
    assert "\n" not in message


def test_shortfall_of_a_benchmark_with_domain_totals_only(tmp_path):
    office = BENCHMARKS["office-home"]
    write_names(tmp_path, "Real World", [2] * 65, classes=[name.replace("_", " ") for name in office.classes])
    data = DataSettings(dataset="office-home", root=str(tmp_path))
    with pytest.raises(UserError, match=r"Office-Home Real_World is incomplete .* 130 of 4357 images"):
        list_domain(data, office, "Real_World")


def test_missing_and_unknown_folders(tmp_path):
    data = DataSettings(dataset="pacs", root=str(tmp_path))
    with pytest.raises(UserError, match=r"PACS: no domain folder \(art_painting, cartoon, photo, sketch\)"):
        list_domain(data, PACS, "photo")
    write_names(tmp_path, "photo", PACS.class_counts["photo"])
    with pytest.raises(UserError, match=r"domain 'sketch' has no folder"):
        list_domain(data, PACS, "sketch")
    (tmp_path / "photo" / "cat").mkdir()
    with pytest.raises(UserError, match=r"'cat' .* none of the benchmark's classes"):
        list_domain(data, PACS, "photo")
    write_names(tmp_path, "cartoon", (389, 457, 346), classes=PACS.classes[:3])
    with pytest.raises(UserError, match=r"4 of 7 class folders are missing .* first 'guitar' \(0 of 135 images\)"):
        list_domain(data, PACS, "cartoon")
    with pytest.raises(UserError, match=r"no folder .*absent; set data.root"):
        list_domain(DataSettings(dataset="pacs", root=str(tmp_path / "absent")), PACS, "photo")


def test_empty_class(tree_settings, tmp_path):
    data = tree_settings()
    for path in (tmp_path / "images" / "photo" / "dog").iterdir():
        path.unlink()
    with pytest.raises(UserError, match="no image of class 'dog'"):
        list_domain(data, benchmark(data), "photo")


def test_side_files_are_ignored_and_foreign_files_named(tree_settings, tmp_path):
    data = tree_settings()
    folder = tmp_path / "images" / "photo" / "cat"
    for name in ("Thumbs.db", ".DS_Store", "list.txt", "._000.png"):
        (folder / name).touch()
    (tmp_path / "images" / "README.md").touch()
    assert len(list_domain(data, benchmark(data), "photo").files) == 8
    (folder / "clip.mp4").touch()
    with pytest.raises(UserError, match=r"clip.mp4: not an image"):
        list_domain(data, benchmark(data), "photo")


@pytest.mark.parametrize("name", ["average", "Average"])
def test_no_domain_has_the_name_of_the_average(make_tree, name):
    """Its column in every table would hold the average of all domains."""
    data = DataSettings(dataset="folder", root=str(make_tree(("art", name, "photo"))))
    with pytest.raises(UserError, match=f"a domain cannot be called '{name}'"):
        benchmark(data)
    chosen = data.model_copy(update={"domains": ["art", "photo"]})
    assert benchmark(chosen).domains == ("art", "photo")
