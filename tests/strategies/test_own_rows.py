"""PLAN on the server: the row of each client, beside server optimizers and robust fusions."""

import numpy as np
import pytest

from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe, find_recipe
from fedsim.models.inserts.prompt_sets import ROWS
from fedsim.parts.part import part_name
from fedsim.settings.experiment import Experiment
from strategies.parts import ServerRound, Update
from strategies.refine.own_rows import OwnRows


def test_the_server_keeps_the_row_of_each_client():
    """Client b sent nothing: its row stays. Aggregators are as fused."""
    previous = {name: np.zeros((3, 1), np.float32) for name in ROWS} | {"w": np.zeros(1, np.float32)}
    sent = {client: {**{name: np.full((3, 1), value, np.float32) for name in ROWS}, "w": np.ones(1, np.float32)}
            for client, value in (("a", 1.0), ("c", 5.0))}  # fmt: skip
    server = ServerRound(2, 6, ["a", "b", "c"], previous, updates=[Update(c, 4, own) for c, own in sent.items()])
    found = OwnRows().refine({name: array + 3 for name, array in previous.items()}, server)
    assert all(found[name].ravel().tolist() == [1, 0, 5] for name in ROWS)
    assert found["w"].tolist() == [3.0]
    assert all(not previous[name].any() for name in ROWS)


@pytest.mark.parametrize("optimizer", ["fedavgm", "fedyogi"])
def test_server_optimizers_do_not_move_rows(optimizer):
    """Client b sends nothing in round 2: its row stays, whatever the moments of round 1. Others are what was sent."""
    recipe, names = find_recipe(f"plan+{optimizer}"), (*ROWS, "w")
    model, memory = {name: np.zeros((2, 1), np.float32) for name in names}, [{} for _ in recipe.refine]
    for number, senders in ((1, ("a", "b")), (2, ("a",))):
        before = model
        updates = [Update(c, 4, {name: array + number for name, array in before.items()}) for c in senders]
        server = ServerRound(number, 2, ["a", "b"], before, updates=updates, parameters=frozenset(names))
        model = recipe.fuse.fuse(updates, dict.fromkeys(senders, 1 / len(senders)), server)
        for part, arrays in zip(recipe.refine, memory):
            model = part.refine(model, server.of_part({}, arrays))
        assert not np.array_equal(model["w"], before["w"])
        for name in ROWS:
            moved = (model[name] - before[name]).ravel().tolist()
            assert moved == [number, number if "b" in senders else 0], (name, number)


def test_own_rows_come_after_the_servers_steps_and_before_its_training():
    added = ["server_average", "ensemble_distillation", "server_step", "fed_avg_m"]
    recipe = build_recipe(Experiment(method={"name": "plan", "add": added}))
    expected = ["fed_avg_m", "server_step", "own_rows", "ensemble_distillation", "server_average"]
    assert [part_name(part) for part in recipe.refine] == expected


@pytest.mark.parametrize("method", ["plan", {"name": "fedavg", "add": ["ensemble_distillation"]}])
@pytest.mark.parametrize("fuse", ["krum", "bulyan", "coordinate_median", "trimmed_mean"])
def test_a_fusion_that_leaves_clients_out_is_refused(method, fuse):
    """Their rows, or their models as teachers, would be in the model that predicts all the same."""
    method = {"name": method} if isinstance(method, str) else method
    with pytest.raises(UserError, match=f"assumes that no client is left out .* not hold with {fuse}"):
        build_recipe(Experiment(method={**method, "fuse": fuse}))
