"""Batches, terms, schedules and the store: the papers' numbers and properties."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from clients.batches.balanced_budget import BalancedBudget
from clients.batches.shuffled import Shuffled
from clients.optimizers import learning_rate, make_optimizer, optimizer_tensors, restore_optimizer
from clients.parts import Batch, LocalRound
from clients.store import ClientStore
from clients.terms.guiding_head import GuidingHead
from clients.terms.label_smoothing import LabelSmoothing
from clients.terms.proximal import Proximal
from fedsim.settings import TrainSettings


def local_round(net=None, number=1, **train):
    """A local round without data."""
    return LocalRound(
        client="a",
        net=net,
        train=TrainSettings(**train),
        classes=3,
        round=number,
        rounds=10,
        phase="train",
        seed=0,
        device=torch.device("cpu"),
        store=ClientStore(None),
        data=None,
    )


@pytest.mark.parametrize("examples", [1000, 100, 5000, 2880])
def test_budget_is_the_same_number_of_steps_everywhere(examples):
    """n = 1000, 100, 5000 with S = 2880, B = 64 give 45 steps."""
    batches = list(BalancedBudget(2880).indices(examples, local_round(), TrainSettings(batch_size=64)))
    assert len(batches) == 45
    assert sum(map(len, batches)) == 2880


def test_the_budget_is_that_of_a_round():
    """CSAC's acquisition keeps its own amount when FedSB's batches are combined with it."""
    prelude = dataclasses.replace(local_round(), phase="acquire")
    train = TrainSettings(batch_size=64, iterations=300)
    assert len(list(BalancedBudget(2880).indices(1500, prelude, train))) == 300
    assert len(list(BalancedBudget(2880).indices(1500, local_round(), train))) == 45


def test_budget_draws():
    """Every index 2 or 3 times, exactly 880 3 times; a large client sees new images each round."""
    counts = np.bincount(BalancedBudget.draw(1000, 2880, np.random.default_rng(0)))
    assert set(counts) == {2, 3}
    assert (counts == 3).sum() == 880
    rounds = [
        np.concatenate(list(BalancedBudget(2880).indices(5000, local_round(number=number), TrainSettings())))
        for number in (1, 2)
    ]
    assert all(len(np.unique(drawn)) == 2880 for drawn in rounds)
    assert set(rounds[0]) != set(rounds[1])


def test_budget_in_batches_and_off():
    """45 batches of 64 are 2,880 examples; budget 0 gives back the standard batches."""
    train = TrainSettings(batch_size=64)
    assert sum(map(len, BalancedBudget(45, "batches").indices(100, local_round(), train))) == 2880
    for ours, standard in zip(
        BalancedBudget(0).indices(100, local_round(), train), Shuffled().indices(100, local_round(), train), strict=True
    ):
        np.testing.assert_array_equal(ours, standard)


@given(st.integers(2, 300), st.integers(2, 64), st.integers(1, 3))
def test_epochs_visit_every_example(examples, size, epochs):
    """Every epoch visits each example once, but for a last batch of one (batch norm needs two)."""
    train = TrainSettings(batch_size=size, epochs=epochs)
    batches = list(Shuffled().indices(examples, local_round(), train))
    assert all(2 <= len(batch) <= size for batch in batches)
    dropped = 1 if examples % size == 1 else 0
    assert sum(map(len, batches)) == epochs * (examples - dropped)


@given(st.integers(2, 100), st.integers(1, 50))
def test_iterations_are_exact(examples, iterations):
    """There are `iterations` steps, whatever the number of the client's images."""
    train = TrainSettings(batch_size=16, iterations=iterations)
    assert len(list(Shuffled().indices(examples, local_round(), train))) == iterations


def test_label_smoothing_term_completes_cross_entropy():
    """CE + term = cross-entropy with smoothed labels (0.440190 -> 0.740190 at eps 0.2)."""
    logits, labels = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64), torch.tensor([0])
    loss = F.cross_entropy(logits, labels)
    batch = Batch(images=None, labels=labels, logits=logits, loss=loss)
    assert float(loss) == pytest.approx(0.440190, abs=1e-6)
    assert float(loss + LabelSmoothing(0.2).begin(local_round())(batch)) == pytest.approx(0.740190, abs=1e-6)
    assert LabelSmoothing(0.0).begin(local_round()) is None


def guided(weight=0.5):
    """f = [1, 0], identity head, y = 0."""
    head = nn.Linear(2, 2, bias=False)
    nn.init.eye_(head.weight)
    net = SimpleNamespace(head=head)
    features = torch.tensor([[1.0, 0.0]], requires_grad=True)
    term = GuidingHead(weight).begin(local_round(net))
    loss = F.cross_entropy(head(features), torch.tensor([0]))
    batch = Batch(images=None, labels=torch.tensor([0]), features=features, logits=head(features), loss=loss)
    return head, features, loss, term, batch


def test_guiding_head_numbers():
    """CE 0.313262, loss 0.469893, dL/df = [-0.403412, 0.403412], dL/dW row 0 = [-0.268941, 0]."""
    head, features, loss, term, batch = guided()
    total = loss + term(batch)
    total.backward()
    assert loss.item() == pytest.approx(0.313262, abs=1e-6)
    assert total.item() == pytest.approx(0.469893, abs=1e-6)
    torch.testing.assert_close(features.grad, torch.tensor([[-0.403412, 0.403412]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(head.weight.grad[0], torch.tensor([-0.268941, 0.0]), atol=1e-6, rtol=0)


def test_guiding_head_is_frozen():
    """The global head is a copy without gradient; weight 0 skips it."""
    head, _, loss, term, batch = guided()
    (loss + term(batch)).backward()
    with torch.no_grad():
        head.weight += 5.0
    assert term(batch).item() == pytest.approx(0.5 * 0.313262, abs=1e-6)
    assert GuidingHead(0.0).begin(local_round()) is None


def test_proximal_term_zero_is_off():
    """mu = 0 gives FedAvg bit for bit: there is no term at all."""
    assert Proximal(0.0).begin(local_round(nn.Linear(2, 2))) is None
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 2.0)
    term = Proximal(1.0).begin(local_round(net))
    with torch.no_grad():
        net.weight += 1.0
    penalty = term(None)
    penalty.backward()
    assert (penalty.item(), net.weight.grad.item()) == (0.5, 1.0)


def test_schedules():
    """Official cosine 0.00199951 in round 1 of 100, 0.001 in 50, 0 in 100; default starts at lr."""
    official = TrainSettings(lr=0.002, schedule="cosine-official")
    rates = [learning_rate(official, number, 100) for number in (1, 50, 100)]
    assert rates == pytest.approx([0.00199951, 0.001, 0.0], abs=1e-8)
    cosine = TrainSettings(lr=0.002, schedule="cosine")
    assert learning_rate(cosine, 1, 100) == 0.002
    assert learning_rate(cosine, 100, 100) == pytest.approx(4.93e-7, rel=1e-3)
    step = TrainSettings(lr=0.1, schedule="step")
    assert [learning_rate(step, number, 10) for number in (8, 9)] == pytest.approx([0.1, 0.01])
    assert learning_rate(TrainSettings(lr=0.3), 7, 10) == 0.3


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_optimizer_state_round_trip(kind):
    """Two steps equal one step, a restart from the stored buffers and one more step."""
    train = TrainSettings(optimizer=kind, lr=0.1, momentum=0.9)

    def step(net, optimizer):
        optimizer.zero_grad()
        net(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()

    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    twin = nn.Linear(3, 2)
    twin.load_state_dict(net.state_dict())
    straight = make_optimizer(net, train, 0.1)
    step(net, straight)
    step(net, straight)
    first = make_optimizer(twin, train, 0.1)
    step(twin, first)
    second = make_optimizer(twin, train, 0.1)
    restore_optimizer(second, optimizer_tensors(first, twin))
    step(twin, second)
    torch.testing.assert_close(net.weight, twin.weight, rtol=0, atol=0)


def test_store_versions_survive_an_interrupted_round(tmp_path):
    """State at the start of round t is what was stored before t, also after a restart in the middle of a round."""
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
    reopened.commit()
    reopened.open_round(3)
    assert ClientStore(tmp_path / "a").get("risk")["value"] == 5.0
    assert reopened.get("unknown") is None
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 2


def test_uncommitted_state_is_forgotten(tmp_path):
    """A round that is interrupted before its end leaves nothing in the store."""
    store = ClientStore(tmp_path / "a")
    store.open_round(1)
    store.put_number("risk", 1.0)
    store.open_round(1)
    assert store.get_number("risk") is None
