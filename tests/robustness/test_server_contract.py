"""What every server part can use: refusal of one client, banks of every round, broadcasts, seeds, checkpoints."""

from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from flwr.app import Message, MetricRecord
from scene import Scene, build

from fedsim.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedsim.tensors.arrays import state_to_record
from strategies.fuse.weighted_mean import WeightedMean
from strategies.parts import SERVER, Bank, Fuse, RefusedUpdateError, ServerRound
from strategies.round import ask_to_train
from strategies.state import ServerState

VICTIM = "rot15"


class Vectors(Bank):
    """The sum of one vector per client, in every round."""

    name: ClassVar[str] = "vectors"
    when: ClassVar[Literal["once", "round"]] = "round"

    def accept(self, client, arrays, server):
        return ""  # the server compares the shapes

    def merge(self, bank, entries, server):
        """The sum of the vectors; the part's own state counts the calls. A negative vector is refused."""
        for client, arrays in entries.items():
            if (arrays["v"] < 0).any():
                server.state["rounds"] = -1
                raise RefusedUpdateError(client, "a vector is negative")
        server.state["rounds"] = server.state.get("rounds", 0) + 1
        total = np.stack([arrays["v"] for arrays in entries.values()]).sum(0)
        server.arrays["sum"] = server.arrays.get("sum", np.zeros_like(total)) + total
        return dict(entries)

    def hand_out(self, bank, client, server):
        return dict(server.arrays)


class Critical(Fuse):
    """The weighted mean, if every client reports its `quality`."""

    def fuse(self, updates, weights, server):
        server.state["best"] = max(update.metrics["quality"] for update in updates)
        return WeightedMean().fuse(updates, weights, server)


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Scene:
    """FedAvg with a bank of vectors of two numbers, which every client sends, in the middle of round 2."""
    extra = lambda client: {"vectors": state_to_record({"v": np.array([1.0, len(client)], np.float32)})}  # noqa: E731
    recipe = lambda own: replace(own, banks=(Vectors(),))  # noqa: E731
    return build("fedavg", tmp_path_factory.mktemp("vectors"), recipe=recipe, extra=extra)


def with_vector(scene, vector=None):
    """The replies of round 2 by client, the victim's with another contribution."""
    good, asked = scene.replies["train"], dict(zip(scene.replies["train"], scene.messages["train"]))
    replies = {client: Message(reply.content.copy(), reply_to=asked[client]) for client, reply in good.items()}
    if vector is not None:
        replies[VICTIM].content["vectors"] = state_to_record({"v": vector})
    return replies


@pytest.mark.parametrize(("vector", "reason"), [
    (np.zeros((2, 3), np.float32), "its arrays are"), (np.zeros(2, np.float64), "its arrays are"),
    (np.array([-1.0, 1.0], np.float32), "a vector is negative"),
])  # fmt: skip
def test_a_contribution_of_every_round_that_is_refused_is_its_client_s_failure(scene, vector, reason):
    """With a wrong shape or type, or a refusal in `merge`, the round has only the other clients."""
    replies = with_vector(scene, vector)
    outcome = scene.play("train", replies.values())
    alone = scene.play("train", [reply for client, reply in replies.items() if client != VICTIM])
    assert outcome.differences(alone, VICTIM) == ""
    assert reason in outcome.rows[VICTIM]["status"]
    assert "weight" not in outcome.rows[VICTIM]
    assert outcome.state["parts"]["banks.vectors"] == {"rounds": 2}


def test_a_metric_that_a_fusion_misses_is_its_client_s_failure(scene, monkeypatch):
    """The client that does not report it is left out, though it is only read and not declared in `needs`."""
    monkeypatch.setattr(scene.server.parts, "recipe", replace(scene.server.parts.recipe, fuse=Critical()))
    replies = with_vector(scene)
    for client, reply in replies.items():
        more = {} if client == VICTIM else {"quality": 0.5}
        reply.content["metrics"] = MetricRecord({**reply.content["metrics"], **more})
    outcome = scene.play("train", replies.values())
    assert "quality" in outcome.rows[VICTIM]["status"]
    assert "weight" not in outcome.rows[VICTIM]
    assert outcome.state["parts"]["fuse"] == {"best": 0.5}
    assert sum("weight" in row for row in outcome.rows.values()) == 2


def test_the_clients_with_most_examples_get_their_messages_first(scene, monkeypatch):
    """Messages are made in this order; of clients with as many examples the first in the order of the domains."""
    sites = scene.server.exchange.sites
    monkeypatch.setattr(scene.server.exchange, "sites", {
        name: replace(site, examples=examples) for (name, site), examples in zip(sites.items(), (5, 9, 5))
    })  # fmt: skip
    scene.server.exchange.begin(3)
    messages = ask_to_train(scene.server, "train", scene.arrays, list(sites))
    assert [message.content["config"]["client"] for message in messages] == ["rot15", "rot0", "rot30"]


def test_streams_depend_on_seed_purpose_and_round_alone():
    first = ServerRound(1, 3, [], {}, seed=4)
    assert torch.equal(*(torch.rand(3, generator=first.generator("a")) for _ in range(2)))
    asked = [(1, 4, "a"), (1, 4, "a"), (2, 4, "a"), (1, 5, "a"), (1, 4, "b")]
    same, *drawn = (replace(first, round=round, seed=seed).rng(words).random() for round, seed, words in asked)
    assert same == drawn[0]
    assert len(set(drawn)) == 4


def test_all_that_the_server_remembers_is_saved(tmp_path):
    """Numbers and tensors of parts, and banks of clients and server, even empty ones, are restored with their types."""
    rng = np.random.default_rng(0)
    state = ServerState(
        parts={"weights": {"a": {"photo": 0.25}}, "fuse": {}},
        tensors={"refine.0.X": {"m:head": rng.normal(size=(2, 3)), "count": np.array(7, np.int64)}, "fuse": {}},
        banks={"style": {"photo": {"mean": np.ones(2, np.float32)}, "art/1": {}}, "move": {SERVER: {"b": np.ones(1)}}},
        layouts={"style": "x"},
        handed={"style": ["photo"]},
        stored={"photo": 3},
    )
    save_checkpoint(tmp_path, Checkpoint(3, {"w": np.ones(2, np.float32)}, state))
    found = load_checkpoint(tmp_path).state
    np.testing.assert_equal(vars(found), vars(state))
    assert found.tensors["refine.0.X"]["count"].dtype == np.int64
