"""The loop that carries out every study: the order of its calls, what a dry run leaves out, and which cells failed."""

from pathlib import Path

import pytest

from fedsim.settings.experiment import read_experiment
from fedsim.studies import Budget, Cell, loop
from fedsim.studies.study import Study

DIGITS = read_experiment("digits", ["run.target=rot0"])


class Steps(Study):
    """A study of two steps, the second of which has a cell of the first again; it notes what it is asked."""

    def __init__(self, looks_ahead: bool = False) -> None:
        first, second = (Cell(DIGITS, Path(f"/nowhere/{name}")) for name in "ab")
        self.steps = [[first], [first, second]]
        self.looks_ahead = looks_ahead
        self.calls: list[str] = []

    def ask(self):
        self.calls.append("ask")
        return self.steps.pop(0) if self.steps else []

    def begin(self, dry_run):
        self.calls.append("begin")

    def looks_beyond(self, cells):
        return self.looks_ahead

    def tell(self, cells):
        self.calls.append("tell " + "".join(cell.folder.name for cell in cells))

    def report(self):
        self.calls.append("report")


@pytest.fixture(autouse=True)
def without_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cell is run: each fails at once."""

    def carry_out_step(study, cells, budget, dry_run):
        study.calls.append("dry" if dry_run else "run")
        for cell in cells:
            cell.state = "failed"

    monkeypatch.setattr(loop, "carry_out_step", carry_out_step)


def test_steps_follow_one_another_until_none_is_left():
    """The report comes last, and a cell that failed in two steps is named once."""
    study = Steps()
    failed = loop.carry_out(study, Budget())
    step = ["ask", "begin", "run"]
    assert study.calls == [*step, "tell a", *step, "tell ab", "ask", "report"]
    assert [cell.folder.name for cell in failed] == ["a", "b"]


@pytest.mark.parametrize(("looks_ahead", "calls"), [
    (False, ["ask", "begin", "dry"]),
    (True, ["ask", "begin", "dry", "tell a", "ask", "begin", "dry", "tell ab", "ask", "report"]),
])  # fmt: skip
def test_a_dry_run_goes_on_only_where_the_study_looks_beyond_a_step(looks_ahead, calls):
    study = Steps(looks_ahead)
    loop.carry_out(study, Budget(), dry_run=True)
    assert study.calls == calls
