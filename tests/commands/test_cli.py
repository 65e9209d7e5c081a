"""The command line: one line and exit code 2 for wrong input, no traceback, and no incomplete files."""

import errno
import gc
import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from processes import until
from support import numbers, tiny_experiment
from typer.main import get_command
from typer.testing import CliRunner

from fedsim.commands import start
from fedsim.commands.cli import app, main
from fedsim.common import exit_codes, garbage
from fedsim.common.errors import ClientFailedError, UserError
from fedsim.runtime.launch import launch
from fedsim.settings.experiment import read_experiment

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


def run_main(words: list[str]) -> None:
    sys.argv = ["fedsim", *words]
    main()


def test_a_run_is_complete_is_not_repeated_and_continues_after_a_kill(tmp_path, called):
    """After `kill -9` in the middle and the same command again, the CSV is that of the uninterrupted run."""
    words = ["run", "digits", "--method", "fedbn", "--target", "rot0", *SMALL, "--set", "train.rounds=4", "--output"]
    whole, broken = (tmp_path / name / "digits" / "fedbn" / "rot0" / "seed0" for name in ("whole", "broken"))
    code, said, errors = called(*words, str(tmp_path / "whole"))
    assert code == 0, errors
    assert "best source validation" in said
    assert {file.name for file in whole.iterdir()} == {
        "experiment.toml", "environment.json", "rounds.csv", "clients.csv", "summary.csv", "best.safetensors",
        "last.safetensors", "predictions",
    }  # fmt: skip
    assert "already finished" in called(*words, str(tmp_path / "whole"))[1]
    process = multiprocessing.get_context("fork").Process(target=run_main, args=[[*words, str(tmp_path / "broken")]])
    process.start()
    until(lambda: (broken / "rounds.csv").is_file() and (broken / "rounds.csv").read_text().count("\n") >= 3)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (broken / "summary.csv").exists()
    assert called(*words, str(tmp_path / "broken"))[0] == 0
    for name in ("rounds.csv", "clients.csv", "summary.csv"):
        assert numbers(broken / name).equals(numbers(whole / name)), name


@pytest.mark.parametrize(("words", "said"), [
    ("run digits --method gperxn", "did you mean 'gperxan'"),
    ("run nowhere.toml", "no experiment file"),
    ("run tests", "'tests' is a folder"),
    ("run digits --method fedavg,fedprox", "fedsim sweep digits --methods fedavg,fedprox"),
    ("datasets foto", "no folder or table 'foto' in "),
    ("run digits --set run.device=cuda", "no CUDA device"),
    ("run digits --method fedprox --set method.name=fedavg", "another value, 'fedprox'; remove"),
    ("sweep digits --set run.output=elsewhere", "an option gives run.output another value"),
    ("compare /nowhere", "/nowhere"),
    ("run tables/fedig-a-table-5", "fedsim sweep tables/fedig-a-table-5"),
    ("datasets pacs --grid x.png", "--grid draws the images of a folder or table of your own"),
])  # fmt: skip
def test_bad_input_is_one_line(words, said, tmp_path, called, monkeypatch):
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


def test_interruption_is_said(monkeypatch, called):
    """Ctrl-C prints one line, and the exit code is 130; also in the quarter of a second that the imports take."""

    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedsim.commands.data.show_datasets", interrupted)
    code, _, errors = called("datasets")
    assert (code, errors.strip()) == (130, INTERRUPTED)
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
    assert (done.returncode, done.stderr.strip()) == (130, INTERRUPTED)


def test_garbage_is_searched_for_rarely_until_a_run_begins(tmp_path, monkeypatch):
    monkeypatch.setattr("fedsim.commands.cli.main", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda number, answer: None)
    start.main()
    assert gc.get_threshold()[0] == garbage.MANY_OBJECTS
    launch(tiny_experiment(tmp_path, rounds=1))
    assert gc.get_threshold() == garbage.USUAL
    gc.set_threshold(7)
    launch(tiny_experiment(tmp_path / "again", rounds=1))
    assert gc.get_threshold()[0] == 7  # what a user's program asks for stays
    gc.set_threshold(*garbage.USUAL)


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


def test_a_module_that_hides_our_package_is_named_with_both_paths(tmp_path, monkeypatch, called):
    """`python -m` searches the working folder first."""
    (tmp_path / "clients.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "clients")
    code, _, errors = called("methods")
    home = Path(exit_codes.__file__).parents[2]
    said = f"{tmp_path / 'clients.py'} hides the package 'clients' of fedsim, which is {home / 'clients'}; rename"
    assert (code, said in errors) == (2, True)


@pytest.mark.parametrize(("error", "code", "said"), [
    (UserError("no such thing"), 2, "no such thing"),
    (ClientFailedError("photo: out of memory"), 1, "photo: out of memory"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (OSError(errno.EROFS, "Read-only file system", "/mnt/x"), 2, "/mnt/x: Read-only file system"),
    (RuntimeError("I/O error: No space left on device (os error 28)"), 2, "free some space"),
    (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero (an unexpected error"),
    (ValueError("two\nlines"), 1, "ValueError: two lines"),
])  # fmt: skip
def test_every_error_becomes_one_line(error, code, said, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(exit_codes.tempfile, "gettempdir", lambda: str(tmp_path))
    assert exit_codes.guarded(Mock(side_effect=error)) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedsim: ")
    assert said in line
    logs = list(tmp_path.glob("fedsim-*.log"))
    assert bool(logs) == (code == 1 and not isinstance(error, ClientFailedError))
    for log in logs:
        assert str(log) in line
        assert "Traceback" in log.read_text()


SWEEP = ["sweep", "digits", "--dry-run", "--set", "train.rounds=1"]


@pytest.mark.parametrize("verb", ["sweep", "compare", "plot", "report"])
def test_empty_names_and_wrong_seeds_are_refused(tmp_path, verb):
    words = SWEEP if verb == "sweep" else [verb, str(tmp_path)]
    for option, text in (("--targets", "rot0,"), ("--methods", ",")):
        with pytest.raises(UserError, match=f"{option} '{text}': a name is empty"):
            raise CliRunner().invoke(app, [*words, option, text]).exception
    for seeds in ("²", "1,,2", "-1"):
        with pytest.raises(UserError, match=f"--seeds '{seeds}'.*: give whole numbers separated by commas"):
            raise CliRunner().invoke(app, [*words, f"--seeds={seeds}"]).exception


def test_weights_that_a_fusion_does_not_use_are_not_named(called):
    for name, is_weighted in (("csac", False), ("qfedavg", False), ("fedavg", True)):
        out = " ".join(called("methods", name)[1].split())
        assert ("weights by_examples" in out) == is_weighted
        assert ("weights of clients: not used by" in out) == (not is_weighted)


def test_an_experiment_of_brackets_is_one_line(called, tmp_path):
    file = tmp_path / "deep.toml"
    file.write_text("name = " + "[" * 100_000)
    code, _, errors = called("run", str(file))
    assert code == 2
    assert f"{file}: not valid TOML" in errors
    assert errors.count("\n") == 1
