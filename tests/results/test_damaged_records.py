"""A record that was cut off, or saved in another form by a spreadsheet, ends in one line that names the file."""

import pytest
from invented import write_grid
from support import Interrupt, run_small, small_experiment
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.results import compare, read_runs, rebuild_results
from fedsim.run.plan import run_folder

NO_ENVIRONMENT = (
    "[]", "5", '{"data": 5}', '{"data": {"rot0": {}}}', '{"data": {"rot0": 5}}', '{"server_data": {"x": {}}}',
    '{"recipe": {"infer.eval_mode": 5}}', '{"packages": []}', '{"earlier": [{}]}', '{"earlier": 5}',
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(the words that give a finished run of one round again, its folder)."""
    return made(tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The same of a run that was stopped after its first round."""
    return made(tmp_path_factory.mktemp("stopped"), Interrupt(1))


def made(output, *callbacks):
    experiment = small_experiment(output, train={"rounds": 1 + len(callbacks)})
    try:
        run_small(experiment, *callbacks)
    except KeyboardInterrupt:
        assert callbacks
    (output / "small.toml").write_text(experiment.toml())
    return ["run", str(output / "small.toml")], run_folder(experiment)


@pytest.fixture
def change():
    """Function: (file, the change of its text, or None to remove it); the file is put back after the test."""
    before = {}

    def changed(file, edit):
        before.setdefault(file, file.read_bytes())
        file.write_text(edit(file.read_text())) if edit else file.unlink()

    yield changed
    for file, content in before.items():
        file.write_bytes(content)


def half(text):
    return text[: text.index('"') + 3]


def semicolons(text):
    return text.replace(",", ";")


def german(text):
    return semicolons(text).replace(".", ",")


def quoted(text):
    head, *rows = text.splitlines()
    cells = [",".join(f'"{cell}"' for cell in row.replace(".", ";").split(",")) for row in rows]
    return "\n".join([head, *cells, ""]).replace(";", ",")


def narrowed(text):
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


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("experiment.toml", half),
        ("environment.json", half),
        ("rounds.csv", semicolons),
        ("rounds.csv", german),
        ("summary.csv", semicolons),
        ("summary.csv", lambda text: ""),
        ("summary.csv", without_selection),
        *(("environment.json", lambda text, other=other: other) for other in NO_ENVIRONMENT),
    ],
)
def test_a_finished_run_given_again(name, edit, finished, change):
    words, folder = finished
    change(folder / name, edit)
    one_line(words, folder / name)


@pytest.mark.parametrize(
    ("name", "edit"), [("experiment.toml", half), ("environment.json", half), ("rounds.csv", semicolons)]
)
def test_a_stopped_run_given_again(name, edit, stopped, change):
    words, folder = stopped
    change(folder / name, edit)
    one_line(words, folder / name)


def test_a_finished_run_without_its_environment(finished, change):
    words, folder = finished
    change(folder / "environment.json", None)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0
    assert done.output.startswith("already finished: ")
    assert f"records: {folder}" in done.output


@pytest.mark.parametrize("edit", [semicolons, german, quoted, narrowed])
@pytest.mark.parametrize("verb", ["plot", "report"])
def test_figures_of_a_changed_file(verb, edit, tmp_path, change):
    folder = write_grid(tmp_path, {"fedavg": 0}, rounds=2, targets=("photo",))
    file = folder / "fedavg" / "photo" / "seed1" / "rounds.csv"
    change(file, edit)
    assert "copy the file again" in one_line([verb, folder], file)


@pytest.mark.parametrize("edit", [semicolons, german, quoted, without_selection])
def test_other_runs_do_not_end_with_a_changed_summary(edit, tmp_path, change):
    """Every run that ends collects the summaries of its experiment."""
    folder = write_grid(tmp_path, {"fedavg": 0, "csac": 0.1}, rounds=2, targets=("photo",))
    change(folder / "csac" / "photo" / "seed1" / "summary.csv", edit)
    runs = read_runs(folder)
    assert runs.damaged == ["csac/photo/seed1"]
    assert any("cut off or changed: csac/photo/seed1" in note for note in compare(runs).notes)
    assert len(rebuild_results(folder)) >= 3


def test_a_mark_at_the_start_of_a_file_changes_nothing(tmp_path, change):
    """A spreadsheet writes it in files that it saves as UTF-8."""
    folder = write_grid(tmp_path, {"fedavg": 0, "csac": 0.1}, rounds=2, targets=("photo",))
    before, rows = read_runs(folder), rebuild_results(folder)
    for name in ("summary.csv", "rounds.csv", "clients.csv"):
        change(folder / "csac" / "photo" / "seed1" / name, lambda text: f"\ufeff{text}")
    after = read_runs(folder)
    assert after.damaged == []
    for name in ("summary", "rounds", "clients"):
        assert getattr(after, name).equals(getattr(before, name))
    assert rebuild_results(folder).equals(rows)
