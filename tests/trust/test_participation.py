"""When few clients train, few may validate: which clients these are, what selects the round, and what a round costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import Interrupt, numbers, run_small, small_experiment

from fedsim.settings import TrainSettings
from strategies.participation import trainers, validators

CLIENTS = [f"c{number}" for number in range(12)]


@given(
    st.integers(0, 15), st.sampled_from(["all", "drawn", "1", "5", "12", "500"]), st.integers(1, 7), st.integers(1, 20),
    st.integers(0, 3),
)  # fmt: skip
def test_who_validates(per_round, which, every, round, seed):
    train = TrainSettings(clients_per_round=per_round, evaluate_clients=which, evaluate_every=every, rounds=20)
    drawn = trainers(train, CLIENTS, seed, round)
    chosen = validators(train, CLIENTS, drawn, seed, round)
    assert len(drawn) == (min(per_round, 12) or 12)
    assert drawn == [client for client in CLIENTS if client in drawn]
    if round % every and round != 20:
        assert chosen == []
    elif which == "drawn":
        assert chosen == drawn
    else:
        assert len(chosen) == (12 if which == "all" else min(int(which), 12))
        later = validators(train, CLIENTS, trainers(train, CLIENTS, seed, 20), seed, 20)
        assert chosen == later  # the same in every round
        assert chosen == [client for client in CLIENTS if client in chosen]


def many(folder, **train):
    data = {"clients_per_domain": 4, "fraction": 0.3}
    return small_experiment(folder, data=data, train={"rounds": 3, "iterations": 1, "clients_per_round": 3, **train})


@pytest.mark.parametrize(("train", "validated"), [
    ({"evaluate_clients": "5"}, [5, 5, 5]), ({"evaluate_clients": "drawn", "evaluate_every": 2}, [0, 3, 3]),
])  # fmt: skip
def test_messages_and_records_say_who_validated(train, validated, tmp_path):
    """Twelve clients, of which three train in a round; a run that is stopped after round 2 has the same records."""
    folder, grid = run_small(many(tmp_path / "whole", **train))
    rounds = numbers(folder / "rounds.csv").set_index("round").loc[1:]
    assert list(rounds["validated"]) == validated
    assert list(rounds["mean_validation_accuracy"].notna()) == [count > 0 for count in validated]
    asked = [sent.content["config"]["round"] for sent, _ in grid.seen if sent.metadata.message_type == "evaluate"]
    assert [asked.count(round) for round in (1, 2, 3)] == validated
    best = numbers(folder / "summary.csv")["best_validation_round"][0]
    assert best == rounds["mean_validation_accuracy"].idxmax()
    with pytest.raises(KeyboardInterrupt):
        run_small(many(tmp_path / "cut", **train), Interrupt(2))
    cut, _ = run_small(many(tmp_path / "cut", **train))
    assert (cut / "best.safetensors").read_bytes() == (folder / "best.safetensors").read_bytes()
    assert numbers(cut / "rounds.csv").set_index("round").loc[1:].equals(rounds)
