"""The result of a deployed run follows from Flower's status and from which process holds the run's folder."""

import pytest

from fedsim.common.errors import ClientFailedError, UserError
from fedsim.deploy.runtime import new_rounds, verdict


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
