"""The command line: one line and exit code 2 for wrong input, no traceback, and no incomplete files."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import until
from support import numbers
from typer.main import get_command

from fedsim.commands.cli import app, main
from fedsim.common import edge
from fedsim.common.errors import ClientFailedError, UserError
from fedsim.settings.experiment import read_experiment

SMALL = ["--set", "data.fraction=0.1", "--set", 'data.domains=["rot0", "rot15", "rot30"]']
PROGRAM = [sys.executable, "-m", "fedsim"]
ROOT = Path(edge.__file__).parents[2]
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


def python(code: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **options)


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


def fedsim(*words, program=PROGRAM, stdout=subprocess.PIPE, cwd=None, **variables):
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    pipes = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True}
    return subprocess.run([*program, *words], env=variables, cwd=cwd, timeout=200, **pipes)


def one_line(done, code):
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("fedsim: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def test_modules_that_hide_our_packages_are_named_with_both_paths(tmp_path):
    """`python -m` searches the working folder first; both Flower apps say it too."""
    for name, command in (("clients", ["methods"]), ("strategies", ["datasets"])):
        module = tmp_path / f"{name}.py"
        module.write_text("")
        said = f"{module} hides the package {name!r} of fedsim, which is {ROOT / name}; rename"
        assert said in one_line(fedsim(*command, cwd=tmp_path), 2)
        for entry in ("server_app", "client_app"):
            loaded = fedsim(program=[sys.executable, "-c", f"import fedsim.{entry}"], cwd=tmp_path)
            assert said in loaded.stderr.splitlines()[-1]
        module.unlink()


def failing(error):
    def command(*args, **kwargs):
        raise error

    return command


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
    monkeypatch.setattr(edge.tempfile, "gettempdir", lambda: str(tmp_path))
    assert edge.guarded(failing(error)) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedsim: ")
    assert said in line
    logs = list(tmp_path.glob("fedsim-*.log"))
    assert bool(logs) == (code == 1 and not isinstance(error, ClientFailedError))
    for log in logs:
        assert str(log) in line
        assert "Traceback" in log.read_text()
