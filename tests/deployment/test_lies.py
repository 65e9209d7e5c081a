"""Lies of a registered site on a real federation: a model that it pushes away, and costs that cannot be true."""

import numpy as np
import pandas as pd
import pytest
from harness import SOURCES, VICTIM, Loopback, run_folder, run_inline
from outcomes import CONTINUE, statuses

LEARNING = {"train.rounds": 12, "train.lr": 0.05, "train.momentum": 0.9}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Three source sites; the server has the images of the unseen domain."""
    with Loopback(tmp_path_factory.mktemp("lies"), target=False) as running:
        yield running


def completed(federation, output, **settings):
    """The folder of a run that goes on when a site fails."""
    done = federation.run(output, **CONTINUE, **settings)
    assert done.returncode == 0, done.stderr
    return run_folder(output)


@pytest.mark.deployment
def test_a_site_that_pushes_the_model_away_has_no_say_from_then_on(federation, tmp_path):
    """Ten times as far as honest training, in the opposite direction, in every round: below `run.update_limit`."""
    federation.break_site("opposite", round="any", once=False, times=10)
    folder = completed(federation, tmp_path / "attacked", **LEARNING)
    federation.fault_file().unlink()
    honest = run_inline(tmp_path / "honest", **LEARNING)
    liar = statuses(folder).xs(VICTIM, level="client")
    assert liar.str.contains("10 times what it was, or not finite, at").any()
    assert liar.iloc[-1].endswith("the limit of a client that has ruined a model is 3")
    losses = [pd.read_csv(each / "rounds.csv")["mean_validation_loss"].iloc[-1] for each in (honest, folder)]
    assert losses[1] < 2 * losses[0] + 1


@pytest.mark.deployment
def test_costs_that_cannot_be_true_reach_no_record(federation, tmp_path):
    """In round 1 a site says 1e30 seconds and a loss below 0, which are left out, and in round 2 1e30 steps."""
    rows, names = [], {"seconds": {"train_seconds": 1e30, "train_loss": -1e30}, "steps": {"steps": 1e30}}
    for kind, metrics in names.items():
        federation.break_site("metrics", metrics=metrics)
        folder = completed(federation, tmp_path / kind)
        rows.append(pd.read_csv(folder / "clients.csv").set_index(["round", "client"]).loc[2])
        numbers = pd.concat([pd.read_csv(folder / name) for name in ("rounds.csv", "clients.csv", "summary.csv")])
        assert numbers.select_dtypes("number").abs().max(axis=None) < 1e9
    seconds, steps = rows
    assert seconds["status"].eq("ok").all()
    assert np.isnan(seconds.loc[VICTIM, "train_loss"])
    assert "steps is 1e+30, more than twice the" in steps.loc[VICTIM, "status"]
    assert [steps.loc[name, "status"] for name in SOURCES if name != VICTIM] == ["ok", "ok"]
