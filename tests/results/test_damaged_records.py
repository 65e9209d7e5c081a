"""A record that was cut off, or saved in another form by a spreadsheet, ends in one line that names the file."""

from contextlib import suppress

import pytest
from support import Interrupt, run_small, tiny_experiment
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.commands.runs import headline
from fedsim.common.errors import UserError
from fedsim.results import choose_runs, compare, read_runs, rebuild_results

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
    ("stopped", "rounds.csv", semicolons), ("finished", "rounds.csv", german),
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


@pytest.mark.parametrize(("verb", "edit"), [("plot", german), ("report", without_a_column)])
def test_figures_of_a_changed_file(verb, edit, own_grid):
    file = own_grid / "csac" / "photo" / "seed1" / "rounds.csv"
    file.write_text(edit(file.read_text()))
    assert "copy the file again" in one_line([verb, own_grid], file)


@pytest.mark.parametrize("edit", [german, without_selection, *(lambda t, end=end: t[:end] for end in (0, 5, -1))])
def test_other_runs_do_not_end_with_a_changed_summary(edit, own_grid):
    """Every run that ends collects the summaries of its experiment; the changed one is said in every table."""
    run = own_grid / "csac" / "photo" / "seed1"
    (run / "summary.csv").write_text(edit((run / "summary.csv").read_text()))
    runs = read_runs(own_grid, only=["summary"])
    assert runs.damaged == ["csac/photo/seed1"]
    assert any("cut off or changed: csac/photo/seed1" in note for note in compare(runs).notes)
    assert choose_runs(runs, ["fedavg"]).damaged == []
    assert len(rebuild_results(own_grid)) >= 7
    with pytest.raises(UserError, match="empty, cut off or changed"):
        compare(read_runs(run))
    if edit("1,2") in ("", "1,2", "1,"):  # cut off
        with pytest.raises(UserError, match="empty or cut off"):
            headline(run)
