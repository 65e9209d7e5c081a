"""The command line: one line and exit code 2 for wrong input, no traceback, and no incomplete files."""

import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support import numbers
from typer.main import get_command

from fedsim.commands.cli import app, main
from fedsim.settings.experiment import config_folders, read_experiment

SMALL = ["--set", "data.fraction=0.1", "--set", 'data.domains=["rot0", "rot15", "rot30"]']
INTERRUPTED = "fedsim: interrupted; the same command continues where it stopped"


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


def test_a_file_that_ends_too_early_is_no_interruption(called, monkeypatch):
    """Typer takes an EOFError for an end of the input."""
    monkeypatch.setattr("fedsim.commands.data.show_datasets", lambda name: np.load(io.BytesIO(b"")))
    code, _, errors = called("datasets")
    assert code == 1
    assert "EOFError: No data left in file (an unexpected error" in errors


def python(code: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **options)


def run_main(words: list[str]) -> None:
    sys.argv = ["fedsim", *words]
    main()


@pytest.mark.parametrize("method", ["fedbn", pytest.param("feddg-ga", marks=pytest.mark.slow)])
def test_a_run_is_complete_is_not_repeated_and_continues_after_a_kill(method, tmp_path, called):
    """After `kill -9` in the middle and the same command again, the CSV is that of the uninterrupted run."""
    words = ["run", "digits", "--method", method, "--target", "rot0", *SMALL, "--set", "train.rounds=6", "--output"]
    whole, broken = (tmp_path / name / "digits" / method / "rot0" / "seed0" for name in ("whole", "broken"))
    code, said, errors = called(*words, str(tmp_path / "whole"))
    assert code == 0, errors
    assert "best source validation" in said
    assert {file.name for file in whole.iterdir()} == {
        "experiment.toml", "environment.json", "rounds.csv", "clients.csv", "summary.csv", "best.safetensors",
        "last.safetensors", "predictions",
    }  # fmt: skip
    assert "already finished" in called(*words, str(tmp_path / "whole"))[1]
    clients = pd.read_csv(whole / "clients.csv")
    assert {"bytes_up_arrays", "weight", "train_seconds", "validation_accuracy"} <= set(clients)
    assert (clients["bytes_down_arrays"] == clients["bytes_down"]).all()
    for rows in (3, 5):
        process = multiprocessing.get_context("fork").Process(
            target=run_main, args=[[*words, str(tmp_path / "broken")]]
        )
        process.start()
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.is_alive():
            if (broken / "rounds.csv").is_file() and (broken / "rounds.csv").read_text().count("\n") >= rows:
                break
            time.sleep(0.01)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert not (broken / "summary.csv").exists()
    assert called(*words, str(tmp_path / "broken"))[0] == 0
    for name in ("rounds.csv", "clients.csv", "summary.csv"):
        assert numbers(broken / name).equals(numbers(whole / name)), name


@pytest.mark.parametrize(("words", "said"), [
    ("run digits --method gperxn", "did you mean 'gperxan'"),
    ("run digits --target rot7", "did you mean"),
    ("run digits --seed -1", "greater than or equal to 0"),
    ("run nowhere.toml", "no experiment file"),
    ("run tests", "'tests' is a folder"),
    ("run digits --method fedavg,fedprox", "fedsim sweep digits --methods fedavg,fedprox"),
    ("datasets foto", "no folder or table 'foto' in "),
    ("run digits --set model.backbone=digits-cnn --method gperxan", "batch norm"),
    ("run digits --set run.device=cuda", "no CUDA device"),
    ("run --what", "No such option"),
    ("run digits --method fedprox --set method.name=fedavg", "another value, 'fedprox'; remove"),
    ("run digits --callback a:B --set run.callbacks=['c:D']", "another value, ['a:B']"),
    ("pictures digits --target rot0 --set run.target=rot15", "another value, 'rot0'"),
    ("sweep digits --set run.output=elsewhere", "an option gives run.output another value"),
    ('sweep digits --set run={target="rot0"}', "run is a section; set single keys"),
    ("sweep digits --grid train={lr=0.1},{lr=0.2}", "train is a section; set single keys"),
    ("compare /nowhere", "/nowhere"),
    ("run tables/fedig-a-table-5", "fedsim sweep tables/fedig-a-table-5"),
    (f"run {config_folders()[0] / 'tables' / 'fedig-a-table-5.toml'}", "is a table of a paper"),
    ("datasets pacs --grid x.png", "--grid draws the images of a folder or table of your own"),
    ("methods --changes fuse,,terms", "--changes 'fuse,,terms': a name is empty"),
])  # fmt: skip
def test_bad_input_is_one_line(words, said, tmp_path, called, monkeypatch):
    """The exit code is 2, one line says what to do, and no file is left."""
    monkeypatch.chdir(tmp_path)
    Path("tests").mkdir()
    if "run.device=cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    words = words.split(" ")
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


def test_interruption_is_said(monkeypatch, called):
    """Ctrl-C prints one line, and the exit code is 130; also in the quarter of a second that the imports take."""

    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedsim.commands.data.show_datasets", interrupted)
    code, _, errors = called("datasets")
    assert (code, errors.strip()) == (130, INTERRUPTED)
    done = python("""
import os, runpy, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
runpy.run_module("fedsim", run_name="__main__")
""")
    assert (done.returncode, done.stderr.strip()) == (130, INTERRUPTED)


def test_a_shell_completes_commands(monkeypatch, called):
    code, script, _ = called("completion", "bash")
    assert (code, "complete -o default" in script) == (0, True)
    assert called("completion", "tcsh")[0] == 2
    words = {"COMP_WORDS": "fedsim sw", "COMP_CWORD": "1", "_FEDSIM_COMPLETE": "complete_bash"}
    code = "import sys; sys.argv = ['fedsim']; from fedsim.commands.start import main; main()"
    assert python(code, env={**os.environ, **words}).stdout.split() == ["sweep"]


def test_help_data_sets_and_results_import_nothing_heavy():
    """`fedsim --help` took three seconds where half of one is enough."""
    code = """
import contextlib, io, sys
from fedsim.commands.cli import main
def loaded(*names):
    print(*(name for name in names if name in sys.modules), sep=",", file=sys.stderr)
with contextlib.redirect_stdout(io.StringIO()):
    for words in (["--help"], ["--version"], ["datasets"], ["methods"]):
        sys.argv = ["fedsim", *words]
        with contextlib.suppress(SystemExit):
            main()
        loaded("torch", "ray", "flwr", "pandas")
    import fedsim.results
    loaded("torch", "ray", "flwr", "matplotlib")
"""
    assert python(code).stderr.split("\n") == [""] * 6


def test_every_argument_and_option_is_explained():
    """click 8.5 loses the help of arguments under typer 0.20; pyproject.toml excludes it."""
    commands = [get_command(app)]
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        silent = [each.name for each in command.params if not getattr(each, "help", None) and not command.hidden]
        assert not silent, (command.name, silent)


@pytest.mark.parametrize(("name", "layout"), [
    ("folder", "ROOT/DOMAIN/CLASS/IMAGE"),
    ("table", "columns path, label, domain"),
    ("hugging-face", "save_to_disk"),
    ("masks", "domain/mask/NAME"),
])  # fmt: skip
def test_own_data_says_what_to_write(tmp_path, name, layout, called):
    """A user's own data have no fixed domains; instead of an empty table a valid experiment file is printed."""
    code, out, _ = called("datasets", name)
    assert code == 0
    assert layout in out
    (tmp_path / "mine.toml").write_text(out[out.index("[data]") :])
    experiment = read_experiment(str(tmp_path / "mine.toml"))
    assert (experiment.data.dataset, experiment.data.root, experiment.train.rounds) == (name, "ROOT", 40)
    assert bool(experiment.data.structures) == (name == "masks")
