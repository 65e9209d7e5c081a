"""Names of classes and domains that are written twice or in two ways."""

import numpy as np
import pandas as pd
import pytest
from image_trees import write_tree
from PIL import Image

from fedsim.common.errors import UserError
from fedsim.data import benchmark
from fedsim.settings import DataSettings

SAID = r"the (classes|labels) 'Cat' and 'cat' differ in spelling only; make them equal"


def table(tmp_path, rows):
    """Settings of a table with these (label, domain); images are not opened."""
    frame = pd.DataFrame(
        [(f"{number}.png", *row) for number, row in enumerate(rows)], columns=["path", "label", "domain"]
    )
    frame.to_csv(tmp_path / "mine.csv", index=False)
    return DataSettings(dataset="table", root=str(tmp_path / "mine.csv"))


def hugging_face(tmp_path, rows):
    """Settings of a saved data set with these (label, domain)."""
    datasets = pytest.importorskip("datasets")
    labels, domains = zip(*rows)
    images = [Image.fromarray(np.zeros((8, 8, 3), np.uint8))] * len(rows)
    columns = {"image": images, "label": list(labels), "domain": list(domains)}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "saved")
    return DataSettings(dataset="hugging-face", root=str(tmp_path / "saved"))


@pytest.mark.parametrize("form", [table, hugging_face])
def test_a_label_in_two_spellings_is_refused(form, tmp_path):
    rows = [("cat", "a"), ("dog", "a"), ("Cat", "b"), ("dog", "b")]
    with pytest.raises(UserError, match=SAID):
        benchmark(form(tmp_path, rows))


@pytest.mark.parametrize("form", [table, hugging_face])
def test_labels_that_a_domain_has_side_by_side_are_two_classes(form, tmp_path):
    """Capital and small letters, for example, are the classes of handwriting."""
    rows = [("A", "x"), ("a", "x"), ("a", "y"), ("1_0", "y"), ("10", "y")]
    assert benchmark(form(tmp_path, rows)).classes == ("10", "1_0", "A", "a")


@pytest.mark.parametrize("form", [table, hugging_face])
def test_a_domain_in_two_spellings_is_refused_unless_it_is_chosen(form, tmp_path):
    data = form(tmp_path, [("cat", "Site A"), ("dog", "site_a"), ("cat", "b")])
    with pytest.raises(UserError, match="the domains 'Site A' and 'site_a' differ in spelling only"):
        benchmark(data)
    chosen = data.model_copy(update={"domains": ["b", "site_a"]})
    assert benchmark(chosen).domains == ("b", "site_a")


def test_a_class_of_the_settings_is_spelled_as_in_the_table(tmp_path):
    data = table(tmp_path, [("cat", "a"), ("dog", "a")])
    with pytest.raises(UserError, match=SAID):
        benchmark(data.model_copy(update={"classes": ["Cat", "dog"]}))


def test_class_folders_in_two_spellings_are_refused(tmp_path):
    write_tree(tmp_path, ("a",), ("cat", "dog"), 1)
    write_tree(tmp_path, ("b",), ("Cat", "dog"), 1)
    with pytest.raises(UserError, match=SAID):
        benchmark(DataSettings(dataset="folder", root=str(tmp_path), classes=["cat", "Cat", "dog"]))
    write_tree(tmp_path, ("A",), ("cat", "dog"), 1)
    with pytest.raises(UserError, match="the domains 'A' and 'a' differ in spelling only"):
        benchmark(DataSettings(dataset="folder", root=str(tmp_path), classes=["cat", "dog"]))
    assert benchmark(DataSettings(dataset="folder", root=str(tmp_path), domains=["A", "a"])).domains == ("A", "a")


@pytest.mark.parametrize("names", [["cat", "dog", "dog"], ["v\u00e9lo", "dog", "ve\u0301lo"]])
def test_a_repeated_class_is_refused(tmp_path, names):
    """Its images would be read under two labels."""
    with pytest.raises(UserError, match=r"data.classes has '\w+' twice; write each name once"):
        benchmark(DataSettings(dataset="folder", root=str(tmp_path), classes=names))


@pytest.mark.parametrize("names", [["Art", "Art", "Clipart"], ["RealWorld", "Art", "Real World"]])
def test_a_repeated_domain_is_refused(names):
    with pytest.raises(UserError, match=r"data.domains has '\w+' twice; write each name once"):
        benchmark(DataSettings(dataset="office-home", domains=names))
