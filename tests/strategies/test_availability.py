"""Who is there in a round (`train.availability`) and who is gone before its reply arrives (`train.lost_replies`)."""

import numpy as np
import pandas as pd
import pytest
from support import interrupt, numbers, run_small, tiny_experiment

from fedsim.common.errors import UserError
from fedsim.common.seeding import numpy_rng
from fedsim.runs.plan import resolve
from fedsim.runtime.launch import launch
from fedsim.settings import TrainSettings
from fedsim.settings.experiment import Experiment, read_experiment
from strategies.participation import chance, lost, present, trainers

CLIENTS = ["art/0", "art/1", "photo", "sketch"]
ROUNDS = range(1, 401)


def test_the_probability_of_a_round_by_hand():
    """A client's own list comes before its domain's, and that before `*`; a list begins again after its last number."""
    train = TrainSettings(availability={"*": 0.5, "art": [1, 0.2, 0.4], "art/1": 0})
    assert [chance(train, "art/0", number) for number in (1, 2, 3, 4)] == [1, 0.2, 0.4, 1]
    assert chance(train, "art/1", 1) == 0
    assert chance(train, "photo", 9) == 0.5
    assert chance(TrainSettings(availability={"art": 0.5}), "photo", 9) == 1


def test_a_trace_is_followed_and_somebody_is_always_there():
    """0 is never there and 1 always; where all are away the one that lacks least stays."""
    train = TrainSettings(availability={"*": 1, "photo": [0, 1]})
    assert present(train, CLIENTS, 0, 1) == ["art/0", "art/1", "sketch"]
    assert present(train, CLIENTS, 0, 2) == CLIENTS
    nobody = TrainSettings(availability={"*": 0})
    drawn = [numpy_rng(7, "available", client, 3).random() for client in CLIENTS]
    assert present(nobody, CLIENTS, 7, 3) == [CLIENTS[int(np.argmin(drawn))]]
    assert present(TrainSettings(), CLIENTS, 0, 1) == CLIENTS


@pytest.mark.parametrize("share", [0.3, 0.7, 0.95])
def test_so_many_are_there_and_draws_depend_on_names_alone(share):
    """Of 400 rounds the share of each client is right within four deviations, whoever else is in the federation."""
    train = TrainSettings(availability={"*": share})
    for client in CLIENTS:
        alone = [number for number in ROUNDS if client in present(train, [client, "other"], 1, number)]
        among = [number for number in ROUNDS if client in present(train, CLIENTS[::-1], 1, number)]
        deviation = 4 * np.sqrt(share * (1 - share) / len(ROUNDS))
        assert len(among) / len(ROUNDS) == pytest.approx(share, abs=deviation + (1 - share) ** 4)
        assert len(set(alone) ^ set(among)) <= len(ROUNDS) * (1 - share) ** 2  # rounds in which one had to stay


def test_replies_are_lost_with_their_probability_and_never_all():
    train = TrainSettings(lost_replies=0.3)
    away = [lost(train, CLIENTS, 0, number) for number in ROUNDS]
    assert sum(map(len, away)) / (4 * len(ROUNDS)) == pytest.approx(0.3, abs=0.05)
    assert max(map(len, away)) < 4
    assert lost(TrainSettings(), CLIENTS, 0, 1) == []
    assert all(len(lost(TrainSettings(lost_replies=0.999), CLIENTS, 0, number)) == 3 for number in range(1, 20))


def test_clients_are_drawn_among_those_that_are_there():
    train = TrainSettings(availability={"photo": 0}, clients_per_round=2)
    assert all("photo" not in trainers(train, CLIENTS, 0, number) for number in range(1, 50))
    assert all(len(trainers(train, CLIENTS, 0, number)) == 2 for number in range(1, 50))


def patchy(folder, **run):
    train = {"availability": {"*": 0.6, "rot0": [1, 0]}, "lost_replies": 0.3}
    return tiny_experiment(folder, "scaffold", rounds=6, train=train, run=run)


def test_the_records_of_one_process_and_of_two_are_alike(tmp_path):
    """Who is away has no row, who is lost has a reason and no validation; the run goes on although failures stop it."""
    folder, _ = run_small(patchy(tmp_path / "one"))
    other = launch(patchy(tmp_path / "two", processes=2))
    for name in ("rounds", "clients"):
        assert numbers(folder / f"{name}.csv").equals(numbers(other / f"{name}.csv"))
    clients = pd.read_csv(folder / "clients.csv").query("round > 0")
    assert "rot0" not in set(clients.query("round == 2")["client"])
    gone = clients[clients["status"] != "ok"]
    assert len(gone)
    assert gone["status"].str.startswith("gone before its reply").all()
    assert gone["validation_accuracy"].isna().all()
    rounds = pd.read_csv(folder / "rounds.csv").query("round > 0")
    there = clients[clients["status"] == "ok"].groupby("round").size()
    assert list(rounds["clients"]) == list(there)
    assert list(rounds["validated"]) == list(there)


def test_a_killed_run_ends_as_the_unbroken_one(tmp_path):
    whole, _ = run_small(patchy(tmp_path / "whole"))
    interrupt(patchy(tmp_path / "killed"), 3)
    folder, _ = run_small(patchy(tmp_path / "killed"))
    assert numbers(folder / "clients.csv").equals(numbers(whole / "clients.csv"))


@pytest.mark.parametrize(
    ("availability", "reason"),
    [({"*": 1.5}, "less than or equal to 1"), ({"*": []}, "at least 1 item"), ({"rot45": 0.5}, "does not train here")],
)
def test_bad_settings_are_one_line(availability, reason, tmp_path):
    with pytest.raises(UserError, match=reason):
        resolve(tiny_experiment(tmp_path, train={"availability": availability}))


def test_settings_without_it_are_those_of_before():
    usual = read_experiment("digits")
    given = read_experiment("digits", ["train.availability.*=0.7"])
    assert given.train.availability == {"*": [0.7]}
    assert given == read_experiment("digits", ["train.availability={'*' = [0.7]}"])
    assert given.settings_hash() != usual.settings_hash()
    assert Experiment().replace(train={"lost_replies": 0.0}).settings_hash() == Experiment().settings_hash()
