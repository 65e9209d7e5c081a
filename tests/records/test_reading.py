"""Reading runs back, the collected results.csv, and records that were cut off or saved in another form."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pandas as pd
import pytest
from invented import pacs_experiment, write_run
from support import Interrupt, run_small, tiny_experiment
from typer.testing import CliRunner

from fedsim.analysis import compare
from fedsim.commands.cli import app
from fedsim.commands.runs import headline
from fedsim.common.errors import UserError
from fedsim.common.files import alone
from fedsim.records import choose_runs, read_runs
from fedsim.records.reading import of_experiment
from fedsim.records.results import write_results
from fedsim.runs.log_lines import LOG, LogLines, logger

RUNS = 2 * 2 * 2  # methods, targets, seeds of own_grid


@pytest.fixture
def folder(own_grid):
    write_run(own_grid.parent, pacs_experiment("csac", "photo", 5, train={"rounds": 2}), finish=False)
    return own_grid


def test_one_call_reads_everything_and_unfinished_runs_when_asked(folder):
    runs = read_runs(folder.parent)
    assert (len(runs.summary), len(runs.experiments), runs.unfinished) == (RUNS, RUNS, ["pacs/csac/photo/seed5"])
    assert (len(runs.rounds), len(runs.clients), set(runs.details["method"])) == (RUNS * 5, RUNS * 12, {"csac"})
    for frame in (runs.summary, runs.rounds, runs.clients, runs.details):
        assert list(frame.columns[:5]) == ["run", "experiment", "method", "target", "seed"]
        assert set(frame["run"]) <= set(runs.experiments)
    one = read_runs(folder / "csac" / "photo" / "seed1")
    assert one.experiments == {"seed1": pacs_experiment("csac", "photo", 1, train={"rounds": 4})}
    assert one.summary["last_target_accuracy"][0] == one.rounds["target_accuracy"].iloc[-1]
    write_run(folder.parent, pacs_experiment(name="other", train={"rounds": 1}))
    runs = read_runs(folder.parent)
    assert 5 not in set(runs.rounds["seed"])
    assert 5 in set(read_runs(folder, unfinished=True).rounds["seed"])
    assert [of_experiment(runs, name).unfinished for name in ("pacs", "other")] == [runs.unfinished, []]
    with pytest.raises(UserError, match="1 unfinished"):
        read_runs(folder / "csac" / "photo" / "seed5")
    (folder / "csac" / "photo" / "seed0" / "experiment.toml").write_text("name = [")
    assert list(read_runs(folder).damaged) == ["csac/photo/seed0"]
    with pytest.raises(UserError, match=r"csac/photo/seed0/experiment\.toml"):
        read_runs(folder / "csac" / "photo" / "seed0")


def test_names_that_look_like_numbers_stay_text(tmp_path):
    folder = write_run(tmp_path, pacs_experiment(train={"rounds": 1}))
    text = (folder / "clients.csv").read_text().replace("art_painting", "015").replace("cartoon", "NA")
    (folder / "clients.csv").write_text(text)
    assert read_runs(tmp_path).clients["domain"].to_list() == ["015", "NA", "sketch"]


def test_results_are_rebuilt_sorted_and_byte_stable(folder, monkeypatch):
    """Also when a folder that was listed is gone before it is read, because other cells of a sweep end then."""
    for seed in (10, 2):
        write_run(folder.parent, pacs_experiment("fedavg", "photo", seed, train={"rounds": 1}))
    unreadable = [str(folder / "csac" / "photo" / "seed5" / "checkpoint"), str(folder / "leaving")]
    for one in unreadable:
        Path(one, "state").mkdir(parents=True)
    scan = os.scandir

    def scan_late(path="."):
        if str(path) in unreadable:
            unreadable.remove(str(path))
            shutil.rmtree(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_late)
    write_results(folder)
    frame, first = pd.read_csv(folder / "results.csv"), (folder / "results.csv").read_bytes()
    assert frame.loc[frame["target"] == "photo", ["method", "seed"]].to_numpy().tolist() == [
        ["csac", 0], ["csac", 1], ["fedavg", 0], ["fedavg", 1], ["fedavg", 2], ["fedavg", 10],
    ]  # fmt: skip
    write_results(folder)
    assert (folder / "results.csv").read_bytes() == first
    summary = (folder / "csac" / "photo" / "seed0" / "summary.csv").read_text().splitlines()
    assert first.decode().splitlines()[:2] == summary


def test_two_runs_that_end_together_are_both_collected(folder):
    """Who began first must not write last what it read first."""
    thread = Thread(target=write_results, args=[folder])
    with alone(folder):
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        write_run(folder.parent, pacs_experiment("fedavg", "photo", 3, train={"rounds": 3}))
    thread.join(10)
    assert (folder / "results.csv").read_text().count("\n") == 1 + RUNS + 1


@pytest.mark.parametrize("read", [read_runs, write_results])
def test_missing_and_empty_folders(tmp_path, read):
    with pytest.raises(UserError, match="no such folder"):
        read(tmp_path / "nothing")
    with pytest.raises(UserError, match="no run in it"):
        read(tmp_path)


def test_runs_are_chosen_by_method_target_and_seed(folder):
    runs = read_runs(folder)
    chosen = choose_runs(runs, ["csac"], ["photo"], [1])
    assert list(chosen.experiments) == ["csac/photo/seed1"]
    assert set(chosen.rounds["run"]) == set(chosen.clients["run"]) == {"csac/photo/seed1"}
    assert chosen.unfinished == []
    assert choose_runs(runs, ["csac"], ["photo"]).unfinished == ["csac/photo/seed5"]
    for wrong, said in (
        ({"methods": ["fedav"]}, r"no finished run of the method 'fedav'; did you mean 'fedavg'\?"),
        ({"seeds": [9]}, "there are: 0, 1"),
        ({"targets": ["cartoon"]}, "of the target 'cartoon'"),
    ):
        with pytest.raises(UserError, match=said):
            choose_runs(runs, **wrong)


def test_the_verbs_take_methods_targets_and_seeds(own_grid, unrendered):
    only = ["--methods", "csac", "--targets", "photo", "--seeds", "0"]
    shown = [CliRunner().invoke(app, [verb, str(own_grid), *only]) for verb in ("compare", "plot", "report")]
    assert [result.exit_code for result in shown] == [0, 0, 0]
    assert "csac" in shown[0].output
    assert "sketch" not in shown[0].output
    assert list((own_grid / "plots-part").glob("*.png"))
    page = (own_grid / "report-part.html").read_text()
    assert page.count("fedsim run ") == 1
    assert "A part of the runs: only methods csac; targets photo; seeds 0." in page
    assert not [name for name in ("plots", "report.html", "comparison.csv") if (own_grid / name).exists()]


def test_the_end_of_a_run_says_what_selected_the_round(tmp_path, monkeypatch):
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


NO_ENVIRONMENT = (
    "[]", "5", '{"data": 5}', '{"data": {"rot0": {}}}', '{"data": {"rot0": 5}}', '{"server_data": {"x": {}}}',
    '{"recipe": {"infer.eval_mode": 5}}', '{"packages": []}', '{"earlier": [{}]}', '{"earlier": 5}',
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{finished or stopped after round 1: (the words that give the run again, its folder)}."""
    found = {}
    for name, callbacks in (("finished", []), ("stopped", [Interrupt(1)])):
        output = tmp_path_factory.mktemp(name)
        experiment = tiny_experiment(output, rounds=1 + len(callbacks))
        with suppress(KeyboardInterrupt):
            run_small(experiment, *callbacks)
        (output / "small.toml").write_text(experiment.toml())
        found[name] = ["run", str(output / "small.toml")], next(output.rglob("rounds.csv")).parent
    return found


def half(text):
    return text[: text.index('"') + 3]


def semicolons(text):
    return text.replace(",", ";")


def german(text):
    return semicolons(text).replace(".", ",")


def without_a_column(text):
    """The header without its last column; the rounds would be read as the names of the rows."""
    head, _, rows = text.partition("\n")
    return f"{head.rpartition(',')[0]}\n{rows}"


def without_selection(text):
    """A summary without the columns of the rule by which tables select."""
    rows = [row.split(",") for row in text.splitlines()]
    kept = [index for index, name in enumerate(rows[0]) if not name.startswith("best_validation")]
    return "\n".join(",".join(row[index] for index in kept) for row in rows) + "\n"


def one_line(words, file):
    done = CliRunner().invoke(app, [*map(str, words)])
    assert isinstance(done.exception, UserError), (done.exception, done.output)  # exit code 2
    said = str(done.exception)
    assert file.name in said
    assert "\n" not in said
    assert "already finished" not in done.output
    return said


@pytest.mark.parametrize(("run", "name", "edit"), [
    *((run, name, half) for run in ("finished", "stopped") for name in ("experiment.toml", "environment.json")),
    ("stopped", "rounds.csv", semicolons),
    ("finished", "summary.csv", semicolons), ("finished", "summary.csv", lambda text: ""),
    ("finished", "summary.csv", without_selection),
    *(("finished", "environment.json", lambda text, other=other: other) for other in NO_ENVIRONMENT),
])  # fmt: skip
def test_a_changed_run_given_again(run, name, edit, runs):
    words, folder = runs[run]
    before = (folder / name).read_text()
    (folder / name).write_text(edit(before))
    one_line(words, folder / name)
    (folder / name).write_text(before)


@pytest.mark.parametrize(("table", "said"), [
    ({"format": 2}, "has format 2"), ({"format": "1"}, "has format '1'"), ({"format": None}, "has format None"),
    ({}, "has no format"),
])  # fmt: skip
@pytest.mark.parametrize("run", ["finished", "stopped"])
def test_a_run_of_another_format_is_refused(run, table, said, runs):
    words, folder = runs[run]
    file = folder / "environment.json"
    before = file.read_text()
    record = json.loads(before)
    assert record.pop("format") == 1
    file.write_text(json.dumps(record | table))
    line = f"{said}, and this version of fedsim reads format 1; read it with the version that wrote it, or remove"
    for command in (words, ["evaluate", folder], *([["compare", folder]] if run == "finished" else [])):
        assert line in one_line(command, file)
    with pytest.raises(UserError, match="reads format 1"):
        read_runs(folder.parents[2], unfinished=True)
    file.unlink()
    assert "has no format" in one_line(words, file)
    file.write_text(before)


@pytest.mark.parametrize(("verb", "edit"), [("plot", german), ("report", without_a_column)])
def test_figures_of_a_changed_file(verb, edit, own_grid):
    file = own_grid / "csac" / "photo" / "seed1" / "rounds.csv"
    file.write_text(edit(file.read_text()))
    assert "copy the file again" in one_line([verb, file.parent], file)


def test_a_table_needs_no_rounds_that_are_text(own_grid):
    """Only remarks on rounds come from rounds.csv; the numbers of `fedsim compare` are those of the summaries."""
    numbers = compare(read_runs(own_grid, only=["summary"])).cells
    (own_grid / "csac" / "photo" / "seed1" / "rounds.csv").write_bytes("round,größe\n1,2\n".encode("latin-1"))
    pd.testing.assert_frame_equal(compare(read_runs(own_grid, only=["summary"])).cells, numbers)


@pytest.mark.parametrize("edit", [german, without_selection, *(lambda t, end=end: t[:end] for end in (0, 5, -1))])
def test_other_runs_do_not_end_with_a_changed_summary(edit, own_grid):
    """Every run that ends collects the summaries of its experiment; the changed one is said in every table."""
    run = own_grid / "csac" / "photo" / "seed1"
    (run / "summary.csv").write_text(edit((run / "summary.csv").read_text()))
    runs = read_runs(own_grid, only=["summary"])
    assert list(runs.damaged) == ["csac/photo/seed1"]
    assert any("cannot be read: csac/photo/seed1/summary.csv" in note for note in compare(runs).notes)
    assert list(choose_runs(runs, ["csac"]).damaged) == ["csac/photo/seed1"]
    assert choose_runs(runs, ["fedavg"]).damaged == {}
    write_results(own_grid)
    assert len(pd.read_csv(own_grid / "results.csv")) >= 7
    with pytest.raises(UserError, match=r"seed1/summary\.csv: "):
        read_runs(run)
    if edit("1,2") in ("", "1,2", "1,"):  # cut off
        with pytest.raises(UserError, match="empty or cut off"):
            headline(run)
