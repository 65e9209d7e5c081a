"""The result of a deployed run follows from Flower's status and from which process holds the run's folder."""

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
    """Flower says "running" until a heartbeat is missed, but no process holds the folder, so the run is stopped."""
    control = Control("running")
    with pytest.raises(ClientFailedError, match=r"has died .*the same command\s+continues"):
        verdict(control, "7", tmp_path, patience=0.0)
    assert control.told == ["list", "stop"]


@pytest.mark.parametrize("state", ["pending", "starting"])
def test_a_run_that_begins_is_waited_for(state, tmp_path):
    """It is waited for, however long Flower takes to start it."""
    assert verdict(Control(state), "7", tmp_path, patience=0.0) is False


def test_a_run_that_failed_says_why(tmp_path):
    """The message contains Flower's details without their first words."""
    with pytest.raises(ClientFailedError, match=r"^the reason$"):
        verdict(Control("finished:failed"), "7", tmp_path, patience=0.0)
