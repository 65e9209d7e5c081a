"""The command line: one line and exit code 2 for wrong input, no traceback, and no incomplete files."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pandas as pd
import pytest
from support import numbers
from typer.main import get_command
from typer.testing import CliRunner

from fedsim.commands.cli import app, main
from fedsim.settings.experiment import config_folders, read_experiment

SMALL = ["--set", "train.rounds=3", "--set", "data.fraction=0.1", "--set", 'data.domains=["rot0", "rot15", "rot30"]']
FEDSIM = [sys.executable, "-c", "from fedsim.commands.cli import main; main()"]


def fedsim(*words: str, **options) -> subprocess.CompletedProcess:
    """Run the command line in a separate process."""
    return subprocess.run([*FEDSIM, *words], capture_output=True, text=True, timeout=300, **options)


@pytest.fixture
def called(monkeypatch, capsys):
    """Function: words -> (exit code, out, err). It calls the command line in this process, which saves seconds."""
    monkeypatch.setattr(signal, "signal", lambda number, answer: None)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedsim", *words])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        return code, *capsys.readouterr()

    return call


def test_run_then_again(tmp_path, called):
    """A run writes all its files, prints its result, and is not repeated."""
    command = ["run", "digits", "--method", "fedbn", "--target", "rot0", "--output", str(tmp_path), *SMALL]
    code, said, errors = called(*command)
    assert code == 0, errors
    folder = tmp_path / "digits" / "fedbn" / "rot0" / "seed0"
    assert {file.name for file in folder.iterdir()} == {
        "experiment.toml",
        "environment.json",
        "rounds.csv",
        "clients.csv",
        "summary.csv",
        "best.safetensors",
        "last.safetensors",
        "predictions",
    }
    assert "best source validation" in said
    assert "already finished" in called(*command)[1]
    clients = pd.read_csv(folder / "clients.csv")
    assert {"bytes_up_arrays", "bytes_down_arrays", "weight", "train_seconds", "validation_accuracy"} <= set(clients)
    assert (clients["bytes_down_arrays"] == clients["bytes_down"]).all()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "digits", "--method", "gperxn"], "did you mean 'gperxan'"),
        (["run", "digits", "--target", "rot7"], "did you mean"),
        (["run", "digits", "--seed", "-1"], "greater than or equal to 0"),
        (["run", "nowhere.toml"], "no experiment file"),
        (["run", "pacs", "--set", "data.root=/nowhere", "--set", "model.weights=none"], "/nowhere"),
        (["run", "digits", "--set", "model.backbone=digits-cnn", "--method", "gperxan"], "batch norm"),
        (["run", "digits", "--set", "model.backbone=resnet19"], "did you mean"),
        (["run", "digits", "--set", "run.device=cuda"], "no CUDA device"),
        (["run", "--what"], "No such option"),
        (["run", "digits", "--method", "fedprox", "--set", "method.name=fedavg"], "another value, 'fedprox'; remove"),
        (["run", "digits", "--seed", "3", "--set", "run.seed=4"], "an option gives run.seed another value, 3"),
        (["run", "digits", "--callback", "a:B", "--set", "run.callbacks=['c:D']"], "another value, ['a:B']"),
        (["pictures", "digits", "--target", "rot0", "--set", "run.target=rot15"], "another value, 'rot0'"),
        (["sweep", "digits", "--set", "run.output=elsewhere"], "an option gives run.output another value"),
        (["sweep", "digits", "--set", 'run={target="rot0"}'], "run is a section; set single keys"),
        (["sweep", "digits", "--grid", "train={lr=0.1},{lr=0.2}"], "train is a section; set single keys"),
        (["sweep", "digits", "--methods", "fedavg,nope"], "unknown method 'nope'"),
        (["compare", "/nowhere"], "/nowhere"),
        (["run", "tables/fedig-a-table-5"], "fedsim sweep tables/fedig-a-table-5"),
        (["run", str(config_folders()[0] / "tables" / "fedig-a-table-5.toml")], "is a table of a paper"),
        (["datasets", "--grid", "x.png"], "--grid draws the images of a folder or table of your own"),
        (["datasets", "pacs", "--grid", "x.png"], "--grid draws the images of a folder or table of your own"),
        (["methods", "--changes", "fuse,,terms"], "--changes 'fuse,,terms': a name is empty"),
    ],
)
def test_bad_input_is_one_line(words, said, tmp_path, called, monkeypatch):
    """The exit code is 2, one line says what to do, and no file is left."""
    monkeypatch.chdir(tmp_path)
    if "run.device=cuda" in words:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device here")
    output = ["--output", str(tmp_path / "out")] if words[0] in ("run", "sweep") else []
    code, _, errors = called(*words, *output)
    assert code == 2, errors
    assert said in errors
    assert "Traceback" not in errors
    assert len(errors.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("*.csv"))


@pytest.mark.parametrize("words", [[], ["deploy"]])
def test_without_a_command_the_help_is_all(words, called):
    code, out, errors = called(*words)
    assert (code, "Usage" in out + errors, "fedsim: " in errors) == (2, True, False)


@pytest.mark.slow  # trust/test_edge.py::test_output_on_a_file: one line and exit code 2 of a process of its own
def test_bad_input_ends_a_process_of_its_own(tmp_path):
    """The result is the same in a separate process."""
    done = fedsim("run", "digits", "--method", "gperxn", "--output", str(tmp_path / "out"), cwd=tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.strip().splitlines())) == (2, "", 1)
    assert "did you mean 'gperxan'" in done.stderr


def test_interruption_is_said(monkeypatch, capsys):
    """Ctrl-C prints one line, and the exit code is 130."""

    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedsim.commands.data.show_datasets", interrupted)
    monkeypatch.setattr(signal, "signal", lambda number, answer: None)
    monkeypatch.setattr(sys, "argv", ["fedsim", "datasets"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err.strip() == "fedsim: interrupted; the same command continues where it stopped"


def test_interruption_is_said_while_the_command_line_is_imported():
    """A quarter of a second, in which Python would print a traceback of its imports."""
    code = """
import os, runpy, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
runpy.run_module("fedsim", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert done.stderr.strip() == "fedsim: interrupted; the same command continues where it stopped"


def test_help_is_fast_and_imports_nothing_heavy():
    """`fedsim --help` needs neither torch nor ray."""
    heavy = ("torch", "ray", "flwr", "pandas")
    code = f"import sys, fedsim.commands.cli; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    started = time.perf_counter()
    assert fedsim("--help").returncode == 0
    assert time.perf_counter() - started < 5  # under one second on a quiet machine; the margin is for a busy one


def test_the_list_of_data_sets_needs_no_torch():
    """It took three seconds where half of one is enough."""
    code = "import contextlib, sys; from fedsim.commands.cli import main; sys.argv = ['fedsim', 'datasets']\n"
    code += "with contextlib.suppress(SystemExit):\n    main()\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True).returncode == 0


def test_every_argument_and_option_is_explained():
    """click 8.5 loses the help of arguments under typer 0.20; pyproject.toml excludes it."""
    commands = [get_command(app)]
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        silent = [each.name for each in command.params if not getattr(each, "help", None) and not command.hidden]
        assert not silent, (command.name, silent)


def kill_when(process: BaseProcess, file: Path, rows: int) -> None:
    """SIGKILL a process as soon as a CSV file has that many lines."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.is_alive():
        if file.is_file() and len(file.read_text().splitlines()) >= rows:
            break
        time.sleep(0.01)
    process.kill()
    process.join()


def run_main(words: list[str], variables: dict[str, str]) -> None:
    """The command line in a process of the fork server, which has imported everything."""
    os.environ.update(variables)
    sys.argv = ["fedsim", *words]
    main()


@pytest.mark.parametrize("method", ["fedbn", pytest.param("feddg-ga", marks=pytest.mark.slow)])
def test_killed_run_continues_to_the_same_csv(method, tmp_path, called):
    """After `kill -9` in the middle and the same command again, the CSV is that of the uninterrupted run."""
    words = ["run", "digits", "--method", method, "--target", "rot0", *SMALL, "--set", "train.rounds=12"]
    assert called(*words, "--output", str(tmp_path / "whole"))[0] == 0
    broken = tmp_path / "broken"
    folder = broken / "digits" / method / "rot0" / "seed0"
    for rows in (4, 8):
        own = ([*words, "--output", str(broken)], dict(os.environ))
        process = multiprocessing.get_context("forkserver").Process(target=run_main, args=own)
        process.start()
        kill_when(process, folder / "rounds.csv", rows)
        assert process.exitcode == -signal.SIGKILL
    assert not (folder / "summary.csv").exists()
    assert called(*words, "--output", str(broken))[0] == 0
    whole = tmp_path / "whole" / "digits" / method / "rot0" / "seed0"
    for name in ("rounds.csv", "clients.csv", "summary.csv"):
        assert numbers(folder / name).equals(numbers(whole / name)), name


def test_sweep_compare_plot(tmp_path, called):
    """A sweep over methods, targets and seeds, then a table and figures of it."""
    words = [
        "sweep",
        "digits",
        "--methods",
        "fedavg,deepall",
        "--targets",
        "rot0",
        "--seeds",
        "0,1",
        *(word.replace("rounds=3", "rounds=1") for word in SMALL),
        "--output",
        str(tmp_path),
    ]
    assert "4 cells" in called(*words, "--dry-run")[1]
    assert not (tmp_path / "digits").exists()
    code, _, errors = called(*words)
    assert code == 0, errors
    assert len(pd.read_csv(tmp_path / "digits" / "results.csv")) == 4
    assert "4 finished, 0 to run" in called(*words)[1]
    code, table, errors = called("compare", str(tmp_path / "digits"), "--baseline", "fedavg", "--format", "csv")
    assert code == 0, errors
    assert "deepall" in table
    assert called("plot", str(tmp_path / "digits"))[0] == 0
    assert len(list((tmp_path / "digits" / "plots").glob("*.png"))) >= 3
    assert called("report", str(tmp_path / "digits"))[0] == 0


def test_failing_cell_is_reported(tmp_path, called):
    """The exit code is 1, the cell and its reason are printed at the end, and the others are finished."""
    words = [
        "sweep",
        "digits",
        "--methods",
        "fedavg",
        "--targets",
        "rot0",
        "--seeds",
        "0",
        *SMALL,
        "--grid",
        "train.lr=0.05,1e30",
        "--output",
        str(tmp_path),
        "--jobs",
        "1",
    ]
    code, _, errors = called(*words)
    assert code == 1
    assert "failed: fedavg@train.lr=1e30" in errors
    assert "1 of 2 cells finished, 1 failed" in errors


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("folder", "ROOT/DOMAIN/CLASS/IMAGE"),
        ("table", "columns path, label, domain"),
        ("hugging-face", "save_to_disk"),
        ("masks", "domain/mask/NAME"),
    ],
)
def test_own_data_says_what_to_write(tmp_path, name, layout):
    """A user's own data have no fixed domains; instead of an empty table a valid experiment file is printed."""
    result = CliRunner().invoke(app, ["datasets", name])
    assert result.exit_code == 0
    assert layout in result.output
    (tmp_path / "mine.toml").write_text(result.output[result.output.index("[data]") :])
    experiment = read_experiment(str(tmp_path / "mine.toml"))
    assert (experiment.data.dataset, experiment.data.root, experiment.train.rounds) == (name, "ROOT", 40)
    assert bool(experiment.data.structures) == (name == "masks")
