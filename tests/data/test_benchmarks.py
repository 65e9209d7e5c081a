"""Facts of the benchmarks, and how settings refer to them."""

import subprocess
import sys

import pytest
from PIL import Image

from fedsim.common.errors import UserError
from fedsim.data import BENCHMARKS, benchmark, count_classes, resolve_domain
from fedsim.data.benchmarks import unusable
from fedsim.data.inspect import inspect
from fedsim.settings import DataSettings


def test_published_totals():
    totals = {"pacs": 9991, "vlcs": 10729, "office-home": 15588, "digits": 6000, "rotated-mnist": 6000}
    assert {name: sum(BENCHMARKS[name].counts.values()) for name in totals} == totals


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("pacs", (1729, 1654, 1566, 1113, 1540, 943, 1446)),
        ("vlcs", (667, 2963, 1670, 559, 4870)),
    ],
)
def test_class_totals(name, columns):
    assert tuple(map(sum, zip(*BENCHMARKS[name].class_counts.values()))) == columns


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "folder"])
def test_domains_and_classes_are_sorted_as_image_folder_sorts_them(name):
    found = BENCHMARKS[name]
    assert list(found.domains) == sorted(found.domains)
    assert list(found.classes) == sorted(found.classes)
    assert len(set(found.classes)) == {
        "pacs": 7,
        "vlcs": 5,
        "office-home": 65,
        "domainnet": 345,
        "domainnet-mini": 126,
        "office-caltech-home": 8,
        "camelyon17": 2,
        "fed-isic2019": 8,
        "table": 0,
        "hugging-face": 0,
        "masks": 1,
    }.get(name, 10)
    assert found.counts is None or set(found.counts) == set(found.domains)


def test_guitar_is_class_three():
    assert BENCHMARKS["pacs"].classes[3] == "guitar"


def test_subset_keeps_the_benchmarks_order_and_environment():
    found = benchmark(DataSettings(dataset="pacs", domains=["sketch", "cartoon"]))
    assert found.domains == ("cartoon", "sketch")
    assert found.environment("sketch") == 3


@pytest.mark.parametrize("name", ["Real World", "RealWorld", "Real_World", "real-world"])
def test_office_home_spellings(name):
    assert resolve_domain(BENCHMARKS["office-home"], name) == "Real_World"
    assert benchmark(DataSettings(dataset="office-home", domains=[name, "Art"])).domains == ("Art", "Real_World")


def test_unknown_names_get_the_nearest_one():
    with pytest.raises(UserError, match="did you mean 'pacs'"):
        benchmark(DataSettings(dataset="pcas"))
    with pytest.raises(UserError, match="did you mean 'photo'"):
        benchmark(DataSettings(dataset="pacs", domains=["foto"]))


def test_domainbed_variant_has_no_fixed_counts():
    assert benchmark(DataSettings(dataset="rotated-mnist", variant="domainbed")).counts is None


def test_folder_is_discovered_from_disk(tree_settings):
    found = benchmark(tree_settings())
    assert found.domains == ("art", "photo", "sketch")
    assert found.classes == ("cat", "dog")
    assert found.channels == 3


def test_a_site_with_one_domain_knows_the_others_from_the_settings(make_tree, tmp_path):
    root = make_tree(domains=("photo",))
    found = benchmark(DataSettings(dataset="folder", root=str(root), domains=["sketch", "photo", "art"]))
    assert found.domains == ("art", "photo", "sketch")
    assert found.environment("photo") == 1


def test_folder_problems_are_one_line(tree_settings, tmp_path):
    with pytest.raises(UserError, match="did you mean 'photo'"):
        benchmark(tree_settings(domains=["art", "phot"]))
    with pytest.raises(UserError, match=r"no folder .*absent with the images; .*needs data.domains and data.classes"):
        benchmark(tree_settings(root=str(tmp_path / "absent")))
    (tmp_path / "images" / "photo" / "bird").mkdir()
    with pytest.raises(UserError, match=r"different class folders \(bird\)"):
        benchmark(tree_settings())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no domain folders"):
        benchmark(tree_settings(root=str(tmp_path / "empty")))


def test_listing_benchmarks_needs_no_torch():
    code = "import sys, fedsim.data.benchmarks; print({'torch', 'torchvision', 'PIL', 'sklearn'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_server_without_images_knows_a_folder_data_set_by_its_settings(tmp_path):
    """The sites have the images, and their class folders are checked against the settings."""
    settings = DataSettings(dataset="folder", root=str(tmp_path / "absent"), domains=["b", "a"], classes=["y", "x"])
    assert benchmark(settings).domains == ("a", "b")
    assert benchmark(settings).classes == ("x", "y")
    for name in ("a", "b"):
        for label in ("x", "z"):
            (tmp_path / "site" / name / label).mkdir(parents=True)
    with pytest.raises(UserError, match=r"not data.classes \(z\)"):
        benchmark(settings.model_copy(update={"root": str(tmp_path / "site")}))


def test_named_classes_may_be_absent_from_a_domain(tmp_path):
    """A class without a folder or with an empty folder has zero images; an unknown class and no image are errors."""
    for name in ("a/cat/1.png", "a/dog/1.png", "b/dog/1.png", "b/dog/2.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    (tmp_path / "b" / "elk").mkdir()
    data = DataSettings(dataset="folder", root=str(tmp_path), classes=["cat", "dog", "elk"])
    assert benchmark(data).classes == ("cat", "dog", "elk")
    assert count_classes(data, "a") == (("cat", "dog", "elk"), (1, 1, 0))
    assert count_classes(data, "b") == (("cat", "dog", "elk"), (0, 2, 0))
    with pytest.raises(UserError, match="different class folders"):
        benchmark(DataSettings(dataset="folder", root=str(tmp_path)))
    with pytest.raises(UserError, match=r"not data.classes \(dog\)"):
        benchmark(DataSettings(dataset="folder", root=str(tmp_path), classes=["cat", "ant"]))


@pytest.mark.parametrize("name", ["A/x", ".", "..", "average"])
def test_a_name_that_cannot_be_a_folder_is_refused_in_one_line(tmp_path, name):
    """The folder of a run with this target would be another one; the table is refused where it is inspected, too."""
    file = tmp_path / "mine.csv"
    for one, fits in ((name, False), ("A x", True), ("A\\x", True), ("...", True), ("..b", True)):
        file.write_text(f"path,label,domain\n1.png,cat,{one}\n2.png,dog,{one}\n3.png,cat,B\n4.png,dog,B\n")
        data = DataSettings(dataset="table", root=str(file))
        if fits:
            assert one in benchmark(data).domains
            continue
        for read, argument in ((benchmark, data), (inspect, file)):
            with pytest.raises(UserError, match=r"a domain cannot be called '.*; rename it") as caught:
                read(argument)
            assert repr(name) in str(caught.value)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_names_of_the_benchmarks_can_be_used(name):
    assert not any(map(unusable, BENCHMARKS[name].domains))
