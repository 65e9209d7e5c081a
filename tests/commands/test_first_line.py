"""The first line of a run: it comes before what takes long, and a run that is refused takes it back."""

import io
import subprocess
import sys

import pytest
from support import tiny_experiment

from fedsim.commands import runs
from fedsim.common.console import Terminal
from fedsim.common.errors import UserError

HEAVY = ("torch", "torchvision", "flwr", "pandas", "pyarrow", "numpy", "ray", "sklearn", "scipy", "matplotlib", "PIL")
TAKEN_BACK = "\x1b[1A\x1b[2K"  # one line up, and the line erased
CODE = """
import sys
from fedsim.commands import runs
from fedsim.commands.start import main

heavy = sys.argv[1].split(",")
sys.argv[1:] = ["run", "hospitals", "--target", "hungary"]

def first_line(bar, experiment):
    print(*(name for name in heavy if name in sys.modules))
    raise SystemExit(3)

runs.ProgressBar.begin = first_line
main()
"""


@pytest.fixture
def terminal(monkeypatch):
    """What a terminal receives."""
    file = io.StringIO()
    monkeypatch.setattr(runs, "errors", Terminal(file=file, force_terminal=True, width=100, legacy_windows=False))
    return file


def test_nothing_that_takes_long_is_imported_before_the_first_line(tmp_path):
    """PyTorch alone takes a second, pandas and Flower a third of one."""
    words = [sys.executable, "-c", CODE, ",".join(HEAVY)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert done.stdout == "\n"


def test_the_bar_is_there_at_once_and_stays(tmp_path, terminal):
    experiment = tiny_experiment(tmp_path, rounds=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedsim.runs.plan.resolve", lambda experiment: pytest.fail(terminal.getvalue()))
        with pytest.raises(pytest.fail.Exception, match=r"(?s)fedavg → .*starting"):
            runs.run_one(experiment)
    assert terminal.getvalue().endswith(TAKEN_BACK)
    runs.run_one(experiment)
    assert "1/1" in terminal.getvalue()
    assert not terminal.getvalue().endswith(TAKEN_BACK)


def test_the_unseen_domain_of_a_run_that_names_none_is_said(tmp_path, monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(runs, "errors", Terminal(file=file, width=200))
    experiment = tiny_experiment(tmp_path, rounds=1)
    line = "unseen domain: rot45, the last one, by default; --target takes another one (rot0, rot15, rot30)\n"
    for target in ("rot45", ""):
        runs.run_one(experiment.replace(run={"target": target, "seed": len(target)}))
        assert file.getvalue().startswith(line) == (not target)
        file.seek(0)
        file.truncate()


def test_a_refused_run_leaves_no_bar(tmp_path, terminal):
    with pytest.raises(UserError, match="no domain"):
        runs.run_one(tiny_experiment(tmp_path, rounds=1).replace(run={"target": "nowhere"}))
    assert "starting" in terminal.getvalue()
    assert terminal.getvalue().endswith(TAKEN_BACK)
