"""Facts of the benchmarks, and how settings refer to them."""

import re

import pytest
from image_trees import write_tree

from fedsim.common.errors import UserError
from fedsim.data import BENCHMARKS, benchmark, count_classes
from fedsim.data.benchmarks import unusable
from fedsim.data.inspect import inspect
from fedsim.settings import DataSettings

CLASSES = {
    "colored-digits": 2, "colored-mnist": 2,
    "pacs": 7, "drawings": 7, "vlcs": 5, "office-home": 65, "domainnet": 345, "domainnet-mini": 126,
    "office-caltech-home": 8, "camelyon17": 2, "fed-isic2019": 8, "table": 0, "hugging-face": 0, "masks": 1,
    "folder": 0, "arrays": 0, "hospitals": 2,
}  # fmt: skip


def test_published_totals():
    totals = {"pacs": 9991, "vlcs": 10729, "office-home": 15588, "digits": 6000, "rotated-mnist": 6000}
    assert {name: sum(BENCHMARKS[name].counts.values()) for name in totals} == totals
    columns = {"pacs": (1729, 1654, 1566, 1113, 1540, 943, 1446), "vlcs": (667, 2963, 1670, 559, 4870)}
    for name, expected in columns.items():
        assert tuple(map(sum, zip(*BENCHMARKS[name].class_counts.values()))) == expected
    assert BENCHMARKS["pacs"].classes[3] == "guitar"
    assert benchmark(DataSettings(dataset="rotated-mnist", variant="domainbed")).counts is None


@pytest.mark.parametrize("name", BENCHMARKS)
def test_domains_and_classes_are_sorted_as_image_folder_sorts_them(name):
    found = BENCHMARKS[name]
    assert list(found.domains) == sorted(found.domains)
    assert list(found.classes) == sorted(found.classes)
    assert len(set(found.classes)) == CLASSES.get(name, 10)
    assert found.counts is None or set(found.counts) == set(found.domains)
    assert not any(map(unusable, found.domains))


@pytest.mark.parametrize(("settings", "domains"), [
    ({"dataset": "pacs", "domains": ["sketch", "cartoon"]}, ("cartoon", "sketch")),
    *(({"dataset": "office-home", "domains": [name, "Art"]}, ("Art", "Real_World"))
      for name in ("Real World", "RealWorld", "Real_World", "real-world")),
])  # fmt: skip
def test_a_subset_keeps_the_benchmarks_order_and_environment(settings, domains):
    found = benchmark(DataSettings(**settings))
    assert found.domains == domains
    assert found.environment(domains[1]) == 3


def test_a_site_knows_what_it_lacks_from_the_settings(tmp_path):
    """Other domains, or all of them without images; classes without a folder or with an empty one."""
    write_tree(write_tree(tmp_path, ["a"], ["cat", "dog"], 1), ["c"], ["dog"], 2)
    (tmp_path / "c" / "elk").mkdir()
    data = DataSettings(dataset="folder", root=str(tmp_path), classes=["cat", "dog", "elk"], domains=["c", "b", "a"])
    assert (benchmark(data).domains, benchmark(data).environment("c")) == (("a", "b", "c"), 2)
    assert count_classes(data, "a") == (("cat", "dog", "elk"), (1, 1, 0))
    assert count_classes(data, "c") == (("cat", "dog", "elk"), (0, 2, 0))
    absent = benchmark(data.model_copy(update={"root": str(tmp_path / "absent")}))
    assert (absent.domains, absent.classes) == (("a", "b", "c"), ("cat", "dog", "elk"))


SPELLING = r"the classes 'Cat' and 'cat' differ in spelling only; make them equal"
TREE = {"a": ["cat", "dog"], "b": ["cat", "dog"]}


@pytest.mark.parametrize(("tree", "changes", "message"), [
    (None, {"dataset": "pcas"}, "did you mean 'pacs'"),
    (None, {"dataset": "pacs", "domains": ["foto"]}, "did you mean 'photo'"),
    *((None, {"dataset": "office-home", "domains": names}, r"data.domains has '\w+' twice; write each name once")
      for names in (["Art", "Art", "Clipart"], ["RealWorld", "Art", "Real World"])),
    *((None, {"classes": names}, r"data.classes has '\w+' twice; write each name once")
      for names in (["cat", "dog", "dog"], ["v\u00e9lo", "dog", "ve\u0301lo"])),
    (None, {"root": "absent"}, r"no folder of images .*absent; .*needs data.domains and data.classes"),
    ({}, {}, "no domain folders"),
    (TREE, {"domains": ["a", "bb"]}, "did you mean 'b'"),
    ({**TREE, "c": ["bird", "cat", "dog"]}, {}, r"different class folders \(bird\)"),
    (TREE, {"classes": ["cat", "ant"]}, r"not data.classes \(dog\)"),
    ({"a": ["cat", "dog"], "b": ["Cat", "dog"]}, {"classes": ["cat", "Cat", "dog"]}, SPELLING),
    ({"a": ["cat", "dog"], "A": ["cat", "dog"]}, {}, "the domains 'A' and 'a' differ in spelling only"),
    *(({**TREE, name: ["cat", "dog"]}, {}, f"a domain cannot be called '{name}'")  # tables have a column of this name
      for name in ("average", "Average")),
])  # fmt: skip
def test_settings_and_folders_that_cannot_be_meant(tmp_path, tree, changes, message):
    for domain, names in (tree or {}).items():
        write_tree(tmp_path / "data", [domain], names, 1)
    (tmp_path / "data").mkdir(exist_ok=True)
    data = {"dataset": "folder", **changes, "root": str(tmp_path / changes.get("root", "data"))}
    with pytest.raises(UserError, match=rf"\A.*(?:{message}).*\Z"):
        benchmark(DataSettings(**data))


@pytest.mark.parametrize("name", ["A/x", ".", "..", "average", "All", "no-target"])
def test_a_name_that_cannot_be_a_folder_is_refused(tmp_path, name):
    """The folder of a run with this target would be another one; the table is refused where it is inspected, too."""
    file, rows = tmp_path / "mine.csv", "1.png,cat,{0}\n2.png,dog,{0}\n3.png,cat,B\n4.png,dog,B\n"
    data = DataSettings(dataset="table", root=str(file))
    for allowed in ("A x", "A\\x", "...", "..b"):
        file.write_text("path,label,domain\n" + rows.format(allowed))
        assert allowed in benchmark(data).domains
    file.write_text("path,label,domain\n" + rows.format(name))
    for read, argument in ((benchmark, data), (inspect, file)):
        with pytest.raises(UserError, match=f"a domain cannot be called '{re.escape(name)}'.*; rename it"):
            read(argument)
