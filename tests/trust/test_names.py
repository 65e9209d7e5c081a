"""Names: a name always gives the domain with exactly this name, whatever letters it has."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim.common.errors import UserError
from fedsim.data import benchmark, client_names, load_client, resolve_domain
from fedsim.data.catalog import BENCHMARKS
from fedsim.data.names import composed, matching, plain
from fedsim.run.plan import complete
from fedsim.settings import DataSettings
from fedsim.settings.experiment import parse_override, read_experiment

FIRST, SECOND = "医院A", "病院A"


def test_letters_outside_ascii_count(make_tree, tmp_path):
    data = DataSettings(dataset="folder", root=str(make_tree((FIRST, SECOND))), cache=str(tmp_path / "c"), image_size=8)
    assert client_names(data, SECOND) == [FIRST]
    with pytest.raises(UserError, match="no domain '诊院A'; did you mean"):
        client_names(data, "诊院A")
    with pytest.raises(UserError, match="no domain 'A'"):
        client_names(data, "A")


def test_the_nearest_domain_is_named_and_never_taken(make_tree):
    data = DataSettings(dataset="folder", root=str(make_tree(("Photo", "Sketch"))))
    with pytest.raises(UserError, match="no domain 'photo'; did you mean 'Photo'"):
        client_names(data, "photo")


@given(st.text(min_size=1, max_size=6))
def test_a_name_that_is_not_there_is_refused(name):
    found = BENCHMARKS["pacs"]
    if plain(name) in map(plain, found.domains):
        return
    with pytest.raises(UserError, match="has no domain"):
        resolve_domain(found, name)


@given(st.lists(st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=5), min_size=2, max_size=5))
def test_matching_never_confuses_letters(names):
    for name in names:
        assert composed(matching(name, names)) == composed(name)
        others = [other for other in names if plain(other) != plain(name)]
        assert matching(name, others) is None


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_unicode_forms_of_a_folder_are_one_name(make_tree, tmp_path, form):
    on_disk, asked = unicodedata.normalize(form, "Élan"), unicodedata.normalize("NFD", "Élan")
    classes = [unicodedata.normalize(other, "café") for other in ("NFC", "NFD")]
    root = make_tree((on_disk, "photo"), (classes[0], "dog"))
    (root / "photo" / classes[0]).rename(root / "photo" / classes[1])
    data = DataSettings(
        dataset="folder", root=str(root), cache=str(tmp_path / "c"), image_size=8, domains=[asked, "photo"]
    )
    found = benchmark(data)
    assert found.domains == ("photo", "Élan")
    assert found.classes == ("café", "dog")
    assert len(load_client(data, asked).labels) == 8
    assert len(load_client(data, "photo").labels) == 8


def test_two_forms_of_one_name_are_refused(make_tree):
    names = [unicodedata.normalize(form, "Élan") for form in ("NFC", "NFD")]
    with pytest.raises(UserError, match="two folders have the name 'Élan'"):
        benchmark(DataSettings(dataset="folder", root=str(make_tree((*names, "photo")))))


def test_a_folder_name_that_is_not_text_is_refused(make_tree):
    root = make_tree()
    (root / "photo").rename(root / "phot\udcff")
    with pytest.raises(UserError, match="is not text in UTF-8"):
        benchmark(DataSettings(dataset="folder", root=str(root)))


@pytest.mark.parametrize("name", ["2020", "007", "1e3", "1.5", "true", "2020-01-01", "inf", "0x10", "nan"])
def test_numeric_names_are_domains(make_tree, tmp_path, name):
    root = make_tree((name, "other"))
    words = [f"data.root={root}", "data.dataset=folder", f"run.target={name}", f"data.cache={tmp_path}/c"]
    assert complete(read_experiment("digits", words)).run.target == name
    assert client_names(DataSettings(dataset="folder", root=str(root)), "other") == [name]


def test_overrides_of_texts_keep_their_words():
    assert parse_override("run.target=2020") == ("run.target", "2020")
    assert parse_override('run.target="2020"') == ("run.target", "2020")
    assert parse_override("run.seed=2020") == ("run.seed", 2020)
    assert parse_override("method.mu=0.5") == ("method.mu", 0.5)
    assert parse_override("data.domains=['2019', '2020']") == ("data.domains", ["2019", "2020"])
