"""Clients that fail in this process by an exception, divergence or wrong shapes are named in log and clients.csv."""

import logging

import numpy as np
import pytest
from safetensors import safe_open
from support import numbers, run_small, small_experiment

from clients.base import DomainClient
from fedsim.commands.runs import run_one
from fedsim.common.edge import guarded
from fedsim.common.errors import ClientFailedError

VICTIM = "rot15"


def raising(fit, *words):
    """Raise an exception in the middle of training."""
    raise OSError("the disk is full")


def diverging(fit, *words):
    """Return a model that is not finite, as after training with a learning rate that is too large."""
    arrays, examples, metrics = fit(*words)
    return [np.full_like(array, np.nan) if array.dtype.kind == "f" else array for array in arrays], examples, metrics


def reshaping(fit, *words):
    """Return a model of another architecture."""
    arrays, examples, metrics = fit(*words)
    return [array[..., None] for array in arrays], examples, metrics


def counting_wrong(fit, *words):
    """Report more examples than in the handshake."""
    arrays, examples, metrics = fit(*words)
    return arrays, examples + 1, metrics


FAULTS = {
    raising: r"error 2: OSError: the disk is full",
    diverging: r"reply refused: tensor '\S+' of record 'arrays' has NaN or infinite values",
    reshaping: r"reply refused: tensor '\S+' is float32\[.*\], expected float32\[.*\]",
    counting_wrong: r"reply refused: num-examples is 81, the handshake said 80",
}


@pytest.fixture(params=FAULTS, ids=lambda fault: fault.__name__)
def fault(request, monkeypatch):
    """The victim's training fails in round 2."""
    plain = DomainClient.fit

    def fit(self, parameters, config):
        def whole(*words):
            return plain(self, *words)

        hit = (config["client"], config["round"]) == (VICTIM, 2)
        return request.param(whole, parameters, config) if hit else whole(parameters, config)

    monkeypatch.setattr(DomainClient, "fit", fit)
    return request.param


def test_the_run_stops_by_name(fault, tmp_path):
    """By default the run stops, and the message has the round and the reason."""
    with pytest.raises(ClientFailedError, match=f"client '{VICTIM}' failed in round 2: {FAULTS[fault]}"):
        run_small(small_experiment(tmp_path))


def test_the_run_goes_on_by_name(fault, tmp_path, caplog):
    """With `continue` the round has only the other clients, and the client is in the next one.

    The log and clients.csv name the client and the reason.
    """
    with caplog.at_level(logging.WARNING, logger="fedsim"):
        folder, _ = run_small(small_experiment(tmp_path, run={"on_client_failure": "continue"}))
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "fedsim"]
    assert warning.startswith(f"round 2: client '{VICTIM}': ")
    rows = numbers(folder / "clients.csv").set_index(["client", "round"])
    assert list(rows.loc[VICTIM]["status"] == "ok") == [True, False, True]
    assert rows["status"].str.fullmatch(FAULTS[fault]).sum() == 1
    assert np.isnan(rows.loc[(VICTIM, 2), "weight"])
    assert rows.loc[(VICTIM, 3), "weight"] == pytest.approx(1 / 3)
    assert list(numbers(folder / "rounds.csv")["failed"]) == [0, 0, 1, 0]


def test_a_run_in_which_no_round_is_made_fails(tmp_path, monkeypatch, capsys):
    """Nobody ever trains: exit code 1, no summary, and the same again when the command is repeated."""
    plain = DomainClient.fit
    monkeypatch.setattr(DomainClient, "fit", lambda self, *words: diverging(lambda *own: plain(self, *own), *words))
    experiment = small_experiment(tmp_path, run={"on_client_failure": "continue"})
    for _ in range(2):
        assert guarded(lambda: run_one(experiment)) == 1
        said = capsys.readouterr().err
        assert "no round was made: no client's reply was accepted in 3 rounds" in said
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
    folder, _ = run_small(small_experiment(tmp_path, run={"on_client_failure": "continue"}))
    rounds = numbers(folder / "rounds.csv")
    assert list(rounds["clients"]) == [0, 0, 3, 3]
    assert rounds["mean_validation_accuracy"][1:].nunique() == 1
    assert numbers(folder / "summary.csv")["best_validation_round"].item() == 2
    with safe_open(folder / "best.safetensors", framework="numpy") as kept:
        assert kept.metadata()["round"] == "2"
