"""What becomes of a deployed run is read from Flower's status and from who holds the run's folder."""

import pytest

from fedsim.errors import ClientFailedError
from fedsim.runtime.deployment import verdict


class Control:
    """Answers `flwr list` with a status, and notes what it is told."""

    def __init__(self, state):
        self.state, self.told = state, []

    def flwr(self, *words):
        self.told.append(words[0])
        return {"runs": [{"status": self.state, "status-details": "the reason"}]}


def test_a_server_app_that_died_is_not_waited_for(tmp_path):
    """Flower calls such a run running until a heartbeat is missed; nobody holds its folder, so it is stopped."""
    control = Control("running")
    with pytest.raises(ClientFailedError, match=r"has died .*the same command\s+continues"):
        verdict(control, "7", tmp_path, patience=0.0)
    assert control.told == ["list", "stop"]


@pytest.mark.parametrize("state", ["pending", "starting"])
def test_a_run_that_begins_is_waited_for(state, tmp_path):
    """However long Flower takes."""
    assert verdict(Control(state), "7", tmp_path, patience=0.0) is False


def test_a_run_that_failed_says_why(tmp_path):
    """Flower's details without their preamble."""
    with pytest.raises(ClientFailedError, match=r"^the reason$"):
        verdict(Control("finished:failed"), "7", tmp_path, patience=0.0)
