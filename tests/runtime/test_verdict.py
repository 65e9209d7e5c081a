"""The result of a deployed run follows from Flower's status and from which process holds the run's folder."""

import pytest

from fedsim.common.errors import ClientFailedError, UserError
from fedsim.deploy import runtime
from fedsim.deploy.runtime import new_rounds, verdict
from fedsim.runs.claim import claim, is_abandoned, kernel
from fedsim.settings.experiment import Experiment


class Control:
    """Answers `flwr list` with a status, and notes what it is told."""

    def __init__(self, state):
        self.state, self.told = state, []

    def flwr(self, *words):
        self.told.append(words[0])
        return {"runs": [{"status": self.state, "status-details": "the reason"}]}


def test_the_end_of_a_run_follows_from_its_status_and_its_folder(tmp_path):
    """Flower says "running" until a heartbeat is missed, but no process holds the folder, so the run is stopped."""
    control = Control("running")
    with pytest.raises(ClientFailedError, match=r"has died .*the same command\s+continues"):
        verdict(control, "7", tmp_path, patience=0.0)
    assert control.told == ["list", "stop"]
    for state in ("pending", "starting"):
        assert verdict(Control(state), "7", tmp_path, patience=0.0) is False
    with pytest.raises(ClientFailedError, match=r"^the reason$"):
        verdict(Control("finished:failed"), "7", tmp_path, patience=0.0)


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_server_app_that_ends_slowly_has_not_died(tmp_path, monkeypatch, is_dead):
    """One that dies leaves its claim behind. One that ends takes it away, and may end late on a busy machine."""
    with claim(tmp_path):
        assert not is_abandoned(tmp_path)
    assert not is_abandoned(tmp_path)
    if is_dead:
        (tmp_path / ".lock").write_text(f"process 1 on here\n{kernel()} 00\n")
    answers = iter([True])
    waited = []

    def verdict(control, run_id, folder, patience):
        waited.append(patience)
        raise ClientFailedError("the reason")

    monkeypatch.setattr(runtime, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(runtime, "is_claimed", lambda folder: next(answers, False))
    monkeypatch.setattr(runtime, "verdict", verdict)
    with pytest.raises(ClientFailedError, match="the reason"):
        runtime.follow(Control("running"), "7", Experiment(), tmp_path, ())
    assert waited == [runtime.DEAD_SECONDS if is_dead else runtime.PATIENCE_SECONDS]


def test_new_rows_are_read_like_all_records(tmp_path):
    """A row that is being written waits; a file that another program has changed is named in one line."""
    file, rows = tmp_path / "rounds.csv", new_rounds(tmp_path)
    assert next(rows) == []
    for text, told in (("", []), ("round,target_loss\n", []), ("round,target_loss\n0,0.5\n1,", [(0, 0.5)])):
        file.write_text(text)
        assert [(row["round"], row["target_loss"]) for row in next(rows)] == told
    file.write_text("round,target_loss\n0,0.5\n1,\n2,0.25\n")
    assert next(rows) == [{"round": 1, "target_loss": None}, {"round": 2, "target_loss": 0.25}]
    file.write_text("round,target_loss\n0,0.5\n1,\n2,0.25\nthree,0.25\n")
    with pytest.raises(UserError, match=r"rounds\.csv: 'round' has text in place of numbers"):
        next(rows)
