"""A server part may refuse what one client sent at any moment of the round: the client fails, and the run goes on."""

import sys
from pathlib import Path

import pandas as pd
import pytest
from support import Interrupt, run_small, small_experiment

from fedsim.common.errors import ClientFailedError
from fedsim.run.checkpoint import load_checkpoint
from fedsim.run.plan import run_folder


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """The module with the refusing rows is found."""
    monkeypatch.setenv("FEDSIM_PLUGINS", str(Path(__file__).parent))
    monkeypatch.setattr(sys, "path", list(sys.path))


def experiment_of(tmp_path, row, failure):
    """A run of that row."""
    run = {"on_client_failure": failure}
    return small_experiment(tmp_path, f"refusing:{row}", run=run)


@pytest.mark.parametrize(
    ("row", "victim"),
    [
        ("before", "rot15"),
        ("after", "rot15"),
        ("compared", "rot15"),
        ("compared_before", "rot15"),
        ("visit", "rot45"),
    ],
)
def test_the_client_fails_and_the_rest_is_used(tmp_path, row, victim):
    """Earlier each of these ended the run with the part's exception, also under "continue"."""
    experiment = experiment_of(tmp_path, row, "continue")
    with pytest.raises(KeyboardInterrupt):  # after the round, so that its checkpoint is there
        run_small(experiment, Interrupt(1))
    folder = run_folder(experiment)
    rows = pd.read_csv(folder / "clients.csv").query("round == 1").set_index("client")
    assert "its sum is negative" in rows.loc[victim, "status"]
    assert (rows.drop(index=victim)["status"] == "ok").all()
    trained = rows["weight"].dropna().index
    assert set(trained) == {"rot0", "rot15", "rot30"} - ({victim} if row != "after" else set())
    state = load_checkpoint(folder / "checkpoint").state.parts
    assert state.get("banks.sums", {}).get("merges", 1) == 1
    assert not state.get("visits.look")


def test_the_run_ends_where_it_should(tmp_path):
    """With "stop" the client is named."""
    with pytest.raises(ClientFailedError, match=r"'rot15'.*its sum is negative"):
        run_small(experiment_of(tmp_path, "before", "stop"))


def test_a_client_s_part_may_need_a_metric_too(tmp_path):
    """`needs` is documented for every part; earlier that of a term or a visit was not looked at."""
    with pytest.raises(ClientFailedError, match=r"missing metrics \['no_such_number'\]"):
        run_small(experiment_of(tmp_path, "needing", "stop"))
