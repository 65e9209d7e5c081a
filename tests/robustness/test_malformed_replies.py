"""Malformed replies, of every kind in every phase of every method: none changes the global model or ends the server."""

import dataclasses
import random
from typing import ClassVar, Literal

import numpy as np
import pytest
from flwr.app import Message
from malformed import ALL, MUTATIONS, Draft, broken
from scene import Outcome, Scene, build

from fedsim.tensors.arrays import state_to_record
from strategies.parts import Bank

METHODS = ("fedavg", "gperxan", "feddg-ga", "ccst", "elcfs")
STRAYS = ("duplicate", "from another node", "to no message")


class Pulse(Bank):
    """A bank of one number in every round."""

    name: ClassVar[str] = "pulse"
    when: ClassVar[Literal["once", "round"]] = "round"

    def accept(self, client, arrays, server):
        right = arrays.keys() == {"beat"} and arrays["beat"].shape == () and arrays["beat"].dtype == np.float32
        return "" if right else "it is no beat"

    def hand_out(self, bank, client, server):
        return {owner: arrays["beat"] for owner, arrays in bank.items()}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> dict[str, Scene]:
    """One federation per method, and FedAvg with a bank to which every reply contributes."""
    folder = tmp_path_factory.mktemp("scenes")
    made = {method: build(method, folder) for method in METHODS}
    beat = lambda client: {"pulse": state_to_record({"beat": np.float32(len(client))})}  # noqa: E731
    pulsing = lambda recipe: dataclasses.replace(recipe, banks=(Pulse(),))  # noqa: E731
    return made | {"pulse": build("fedavg", folder / "pulse", recipe=pulsing, extra=beat)}


@pytest.fixture(scope="module")
def expected(scenes) -> dict[tuple[str, str, str], Outcome]:
    """The server's state after every phase with all replies (client ""), and without the reply of each client."""
    return {
        (method, phase, victim): scene.play(phase, [reply for name, reply in replies.items() if name != victim])
        for method, scene in scenes.items()
        for phase, replies in scene.replies.items()
        for victim in ("", *replies)
    }


def check_refused(outcome: Outcome, expected: Outcome, victim: str) -> None:
    assert outcome.differences(expected, victim) == ""
    reason = outcome.rows[victim]["status"]
    assert reason not in ("", "ok")
    assert "cannot be checked" not in reason
    assert any(victim in note for note in outcome.notes)
    for line in (reason, *outcome.notes):
        assert line == " ".join(line.split())
        assert line.isprintable()
    assert not {"weight", "validation_accuracy"} & outcome.rows[victim].keys()


def check_dropped(outcome: Outcome, expected: Outcome) -> None:
    assert outcome.differences(expected, victim="") == ""
    assert len(outcome.notes) == len(expected.notes) + 1
    assert "is dropped" in " ".join(outcome.notes)


def cases(scenes, phases, seeds):
    """(name of a scene, phase, victim, its message, random numbers)"""
    for name, scene in scenes.items():
        for phase in [phase for phase in phases if phase in scene.replies]:
            for seed in range(seeds):
                rng = random.Random(f"{name} {phase} {seed}")
                place = rng.randrange(len(scene.replies[phase]))
                yield name, phase, list(scene.replies[phase])[place], scene.messages[phase][place], rng


SEEDS = pytest.mark.parametrize("seeds", [2, pytest.param(10, marks=pytest.mark.slow)])


@SEEDS
@pytest.mark.parametrize("kind", MUTATIONS)
def test_a_malformed_reply_does_no_harm(scenes, expected, kind, seeds):
    mutate, phases = MUTATIONS[kind]
    tried = 0
    for name, phase, victim, message, rng in cases(scenes, phases, seeds):
        good = scenes[name].replies[phase]
        if (bad := broken(mutate, good[victim], message, rng)) is not None:
            replies = [bad if client == victim else reply for client, reply in good.items()]
            rng.shuffle(replies)
            check_refused(scenes[name].play(phase, replies), expected[name, phase, victim], victim)
            tried += 1
    assert tried


@SEEDS
@pytest.mark.parametrize("kind", STRAYS)
def test_a_reply_that_belongs_to_no_message_does_no_harm(scenes, expected, kind, seeds):
    for name, phase, victim, message, rng in cases(scenes, ALL, seeds):
        good = scenes[name].replies[phase]
        replies, stray = list(good.values()), Message(good[victim].content, reply_to=message)
        if kind == "from another node":
            stray.metadata.__dict__["_src_node_id"] = 99
        elif kind == "to no message":
            stray.metadata.__dict__["_reply_to_message_id"] = rng.choice(["", "m77", "x" * 50])
        replies.insert(len(replies) if kind == "duplicate" else rng.randrange(len(replies) + 1), stray)
        check_dropped(scenes[name].play(phase, replies), expected[name, phase, ""])


@pytest.mark.parametrize("kind", STRAYS)
def test_only_the_reply_that_was_asked_for_counts_against_a_model(scenes, expected, kind):
    """One site cannot have a round taken back by saying three times that it cannot use the model."""
    good, message = scenes["fedavg"].replies["evaluate"], scenes["fedavg"].messages["evaluate"][0]
    replies = list(good.values())
    for _ in good:
        draft = Draft.of(replies[0])
        draft.metrics["metrics"]["loss"] = float("nan")
        replies.append(draft.reply(message))
        if kind == "from another node":
            replies[-1].metadata.__dict__["_src_node_id"] = 99
        elif kind == "to no message":
            replies[-1].metadata.__dict__["_reply_to_message_id"] = "m77"
    outcome = scenes["fedavg"].play("evaluate", replies)
    assert outcome.differences(expected["fedavg", "evaluate", ""], victim="") == ""
    assert sum("is dropped" in note for note in outcome.notes) == len(outcome.notes) == len(good)
