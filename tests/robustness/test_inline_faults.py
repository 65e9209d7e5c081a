"""Clients that fail in this process are named in log and clients.csv; rounds that nobody made are not selected."""

import logging

import numpy as np
import pytest
from safetensors import safe_open
from support import numbers, run_small, tiny_experiment

from clients.base import DomainClient
from fedsim.commands.runs import run_one
from fedsim.common.edge import guarded
from fedsim.common.errors import ClientFailedError

VICTIM = "rot15"


def raising(arrays, examples, metrics):
    raise OSError("the disk is full")


def diverging(arrays, examples, metrics):
    """As after training with a learning rate that is too large."""
    return [np.full_like(array, np.nan) if array.dtype.kind == "f" else array for array in arrays], examples, metrics


def reshaping(arrays, examples, metrics):
    return [array[..., None] for array in arrays], examples, metrics


def counting_wrong(arrays, examples, metrics):
    return arrays, examples + 1, metrics


FAULTS = {  # one a round, from round 2 on
    raising: r"error 2: OSError: the disk is full",
    diverging: r"reply refused: tensor '\S+' of record 'arrays' has NaN or infinite values",
    reshaping: r"reply refused: tensor '\S+' is float32\[.*\], expected float32\[.*\]",
    counting_wrong: r"reply refused: num-examples is 41, the handshake said 40",
}


@pytest.fixture
def spoil(monkeypatch):
    """spoil(change): every client's result becomes change(client, round, arrays, examples, metrics)."""
    plain = DomainClient.fit

    def patch(change):
        def fit(self, parameters, config):
            return change(config["client"], config["round"], *plain(self, parameters, config))

        monkeypatch.setattr(DomainClient, "fit", fit)

    return patch


def tolerant(folder, rounds):
    return tiny_experiment(folder, rounds=rounds, run={"on_client_failure": "continue"})


def faults_by_round(client, round, *result):
    hit = client == VICTIM and 2 <= round < 2 + len(FAULTS)
    return list(FAULTS)[round - 2](*result) if hit else result


def test_the_run_goes_on_by_name(spoil, tmp_path, caplog):
    """With `continue` the round has only the other clients, and the client is in the next one."""
    spoil(faults_by_round)
    with caplog.at_level(logging.WARNING, logger="fedsim"):
        folder, _ = run_small(tolerant(tmp_path, len(FAULTS) + 2))
    warnings = [record.getMessage() for record in caplog.records if record.name == "fedsim"]
    rows = numbers(folder / "clients.csv").set_index("client").loc[VICTIM].set_index("round")
    for round, (said, reason) in enumerate(zip(warnings, FAULTS.values(), strict=True), start=2):
        assert said.startswith(f"round {round}: client '{VICTIM}': ")
        assert rows["status"].str.fullmatch(reason)[round]
    assert list(np.isnan(rows["weight"])) == list(rows["status"] != "ok") == [False, *[True] * len(FAULTS), False]
    assert rows["weight"].iloc[-1] == pytest.approx(1 / 3)
    assert list(numbers(folder / "rounds.csv")["failed"]) == [0, 0, *[1] * len(FAULTS), 0]


def test_the_run_stops_by_name(spoil, tmp_path):
    spoil(faults_by_round)
    with pytest.raises(ClientFailedError, match=f"client '{VICTIM}' failed in round 2: {FAULTS[raising]}"):
        run_small(tiny_experiment(tmp_path))


def test_a_run_in_which_no_round_is_made_fails(spoil, tmp_path, capsys):
    """Nobody ever trains: exit code 1, no summary, and the same again when the command is repeated."""
    spoil(lambda client, round, *result: diverging(*result))
    experiment = tolerant(tmp_path, 2)
    for _ in range(2):
        assert guarded(lambda: run_one(experiment)) == 1
        said = capsys.readouterr().err
        assert "no round was made: no client's reply was accepted in 2 rounds" in said
        assert "client 'rot0': reply refused: tensor" in said
    assert not list(tmp_path.rglob("summary.csv"))
    assert not list(tmp_path.rglob("best.safetensors"))


def test_a_round_without_a_reply_is_not_the_best(tmp_path, monkeypatch):
    """All models are the initial one. The first that is the clients' reply is selected, and not the first of all."""
    plain = DomainClient.fit

    def fit(self, parameters, config):
        _, examples, metrics = plain(self, parameters, config)
        return [array * np.nan if config["round"] == 1 else array for array in parameters], examples, metrics

    monkeypatch.setattr(DomainClient, "fit", fit)
    folder, _ = run_small(tolerant(tmp_path, 3))
    rounds = numbers(folder / "rounds.csv")
    assert list(rounds["clients"]) == [0, 0, 3, 3]
    assert rounds["mean_validation_accuracy"][1:].nunique() == 1
    assert numbers(folder / "summary.csv")["best_validation_round"].item() == 2
    with safe_open(folder / "best.safetensors", framework="numpy") as kept:
        assert kept.metadata()["round"] == "2"
