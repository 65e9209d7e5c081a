"""Refining parts on hand-computed numbers: the server's step and the average over rounds."""

import numpy as np
import pytest
from support import Interrupt, numbers, run_small, small_experiment

from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe
from fedsim.run.workspace import close_workspaces
from strategies.parts import ServerRound
from strategies.refine.server_average import ServerAverage
from strategies.refine.server_step import ServerStep
from strategies.server_parts import ServerParts
from strategies.state import ServerState


def model(w, mean=0.0, count=0):
    return {
        "w": np.array([w], np.float32),
        "mean": np.array([mean], np.float32),
        "count": np.array(count, np.int64),
    }


def server(previous, round=1, arrays=None, state=None):
    found = ServerRound(round, 5, ["a"], previous, {} if state is None else state, parameters=frozenset({"w"}))
    found.arrays = {} if arrays is None else arrays
    return found


def test_server_step_by_hand():
    """1 + 0.5 (3 - 1) = 2; buffers take the fused value."""
    moved = ServerStep(0.5).refine(model(3, 7, 4), server(model(1, 5, 2)))
    assert [moved[name].item() for name in ("w", "mean", "count")] == [2.0, 7.0, 4]
    assert [moved[name].dtype for name in moved] == [np.float32, np.float32, np.int64]
    assert ServerStep(2.0).refine(model(3), server(model(1)))["w"].item() == 5.0


def test_average_over_rounds_by_hand():
    """beta = 0.5 on 2, 4, 8 gives 2, 3, 5.5; the running mean is 2, 3, 14/3. The clients train on 2, 4, 8."""
    for part, means in ((ServerAverage(0.5), [2, 3, 5.5]), (ServerAverage(running=True), [2, 3, 14 / 3])):
        arrays, state = {}, {}
        for round, (theta, mean) in enumerate(zip([2.0, 4.0, 8.0], means), start=1):
            seen = server(model(0), round, arrays, state)
            average = part.refine(model(theta, theta + 1, round), seen)
            assert average["w"].item() == np.float32(mean)
            assert average["mean"].item() == pytest.approx(mean + 1, rel=1e-6)
            assert average["count"].item() == round
            start = part.start(average, seen)
            assert [start[name].item() for name in ("w", "mean", "count")] == [theta, theta + 1, round]


def test_average_begins_when_it_is_told():
    """Before `first_round` it is the newest model; with beta = 0 it always is."""
    arrays, state = {}, {}
    part = ServerAverage(0.5, first_round=2)
    seen = [server(model(0), round, arrays, state) for round in (1, 2, 3)]
    found = [part.refine(model(theta), each)["w"].item() for theta, each in zip([1, 3, 5], seen)]
    assert found == [1.0, 3.0, 4.0]
    for neutral in (ServerAverage(0.0), ServerStep(1.0)):
        seen = server(model(0))
        assert [neutral.refine(model(theta), seen)["w"].item() for theta in (3, 0.1)] == [3.0, np.float32(0.1)]


def test_clients_train_on_beside_the_average_and_a_resumed_run_has_it(tmp_path):
    """Training losses are FedAvg's, but the evaluated model differs; after a kill and a resume the tables are equal."""

    def run(folder, method, *callbacks):
        method = {"name": "fedavg", "refine": method}
        return run_small(small_experiment(tmp_path / folder, method, train={"iterations": 1}), *callbacks)[0]

    whole = run("whole", ["server_average"])
    ours, theirs = numbers(whole / "rounds.csv"), numbers(run("plain", []) / "rounds.csv")
    assert ours["train_loss"].equals(theirs["train_loss"])
    assert (ours["target_loss"].iloc[2:] != theirs["target_loss"].iloc[2:]).all()
    with pytest.raises(KeyboardInterrupt):
        run("cut", ["server_average"], Interrupt(2))
    close_workspaces()
    assert numbers(run("cut", ["server_average"]) / "rounds.csv").equals(ours)


def test_the_state_of_parts_in_another_order_is_not_lost_without_a_word(tmp_path):
    experiment = small_experiment(tmp_path, {"name": "feddyn", "add": ["server_average"]})
    recipe = build_recipe(experiment)
    parts = ServerParts(recipe, experiment, {}, ServerState())
    keys = [f"refine.{place}.{type(part).__name__}" for place, part in enumerate(recipe.refine)]
    assert len(keys) == 2
    parts.require_places(ServerState(parts={keys[0]: {}, "weights": {}}, tensors={keys[1]: {}}))
    with pytest.raises(UserError, match=r"state of refine\.1\.DynamicCorrection, which has another place"):
        parts.require_places(ServerState(tensors={"refine.1.DynamicCorrection": {}}))
