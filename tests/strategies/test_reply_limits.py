"""A number or a bank's record of one client cannot destroy the run: it is refused in its round, and by name."""

import numpy as np
import pandas as pd
import pytest
from flwr.app import MetricRecord
from support import run_small, small_experiment

from fedsim.settings import RunSettings
from fedsim.tensors.arrays import record_to_arrays, state_to_record
from strategies.parts import Update
from strategies.wire.guard import Guard
from strategies.wire.reply_limits import metrics_over_limit, records_over_limit

LIAR = "rot15"
RUN = RunSettings()
MODEL = {"w": np.array([3.0, 4.0], np.float32)}  # of norm 5


def refused(name, values, momentum=0.0, run=RUN):
    return metrics_over_limit({client: {name: value} for client, value in values.items()}, {name}, run, momentum)


def test_counts_are_limited_by_those_of_the_others():
    """With momentum 0.9 a client with 100 times the steps may have 1000 times the number of gradients."""
    assert refused("gradient_count", {"a": 10.0, "b": 12.0, "c": 1201.0}).keys() == {"c"}
    assert refused("steps", {"a": 1e-6, "b": 12, "c": 10}) == {}
    assert refused("gradient_count", {"a": 10.0, "b": 12.0, "c": 11_900.0}, 0.9) == {}
    assert refused("gradient_count", {"a": 10.0, "b": 12.0, "c": 12_100.0}, 0.9).keys() == {"c"}
    assert refused("learning_rate", {"a": 0.0, "b": 0.0, "c": 0.0}) == {}
    assert refused("learning_rate", {"a": 0.1}) == {}
    assert refused("steps", {"a": 1, "b": 1, "c": 10**9}, run=RunSettings(examples_limit=0)) == {}
    assert "either may be the wrong one" in refused("steps", {"a": 1, "b": 1000})["b"]


def test_losses_are_limited_but_small_ones_may_differ_by_any_factor():
    """A loss of 0.5 is no fault where the others' models fit to 1e-5."""
    assert refused("received_loss", {"a": 1e-5, "b": 1e-6, "c": 0.5}) == {}
    assert refused("received_loss", {"a": 2.3, "b": 2.2, "c": 1e30}).keys() == {"c"}
    assert refused("received_loss", {"a": 2e3, "b": 3e3, "c": 2e5}) == {}
    assert metrics_over_limit({"a": {"train_loss": 1e30}, "b": {"train_loss": 1.0}}, set(), RUN, 0.0) == {}


def test_records_are_limited_by_those_of_the_others():
    """A record with a smaller norm than the model is never too large, and of records that are 0 nothing is known."""
    assert records_over_limit({"a": 1.0, "b": 2.0, "c": 201.0}, MODEL, 100.0).keys() == {"c"}
    assert records_over_limit({"a": 1.0, "b": 2.0, "c": 200.0}, MODEL, 100.0) == {}
    assert records_over_limit({"a": 1e-4, "b": 1e-5, "c": 4.9}, MODEL, 100.0) == {}
    assert records_over_limit({"a": 1e-4, "b": 1.0, "c": 1e30}, MODEL, 0.0) == {}
    assert records_over_limit({"a": 0.0, "b": 0.0, "c": 9.0}, MODEL, 100.0) == {}


def test_a_model_that_moves_much_further_than_every_update():
    guard, updates = Guard(100.0), [Update("a", 1, {}), Update("b", 1, {})]
    guard.sizes = {"a": 1.0, "b": 2.0, "refused": 1e9}
    assert guard.too_far(200.0, updates) == ""
    assert "moves 101 times as far" in guard.too_far(202.0, updates)
    assert Guard(0.0).too_far(1e30, updates) == ""


def lie(bank, metrics):
    """Multiplies the liar's record of a bank in round 1, or changes its metrics."""

    def tamper(message, reply):
        config = message.content["config"]
        if reply.has_error() or config.get("client") != LIAR or config["round"] > 1:
            return reply
        if bank in reply.content:
            arrays = record_to_arrays(reply.content[bank])
            new = {n: (np.sign(a) * 1e30).astype(a.dtype) if n != "batches" else np.array(a) for n, a in arrays.items()}
            reply.content[bank] = state_to_record(new)
        if metrics and config["phase"] == "train":
            reply.content["metrics"] = MetricRecord({**reply.content["metrics"], **metrics})
        return reply

    return tamper


@pytest.mark.parametrize(("method", "bank", "metrics", "reason"), [
    ("scaffold", "control", {}, "control: its record has the norm"),
    ("fediir", "classifier_gradient", {}, "classifier_gradient refused: its record has the norm"),
    ("fednova", "", {"gradient_count": 1e-6}, "the aggregated model moves"),
    ("afl", "", {"received_loss": 1e30}, "its received_loss is 1e+30"),
])  # fmt: skip
def test_one_lie_is_refused_by_name(tmp_path, method, bank, metrics, reason):
    """The run goes on with the honest clients alone."""
    train = {"rounds": 1, "iterations": 2}
    experiment = small_experiment(tmp_path, method, train=train, run={"on_client_failure": "continue"})
    folder, _ = run_small(experiment, tamper=lie(bank, metrics))
    clients = pd.read_csv(folder / "clients.csv").query("round == 1").set_index("client")
    assert reason in clients.loc[LIAR, "status"]
    assert clients.drop(LIAR)["status"].eq("ok").all()
    assert pd.read_csv(folder / "rounds.csv")["target_loss"].iloc[1] < 10
