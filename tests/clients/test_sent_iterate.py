"""What parts know at the end of a client's round: its epochs, and which of its iterates is sent."""

import numpy as np
import pytest
import torch
from small_round import CONFIG, client_of, fit, small_round

from clients.optimizers import gradient_count
from clients.reports.gradient_count import GradientCount
from clients.terms.drift_correction import DriftCorrection
from clients.terms.moon import ModelContrast
from fedsim.methods.recipe import Recipe
from fedsim.settings import TrainSettings


@pytest.mark.parametrize("pooled", [False, True])
def test_epochs_of_a_round_by_iterations(tmp_path, pooled):
    """Planned images (in batches of two sizes) over the client's own; a pooled client takes the steps of all."""
    client = client_of(tmp_path, Recipe(pooled=pooled), train={"iterations": 7, "batch_size": 32})
    client.source_clients = 3
    steps = client.begin_steps(client._open(CONFIG))
    sizes = [len(batch) for batch in steps.plan]
    assert (len(sizes), len(set(sizes))) == (21 if pooled else 7, 2)
    assert steps.round.epochs == sum(sizes) / client.data.examples
    assert small_round(client.data, steps=7, images=99, train=TrainSettings(epochs=3)).epochs == 3


def test_what_parts_keep_when_an_earlier_iterate_is_sent(tmp_path, monkeypatch):
    """The second of three local checks is the best: MOON keeps the last iterate, FedNova and SCAFFOLD count the steps
    up to the model that is sent."""
    recipe = Recipe(terms=(ModelContrast(), DriftCorrection()), reports=(GradientCount(),))
    client = client_of(tmp_path, recipe, train={"iterations": 6, "local_checks": 3, "momentum": 0.5})
    client.records = {"control": {}}
    before = {name: value.clone() for name, value in client.state.items()}
    scores, states = iter([0.2, 0.6, 0.5]), []

    def validate(predict=None):
        states.append({name: value.clone() for name, value in client.state.items()})
        return next(scores), 0.0

    monkeypatch.setattr(client, "validate", validate)
    sent, _, metrics = fit(client)
    assert all(states[1][name].equal(torch.from_numpy(array)) for name, array in sent.items())
    client.store.open_round(2)
    kept = client.store.get("previous-model")
    assert all(kept[name].equal(value) for name, value in states[2].items())
    assert not kept["head.weight"].equal(states[1]["head.weight"])
    assert metrics["steps"] == 6
    assert metrics["gradient_count"] == gradient_count(4, 0.5)
    moved = (before["head.weight"] - states[1]["head.weight"]) / (gradient_count(4, 0.5) * metrics["learning_rate"])
    assert np.allclose(client.outbox["control"]["head.weight"], moved, atol=1e-6)
