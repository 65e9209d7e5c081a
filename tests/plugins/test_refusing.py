"""A server part may refuse what one client sent at any moment of the round: the client fails, and the run goes on."""

import pandas as pd
import pytest
from support import Interrupt, run_small, small_experiment

from fedsim.common.errors import ClientFailedError
from fedsim.run.checkpoint import load_checkpoint
from fedsim.run.plan import run_folder


def experiment_of(tmp_path, row, failure):
    """A run of that row."""
    few = {"data": {"fraction": 0.03, "image_size": 16}, "train": {"rounds": 2}}
    return small_experiment(tmp_path, f"refusing:{row}", **few, run={"on_client_failure": failure})


@pytest.mark.parametrize(("row", "victim"), [
    ("before", "rot15"), ("after", "rot15"), ("visit", "rot45"),
])  # fmt: skip
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


@pytest.mark.parametrize(("row", "said"), [
    ("before", r"'rot15'.*its sum is negative"),
    # `needs` is documented for every part; earlier that of a term or a visit was not looked at
    ("needing", r"missing metrics \['no_such_number'\]"),
])  # fmt: skip
def test_the_run_ends_where_it_should(tmp_path, row, said):
    with pytest.raises(ClientFailedError, match=said):
        run_small(experiment_of(tmp_path, row, "stop"))
