"""What the client's contract promises to parts: the order of a round, hooks, tallies, scratch, the store."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from small_round import CONFIG, changed, client_of, digits_net, fit, small_round, snapshot

from clients.companions.ditto import Ditto
from clients.parts import Report, Term
from clients.terms.moon import ModelContrast
from clients.tools.networks import statistics_frozen
from fedsim.common.errors import UserError
from fedsim.methods.recipe import Recipe
from fedsim.models.norms import BIN, DSON, IBN, XAN, BatchNorm, MixIG
from strategies.parts import Share

EVENTS: list[tuple] = []


@dataclass(frozen=True)
class Recording(Term):
    """A term that removes the gradients of the head's bias, tallies values, and notes all calls of its methods."""

    def begin(self, round):
        EVENTS.append(("begin", round.steps, dict(round.scratch), round.index))
        round.scratch["seen"] = 0

        def hook():
            EVENTS.append(("hook", round.net.head.bias.grad is not None))
            round.net.head.bias.grad.mul_(0)

        round.before_step.append(hook)

        def term(batch):
            round.scratch["seen"] += len(batch.labels)
            round.tally("images", len(batch.labels), "sum")
            round.tally("confidence", batch.logits.softmax(1).amax(1).mean())
            return 0.0 * batch.loss

        return term

    def end(self, round):
        EVENTS.append(("end", round.scratch["seen"]))


@dataclass(frozen=True)
class Ending(Report):
    def before(self, round):
        EVENTS.append(("before",))
        return {}

    def end(self, round):
        EVENTS.append(("report end",))

    def after(self, round):
        EVENTS.append(("after",))
        return {}


def test_order_of_a_round(tmp_path):
    """Every round begins with an empty scratch and knows its steps; a hook acts between backward and step; all end."""
    client = client_of(tmp_path, Recipe(terms=(Recording(),), reports=(Ending(),)), train={"epochs": 2})
    examples, size = client.data.examples, client.experiment.train.batch_size
    steps = 2 * -(-examples // size)
    for number in (1, 2):
        EVENTS.clear()
        before = snapshot(client.net.head)
        metrics = fit(client, {**CONFIG, "round": number})[2]
        assert [event[0] for event in EVENTS] == ["before", "begin", *["hook"] * steps, "end", "report end", "after"]
        assert EVENTS[1] == ("begin", steps, {}, 1)
        assert all(event[1] for event in EVENTS if event[0] == "hook")
        assert EVENTS[-3] == ("end", metrics["images"]) == ("end", 2 * examples)
        assert 0.1 < metrics["confidence"] < 1  # a mean over the steps
        assert changed(client.net.head, before) == {"weight"}
    assert Recipe(reports=(Ending(), Ending())).client_parts().count(Ending()) == 1  # what has two slots ends once


def test_tallies_remembered_values_and_records():
    """A mean divides by the steps with a value, a sum does not; values follow their key; `tensors` gives copies."""
    round = small_round(steps=4)
    for value in (1.0, 2.0, 5.0):
        round.tally("loss", torch.tensor(value, requires_grad=True))
        round.tally("count", 2, "sum")
    assert round.tallied() == {"loss": 2.0, "count": 6.0}
    round, made = small_round(), []
    for key in (1, 1, 2, 1):
        round.remembered("style", key, lambda key=key: made.append(key) or key)
    assert made == [1, 2, 1]
    assert round.for_phase("other").remembered("style", 1, lambda: 0) == 1
    arrays = {"w": np.array([1.0, 2.0], np.float32)}
    arrays["w"].setflags(write=False)
    round = small_round(None, {"bank": arrays})
    tensors = round.tensors("bank", "part")
    tensors["w"] += 1
    round.send("up", tensors)
    assert (round.outbox["up"]["w"].tolist(), arrays["w"].tolist()) == ([2, 3], [1, 2])
    with pytest.raises(UserError, match="part needs the record 'other'"):
        round.tensors("other", "part")


@pytest.mark.parametrize("norm", [BatchNorm(), XAN(), IBN(), DSON(), BIN(), MixIG()], ids=str)
def test_statistics_frozen(norm):
    """A pass inside the block normalizes like a training pass, but no norm layer changes its running statistics."""
    net = digits_net(norm=norm).train()
    images, before = torch.rand(4, 3, 16, 16), snapshot(net)
    with statistics_frozen(net):
        inside = net(images)
        inside.sum().backward()
    assert not changed(net, before)
    torch.testing.assert_close(net(images), inside)
    assert {name.rpartition(".")[2] for name in changed(net, before)} >= {"running_var", "num_batches_tracked"}


@dataclass(frozen=True)
class HeadOnly(Share):
    def place(self, net):
        return {name: "shared" if name.startswith("head") else "frozen" for name in net.state_dict()}


def test_frozen_tensors(tmp_path):
    """Frozen tensors, including running statistics, are neither sent nor changed, and no client stores them."""
    recipe = Recipe(share=HeadOnly(), client=Ditto(), terms=(ModelContrast(),))
    client = client_of(tmp_path, recipe, train={"local_checks": 2})
    before, head = snapshot(client.net), {"head.weight", "head.bias"}
    sent, _, _ = fit(client)
    assert set(sent) == head == set(client.names("train")) == changed(client.net, before)
    client.store.open_round(2)
    assert client.store.get("personal") is None
    for entry in ("ditto", "previous-model"):  # parts that keep a model leave out what is the same everywhere
        assert client.store.get(entry).keys() == head
    fit(client, {**CONFIG, "round": 2})
    assert changed(client.net, before) == head


@dataclass(frozen=True)
class Doubling(Report):
    """Doubles, in place, everything that leaves."""

    def leave(self, round, trained, received):
        for array in trained.values():
            flat = array.reshape(-1)
            flat += flat
            assert np.shares_memory(flat, array)  # C order: a change of the flat view is a change of the array
        return trained


def test_a_part_may_change_what_leaves_in_place(tmp_path):
    client = client_of(tmp_path, Recipe(reports=(Doubling(),)))
    sent, _, _ = fit(client)
    assert not all(client.state[name].is_contiguous() for name in sent)  # channels-last
    for name, array in sent.items():
        np.testing.assert_array_equal(array, 2 * client.state[name].numpy())
