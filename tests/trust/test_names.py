"""Names: which are allowed, that they are shown unchanged, and that each gives the domain with exactly this name."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsim.common.errors import UserError
from fedsim.data import benchmark, load_client
from fedsim.data.names import composed, matching, plain
from fedsim.settings import DataSettings
from fedsim.settings.experiment import from_table, parse_experiment, parse_override


@pytest.mark.parametrize(("table", "said"), [
    *(({"name": name}, r"name: .*(folder|at least 1)")
      for name in ("../..", ".", "a/b", "/tmp/x", "a\\b", "a\nb", "", "x" * 300, "é" * 150)),
    *(({"run": {"label": label}}, r"run\.label: ") for label in ("../x", "..", "a/../../x", "/x", "a\0b")),
])  # fmt: skip
def test_names_and_labels_stay_in_the_output_folder(table, said):
    with pytest.raises(UserError, match=said):
        from_table(table)


def test_overrides_and_files_keep_texts_and_read_numbers():
    for text, value in (('run.target="20"', "20"), ("run.seed=20", 20), ("data.domains=['1', '2']", ["1", "2"])):
        assert parse_override(text) == (text.split("=")[0], value)
    experiment = parse_experiment('[data]\ndataset = "folder"\ndomains = [100, "200"]\n[run]\ntarget = 100\n')
    assert (experiment.data.domains, experiment.run.target) == (["100", "200"], "100")
    with pytest.raises(UserError, match=r"run\.target"):  # 1.10 would become 1.1
        parse_experiment("[run]\ntarget = 1.10\n")


@given(st.lists(st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=5), min_size=2, max_size=5))
def test_matching_never_confuses_letters(names):
    for name in names:
        assert composed(matching(name, names)) == composed(name)
        assert matching(name, [other for other in names if plain(other) != plain(name)]) is None


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_unicode_forms_of_a_folder_are_one_name(make_tree, tmp_path, form):
    on_disk, asked = unicodedata.normalize(form, "Élan"), unicodedata.normalize("NFD", "Élan")
    classes = [unicodedata.normalize(other, "café") for other in ("NFC", "NFD")]
    root = make_tree((on_disk, "photo"), (classes[0], "dog"))
    (root / "photo" / classes[0]).rename(root / "photo" / classes[1])
    own = {"dataset": "folder", "root": str(root), "cache": str(tmp_path / "c"), "image_size": 8}
    data = DataSettings(**own, domains=[asked, "photo"])
    assert (benchmark(data).domains, benchmark(data).classes) == (("photo", "Élan"), ("café", "dog"))
    assert [len(load_client(data, name).labels) for name in (asked, "photo")] == [8, 8]


def test_two_forms_of_one_name_and_names_that_are_no_text_are_refused(make_tree, tmp_path):
    names = [unicodedata.normalize(form, "Élan") for form in ("NFC", "NFD")]
    root = make_tree((*names, "photo"))
    with pytest.raises(UserError, match="two folders have the name 'Élan'"):
        benchmark(DataSettings(dataset="folder", root=str(root)))
    (root / names[0]).rename(root / "phot\udcff")
    with pytest.raises(UserError, match="is not text in UTF-8"):
        benchmark(DataSettings(dataset="folder", root=str(root)))
