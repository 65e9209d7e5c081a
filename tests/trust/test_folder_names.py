"""Names: which are allowed, and that they are shown unchanged."""

import io
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fedsim.commands.data import show_datasets
from fedsim.common import console as console_module
from fedsim.common.errors import UserError
from fedsim.run.plan import resolve, run_folder
from fedsim.settings.experiment import from_table, parse_experiment, parse_override, read_experiment

OUTPUT = "outputs"


@pytest.mark.parametrize("name", ["../..", "..", ".", "a/b", "/tmp/x", "a\\b", "a\nb", "", "x" * 300, "é" * 150])
def test_a_name_stays_in_the_output_folder(name):
    with pytest.raises(UserError, match=r"name: .*(folder|at least 1)"):
        from_table({"name": name})


@pytest.mark.parametrize("label", ["../x", "..", "a/../../x", "/x", "a\0b"])
def test_a_label_stays_in_the_output_folder(label):
    with pytest.raises(UserError, match=r"run\.label: "):
        from_table({"run": {"label": label}})


@given(st.text(max_size=30), st.text(max_size=30))
def test_no_text_leads_out_of_the_output_folder(name, label):
    try:
        experiment = from_table({"name": name, "run": {"label": label, "target": "rot0"}})
    except UserError:
        return
    folder = run_folder(experiment)
    assert len(folder.parts) == 5
    assert folder.parts[0] == OUTPUT
    assert ".." not in folder.parts


@pytest.mark.parametrize("target", ["100", "1.10", "007", "1_000", "true", "2024-01-01", "nan"])
def test_a_name_that_looks_like_a_value_is_a_target(target):
    assert read_experiment("digits", [f"run.target={target}"]).run.target == target
    assert read_experiment("digits", [f'run.target="{target}"']).run.target == target


@given(st.text(string.printable, min_size=1).filter(lambda text: text == text.strip() and text[0] not in "\"'"))
def test_texts_in_overrides_are_taken_as_they_are(text):
    assert parse_override(f"run.target={text}") == ("run.target", text)


def test_whole_numbers_in_a_file_are_names():
    experiment = parse_experiment('[data]\ndataset = "folder"\ndomains = [100, "200"]\n[run]\ntarget = 100\n')
    assert experiment.data.domains == ["100", "200"]
    assert experiment.run.target == "100"
    with pytest.raises(UserError, match=r"run\.target"):  # 1.10 would become 1.1
        parse_experiment("[run]\ntarget = 1.10\n")


def test_numeric_domains_from_the_settings_to_the_plan(make_tree):
    root = make_tree(["100", "200", "300"], ["a", "b"])
    plan = resolve(from_table({"data": {"dataset": "folder", "root": str(root)}, "run": {"target": 100}}))
    assert plan.experiment.run.target == "100"
    assert plan.clients == ("200", "300")


@pytest.mark.parametrize("name", ["[red]sea", "[/x]", "[bold", "a[1]"])
def test_brackets_in_names_are_shown(name, monkeypatch, tmp_path):
    shown = io.StringIO()
    monkeypatch.setattr(console_module, "console", Console(file=shown, width=200))
    console_module.say(f"records: /data/{name}")
    assert f"/data/{name}" in shown.getvalue()


def test_a_wrong_override_is_blamed_and_not_the_file(tmp_path):
    with pytest.raises(UserError, match=r"^override 'train\.rounds=many': train\.rounds: .*integer"):
        read_experiment("digits", ["train.lr=0.1", "train.rounds=many"])
    with pytest.raises(UserError, match=r"^override 'train\.roundss=3': unknown setting .*did you mean 'rounds'"):
        read_experiment("digits", ["train.roundss=3"])
    file = tmp_path / "mine.toml"
    file.write_text('[train]\nrounds = "many"\n')
    with pytest.raises(UserError, match=rf"^{file}: train\.rounds"):
        read_experiment(str(file), ["train.lr=0.1"])


def test_unknown_data_set_is_told_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'pacs'"):
        show_datasets("pcas")
