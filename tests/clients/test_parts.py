"""Batches, the guiding head, schedules and the store: the papers' numbers and properties."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from small_round import small_round
from torch import nn

from clients.batches.balanced_budget import BalancedBudget
from clients.batches.shuffled import Shuffled
from clients.optimizers import learning_rate
from clients.parts import Batch
from clients.store import ClientStore
from clients.terms.guiding_head import GuidingHead
from clients.terms.label_smoothing import LabelSmoothing
from clients.terms.proximal import Proximal
from fedsim.settings import TrainSettings

BY_64 = TrainSettings(batch_size=64)


@pytest.mark.parametrize(("part", "examples", "images"), [
    (BalancedBudget(2880), 1000, 2880), (BalancedBudget(2880), 100, 2880), (BalancedBudget(2880), 5000, 2880),
    (BalancedBudget(45, "batches"), 100, 2880),
])  # fmt: skip
def test_budget_is_the_same_number_of_steps_everywhere(part, examples, images):
    batches = list(part.indices(examples, small_round(), BY_64))
    assert (len(batches), sum(map(len, batches))) == (45, images)


def test_the_budget_is_that_of_a_round_or_off():
    """CSAC's acquisition keeps its own amount beside FedSB's batches; budget 0 gives back the standard batches."""
    prelude, train = dataclasses.replace(small_round(), phase="acquire"), BY_64.model_copy(update={"iterations": 300})
    assert len(list(BalancedBudget(2880).indices(1500, prelude, train))) == 300
    assert len(list(BalancedBudget(2880).indices(1500, small_round(), train))) == 45
    plans = [list(part.indices(100, small_round(), BY_64)) for part in (BalancedBudget(0), Shuffled())]
    assert [batch.tolist() for batch in plans[0]] == [batch.tolist() for batch in plans[1]]


def test_budget_draws():
    """Every index 2 or 3 times, exactly 880 3 times; a large client sees new images each round."""
    counts = np.bincount(BalancedBudget.draw(1000, 2880, np.random.default_rng(0)))
    assert np.bincount(counts).tolist() == [0, 0, 120, 880]
    part = BalancedBudget(2880)
    rounds = [np.concatenate(list(part.indices(5000, small_round(round=number), BY_64))) for number in (1, 2)]
    assert all(len(np.unique(drawn)) == 2880 for drawn in rounds)
    assert set(rounds[0]) != set(rounds[1])


@given(st.integers(2, 300), st.integers(2, 64), st.integers(1, 3))
def test_epochs_visit_every_example(examples, size, epochs):
    """Every epoch visits each example once, but for a last batch of one (batch norm needs two)."""
    batches = list(Shuffled().indices(examples, small_round(), TrainSettings(batch_size=size, epochs=epochs)))
    assert all(2 <= len(batch) <= size for batch in batches)
    assert sum(map(len, batches)) == epochs * (examples - (examples % size == 1))


@given(st.integers(2, 100), st.integers(1, 50))
def test_iterations_are_exact(examples, iterations):
    train = TrainSettings(batch_size=16, iterations=iterations)
    assert len(list(Shuffled().indices(examples, small_round(), train))) == iterations


def test_guiding_head_numbers():
    """f = [1, 0], identity head, y = 0: CE .313262, half of it is added; the guide is a copy without gradient."""
    head = nn.Linear(2, 2, bias=False)
    nn.init.eye_(head.weight)
    features, label = torch.tensor([[1.0, 0.0]], requires_grad=True), torch.tensor([0])
    term, loss = (
        GuidingHead(0.5).begin(small_round(net=SimpleNamespace(head=head))),
        F.cross_entropy(head(features), label),
    )
    batch = Batch(images=None, labels=label, features=features, logits=head(features), loss=loss)
    total = loss + term(batch)
    total.backward()
    assert (loss.item(), total.item()) == pytest.approx((0.313262, 0.469893), abs=1e-6)
    torch.testing.assert_close(features.grad, torch.tensor([[-0.403412, 0.403412]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(head.weight.grad[0], torch.tensor([-0.268941, 0.0]), atol=1e-6, rtol=0)
    with torch.no_grad():
        head.weight += 5.0
    assert term(batch).item() == pytest.approx(0.5 * 0.313262, abs=1e-6)


@pytest.mark.parametrize("part", [GuidingHead(0.0), LabelSmoothing(0.0), Proximal(0.0)])
def test_a_term_without_weight_is_none(part):
    assert part.begin(small_round(net=nn.Linear(2, 2))) is None


def test_proximal_term_pulls_to_the_received_model():
    net = nn.Linear(1, 1, bias=False)
    term = Proximal(1.0).begin(small_round(net=net))
    with torch.no_grad():
        net.weight += 1.0
    penalty = term(None)
    penalty.backward()
    assert (penalty.item(), net.weight.grad.item()) == pytest.approx((0.5, 1.0))


@pytest.mark.parametrize(("schedule", "lr", "rounds", "rates"), [
    ("cosine-official", 0.002, 100, {1: 0.00199951, 50: 0.001, 100: 0.0}),
    ("cosine", 0.002, 100, {1: 0.002, 100: 4.93e-7}), ("step", 0.1, 10, {8: 0.1, 9: 0.01}),
    ("constant", 0.3, 10, {7: 0.3}),
])  # fmt: skip
def test_schedules(schedule, lr, rounds, rates):
    settings = TrainSettings(lr=lr, schedule=schedule)
    found = [learning_rate(settings, number, rounds) for number in rates]
    assert found == pytest.approx(list(rates.values()), abs=1e-8)


def test_store_versions_survive_an_interrupted_round(tmp_path):
    """State at the start of round t is what was committed before t, also after a restart in the middle of a round."""
    store = ClientStore(tmp_path / "a")
    for number in (1, 2):
        store.open_round(number)
        store.put_number("risk", number * 1.0)
        store.commit()
    reopened = ClientStore(tmp_path / "a")
    reopened.open_round(2)  # round 2 is repeated
    assert reopened.get_number("risk") == 1.0
    reopened.put_number("risk", 5.0)
    assert reopened.get_number("risk") == 5.0
    reopened.open_round(2)  # nothing was committed
    assert reopened.get_number("risk") == 1.0
    reopened.put_number("risk", 5.0)
    reopened.commit()
    reopened.open_round(3)
    assert ClientStore(tmp_path / "a").get("risk")["value"] == 5.0
    assert reopened.get("unknown") is None
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 2
