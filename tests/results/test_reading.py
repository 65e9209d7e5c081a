"""Reading runs back, and the collected results.csv."""

import os
import shutil
from pathlib import Path
from threading import Thread

import pytest
from invented import pacs_experiment, write_grid, write_run
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.commands.results import chosen_runs
from fedsim.commands.runs import headline
from fedsim.common.errors import UserError
from fedsim.common.files import alone
from fedsim.results import choose_runs, compare, read_runs, rebuild_results
from fedsim.results.reading import of_experiment
from fedsim.server_app import LOG, LogLines, logger


@pytest.fixture
def outputs(tmp_path):
    for method in ("fedavg", "csac"):
        for seed in (0, 1, 10, 2):
            write_run(tmp_path, pacs_experiment(method, "photo", seed, train={"rounds": 3}))
    write_run(tmp_path, pacs_experiment("csac", "sketch", 0, train={"rounds": 2}), finish=False)
    return tmp_path


def test_one_call_reads_everything(outputs):
    runs = read_runs(outputs)
    assert len(runs.summary) == 8
    assert len(runs.experiments) == 8
    assert runs.unfinished == ["pacs/csac/sketch/seed0"]
    assert len(runs.rounds) == 8 * 4
    assert len(runs.clients) == 8 * 9
    assert set(runs.details["method"]) == {"csac"}
    for frame in (runs.summary, runs.rounds, runs.clients, runs.details):
        assert list(frame.columns[:5]) == ["run", "experiment", "method", "target", "seed"]
        assert set(frame["run"]) <= set(runs.experiments)


def test_any_level_of_the_tree(outputs):
    assert len(read_runs(outputs / "pacs").summary) == 8
    one = read_runs(outputs / "pacs" / "csac" / "photo" / "seed10")
    assert list(one.experiments) == ["seed10"]
    assert one.summary["seed"][0] == 10
    assert one.experiments["seed10"] == pacs_experiment("csac", "photo", 10, train={"rounds": 3})


def test_numbers_are_those_recorded(outputs):
    runs = read_runs(outputs / "pacs" / "fedavg" / "photo" / "seed0")
    last = runs.rounds[runs.rounds["round"] == 3]
    assert runs.summary["last_target_accuracy"][0] == last["target_accuracy"].iloc[0]


def test_unfinished_runs_only_when_asked(outputs):
    assert "sketch" not in set(read_runs(outputs).rounds["target"])
    assert "sketch" in set(read_runs(outputs, unfinished=True).rounds["target"])
    with pytest.raises(UserError, match="1 unfinished"):
        read_runs(outputs / "pacs" / "csac" / "sketch")


def test_names_that_look_like_numbers_stay_text(tmp_path):
    folder = write_run(tmp_path, pacs_experiment(train={"rounds": 1}))
    text = (folder / "clients.csv").read_text().replace("art_painting", "015").replace("cartoon", "NA")
    (folder / "clients.csv").write_text(text)
    assert read_runs(tmp_path).clients["domain"].to_list() == ["015", "NA", "sketch"]


def test_results_are_rebuilt_sorted_and_byte_stable(outputs):
    frame = rebuild_results(outputs / "pacs")
    first = (outputs / "pacs" / "results.csv").read_bytes()
    assert frame[["method", "seed"]].to_numpy().tolist() == [[m, s] for m in ("csac", "fedavg") for s in (0, 1, 2, 10)]
    rebuild_results(outputs / "pacs")
    assert (outputs / "pacs" / "results.csv").read_bytes() == first
    summary = (outputs / "pacs" / "csac" / "photo" / "seed0" / "summary.csv").read_text().splitlines()
    assert first.decode().splitlines()[:2] == summary


def test_results_are_rebuilt_while_other_runs_tidy_up(outputs, monkeypatch):
    """When cells of a sweep end at the same time, a folder that was listed may not exist any more when it is read."""
    doomed = [str(outputs / "pacs" / "csac" / "sketch" / "seed0" / "checkpoint"), str(outputs / "pacs" / "leaving")]
    for folder in doomed:
        Path(folder, "state").mkdir(parents=True)
    scan = os.scandir

    def scan_late(path="."):
        if str(path) in doomed:
            doomed.remove(str(path))
            shutil.rmtree(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_late)
    assert len(rebuild_results(outputs / "pacs")) == 8


def test_two_runs_that_end_together_are_both_collected(outputs):
    """Who began first must not write last what it read first."""
    folder = outputs / "pacs"
    thread = Thread(target=rebuild_results, args=[folder])
    with alone(folder):
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        write_run(outputs, pacs_experiment("fedavg", "photo", 3, train={"rounds": 3}))
    thread.join(10)
    assert (folder / "results.csv").read_text().count("\n") == 1 + 9


@pytest.mark.parametrize("read", [read_runs, rebuild_results])
def test_missing_and_empty_folders(tmp_path, read):
    with pytest.raises(UserError, match="no such folder"):
        read(tmp_path / "nothing")
    with pytest.raises(UserError, match="no run in it"):
        read(tmp_path)


def test_broken_settings_are_named(outputs):
    (outputs / "pacs" / "csac" / "photo" / "seed0" / "experiment.toml").write_text("name = [")
    with pytest.raises(UserError, match=r"experiment\.toml"):
        read_runs(outputs)


def test_runs_are_chosen_by_method_target_and_seed(tmp_path):
    folder = write_grid(tmp_path, {"fedavg": 0, "csac": 0.1}, rounds=1, targets=("photo", "sketch"))
    write_run(tmp_path, pacs_experiment("csac", "photo", 5), finish=False)
    runs = read_runs(folder)
    chosen = choose_runs(runs, ["csac"], ["photo"], [1])
    assert list(chosen.experiments) == ["csac/photo/seed1"]
    assert set(chosen.rounds["run"]) == set(chosen.clients["run"]) == {"csac/photo/seed1"}
    assert chosen.unfinished == []
    assert choose_runs(runs, ["csac"], seeds=[1, 0]).unfinished == []
    assert choose_runs(runs, ["csac"], ["photo"]).unfinished == ["csac/photo/seed5"]
    assert choose_runs(runs).experiments == runs.experiments
    with pytest.raises(UserError, match=r"no finished run of the method 'fedav'; did you mean 'fedavg'\?"):
        choose_runs(runs, ["fedav"])
    with pytest.raises(UserError, match="there are: 0, 1"):
        choose_runs(runs, seeds=[9])
    with pytest.raises(UserError, match="of the target 'cartoon'"):
        choose_runs(runs, targets=["cartoon"])


def test_the_verbs_take_methods_targets_and_seeds(tmp_path, unrendered):
    folder = write_grid(tmp_path, {"fedavg": 0, "csac": 0.1}, rounds=1, targets=("photo", "sketch"))
    only = ["--methods", "csac", "--targets", "photo", "--seeds", "0"]
    result = CliRunner().invoke(app, ["compare", str(folder), *only, "--format", "csv"])
    assert result.exit_code == 0, result.output
    header, row = result.output.strip().splitlines()
    assert row.startswith("csac,csac,ours")
    assert "sketch" not in header
    assert CliRunner().invoke(app, ["plot", str(folder), *only]).exit_code == 0
    assert list((folder / "plots-part").glob("*.png"))
    assert not (folder / "plots").exists()
    assert CliRunner().invoke(app, ["report", str(folder), *only]).exit_code == 0
    page = (folder / "report-part.html").read_text()
    assert page.count("fedsim run ") == 1
    assert "A part of the runs: only methods csac; targets photo; seeds 0." in page
    assert not (folder / "report.html").exists()
    wrong = CliRunner().invoke(app, ["compare", str(folder), "--seeds", "x"])
    assert "--seeds 'x'" in str(wrong.exception)


@pytest.mark.parametrize(
    "words", [["--methods", "csac"], ["--seeds", "0"], ["--select", "oracle"], ["--select", "last"]]
)
def test_only_the_main_table_is_kept_as_a_file(tmp_path, words):
    """A part of the runs, or another rule, must not replace the numbers of all runs without a word."""
    folder = write_grid(tmp_path, {"fedavg": 0, "csac": 0.1}, rounds=2, targets=("photo", "sketch"))
    command = ["compare", str(folder)]
    assert "A part" not in CliRunner().invoke(app, [*command, "--baseline", "fedavg"]).output
    before = (folder / "comparison.csv").read_bytes()
    shown = CliRunner().invoke(app, [*command, *words])
    assert shown.exit_code == 0, shown.output
    said = f"A part of the runs: only {words[0].strip('-')} {words[1]}."
    assert (said in shown.output) == (words[0] != "--select")
    assert (folder / "comparison.csv").read_bytes() == before


@pytest.mark.parametrize("kept", [0, 5, -1])
def test_a_summary_that_was_cut_off_is_said(tmp_path, kept):
    """Such a run was neither in the table nor among the unfinished ones."""
    folder = write_grid(tmp_path, {"fedavg": 0, "csac": 0.1}, rounds=2, targets=("photo",))
    file = folder / "csac" / "photo" / "seed1" / "summary.csv"
    file.write_text(file.read_text()[:kept])
    runs = read_runs(folder)
    assert runs.damaged == ["csac/photo/seed1"]
    (note,) = [note for note in compare(runs).notes if "cut off" in note]
    assert "csac/photo/seed1" in note
    assert len(rebuild_results(folder)) == 3
    with pytest.raises(UserError, match="empty, cut off or changed"):
        compare(read_runs(file.parent))
    with pytest.raises(UserError, match="empty or cut off"):
        headline(file.parent)
    assert choose_runs(runs, ["fedavg"]).damaged == []


def test_the_end_of_a_run_says_what_selected_the_round(tmp_path, monkeypatch):
    """In the words of the tables, on the terminal and in run.log."""
    experiment = pacs_experiment(run={"select_on": "local"})
    folder = write_run(tmp_path, experiment.replace(train={"rounds": 2}))
    assert "(best source validation of the local models)" in headline(folder)
    monkeypatch.setattr(logger, "handlers", [])
    lines = LogLines()
    lines.on_start(experiment, folder)
    summary = {"target": "photo", "best_validation_round": 2, "best_validation_target_accuracy": 0.5}
    lines.on_end(summary)
    lines.on_end(summary | dict.fromkeys(list(summary)[1:]))
    first, second = (line.partition(" INFO ")[2] for line in (folder / LOG).read_text().splitlines()[-2:])
    assert first == "done: 50.0 % on photo (round 2, best source validation of the local models)"
    assert second == "done: no round has a validation (best source validation of the local models)"


def test_unfinished_runs_belong_to_their_experiment(tmp_path):
    """The report has a section for each experiment."""
    for name in ("a", "b"):
        write_run(tmp_path, pacs_experiment(name=name, train={"rounds": 1}))
    write_run(tmp_path, pacs_experiment("csac", name="a", train={"rounds": 1}), finish=False)
    runs = read_runs(tmp_path)
    assert of_experiment(runs, "a").unfinished == runs.unfinished == ["a/csac/photo/seed0"]
    assert of_experiment(runs, "b").unfinished == []


def test_a_label_with_a_comma_is_chosen(tmp_path):
    """The label of a method with two changed settings has a comma between them."""
    for label in ("fedprox@a=1,b=2", "fedprox"):
        own = {"proximal": {"mu": len(label)}}
        write_run(tmp_path / label, pacs_experiment("fedprox", method=own, train={"rounds": 1}), label=label)
    write_run(tmp_path, pacs_experiment(train={"rounds": 1}))
    for words, labels in (
        ("fedprox@a=1,b=2", {"fedprox@a=1,b=2"}),
        ("fedavg, fedprox@a=1,b=2", {"fedavg", "fedprox@a=1,b=2"}),
    ):
        assert set(chosen_runs(tmp_path, words, "", "").labels().values()) == labels
    with pytest.raises(UserError, match="of the method 'a=1'"):
        chosen_runs(tmp_path, "a=1,b=2", "", "")
