"""Malformed replies: none changes the global model, none ends the server, each gets a reason in one line.

There are 800 of them in every run of the tests, and 2,000 in `pytest -m slow`.
"""

import dataclasses
import random
from collections import Counter
from typing import ClassVar, Literal

import malformed_records  # noqa: F401  registers its mutations
import numpy as np
import pytest
from flwr.app import Message
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from malformed import MUTATIONS, Draft
from scene import Outcome, Scene, build

from fedsim.tensors.arrays import state_to_record
from strategies.parts import Bank

MANY = [800, pytest.param(2000, marks=pytest.mark.slow)]
METHODS = ("fedavg", "gperxan", "feddg-ga", "csac", "ccst", "elcfs", "pulse")
STRAYS = ("duplicate", "from another node", "to no message")

odd_values = st.one_of(
    st.text(max_size=20),
    st.floats(),
    st.integers(-(2**80), 2**80),
    st.booleans(),
    st.none(),
    st.binary(max_size=8),
    st.lists(st.floats(), max_size=3),
)


class Pulse(Bank):
    """A bank of one number in every round."""

    name: ClassVar[str] = "pulse"
    when: ClassVar[Literal["once", "round"]] = "round"

    def accept(self, client, arrays, server):
        """Accept one float32 number."""
        right = arrays.keys() == {"beat"} and arrays["beat"].shape == () and arrays["beat"].dtype == np.float32
        return "" if right else "it is no beat"

    def hand_out(self, bank, client, server):
        """The numbers of all clients."""
        return {owner: arrays["beat"] for owner, arrays in bank.items()}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> dict[str, Scene]:
    """One federation per method, and FedAvg with a bank to which every reply contributes."""
    folder = tmp_path_factory.mktemp("scenes")
    made = {method: build(method, folder) for method in METHODS[:-1]}
    made["pulse"] = build(
        "fedavg",
        folder / "pulse",
        recipe=lambda recipe: dataclasses.replace(recipe, banks=(Pulse(),)),
        extra=lambda client: {"pulse": state_to_record({"beat": np.float32(len(client))})},
    )
    return made


def expected_outcomes(scenes: dict[str, Scene]) -> dict[tuple[str, str, str], Outcome]:
    """The server's state after every phase with all replies (client ""), and without the reply of each client."""
    return {
        (method, phase, victim): scene.play(phase, [reply for name, reply in replies.items() if name != victim])
        for method, scene in scenes.items()
        for phase, replies in scene.replies.items()
        for victim in ("", *replies)
    }


def check_refused(outcome: Outcome, expected: Outcome, victim: str) -> None:
    """The victim has a reason in one line, and its reply has no other effect."""
    assert outcome.differences(expected, victim) == ""
    reason = outcome.rows[victim]["status"]
    assert reason not in ("", "ok")
    assert "cannot be judged" not in reason
    assert any(victim in note for note in outcome.notes)
    for line in (reason, *outcome.notes):
        assert line == " ".join(line.split())
        assert line.isprintable()
    assert "weight" not in outcome.rows[victim]
    assert "validation_accuracy" not in outcome.rows[victim]


def check_dropped(outcome: Outcome, expected: Outcome) -> None:
    """The unexpected reply is mentioned, and all others are used."""
    assert outcome.differences(expected, victim="") == ""
    assert len(outcome.notes) == len(expected.notes) + 1
    assert "is dropped" in " ".join(outcome.notes)


def stray(kind: str, message: Message, bad: Message) -> Message:
    """A reply that belongs to no message."""
    if kind == "from another node":
        bad.metadata.__dict__["_src_node_id"] = 99
    elif kind == "to no message":
        bad.metadata.__dict__["_reply_to_message_id"] = random.Random(0).choice(["", "m77", "x" * 50])
    return bad


@pytest.mark.parametrize("many", MANY)
def test_none_of_many_malformed_replies_does_harm(scenes, many):
    """Types, shapes, values, names, counts, records, bytes and identities are wrong, at one client or at two."""
    expected = expected_outcomes(scenes)
    tried: Counter[str] = Counter()

    @settings(
        max_examples=many,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.sampled_from(METHODS),
        st.sampled_from(["train", "train", "evaluate", "collect"]),
        st.integers(0, 2),
        st.sampled_from([*MUTATIONS, *STRAYS]),
        st.integers(0, 2**32),
        odd_values,
    )
    def attack(method: str, phase: str, who: int, kind: str, seed: int, odd: object) -> None:
        scene, rng = scenes[method], random.Random(seed)
        phase = phase if phase in scene.replies else "train"
        good = scene.replies[phase]
        victim = list(good)[who]
        message = scene.messages[phase][who]
        draft = Draft.of(good[victim])
        if kind in STRAYS:
            extra = stray(kind, message, draft.reply(message))
            place = len(good) if kind == "duplicate" else rng.randrange(len(good) + 1)
            replies = list(good.values())
            replies.insert(place, extra)
            check_dropped(scene.play(phase, replies), expected[method, phase, ""])
        else:
            mutate, phases = MUTATIONS[kind]
            assume(phase in phases)
            assume(mutate(draft, rng, odd))
            replies = [draft.reply(message) if name == victim else reply for name, reply in good.items()]
            rng.shuffle(replies)
            check_refused(scene.play(phase, replies), expected[method, phase, victim], victim)
        tried[kind] += 1

    attack()
    assert sum(tried.values()) >= many
    assert set(tried) == {*MUTATIONS, *STRAYS}
