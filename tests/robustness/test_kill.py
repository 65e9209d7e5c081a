"""`kill -9` at every write, and clients that fail: the same command finishes the run, and records name the clients."""

import multiprocessing
import os
import signal
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import numbers, run_small, small_experiment, tiny_experiment

from clients.base import DomainClient
from fedsim.commands.runs import run_one
from fedsim.common.errors import ClientFailedError
from fedsim.common.exit_codes import guarded
from fedsim.runs.origin import round_of
from fedsim.runs.plan import run_folder
from fedsim.runtime.launch import launch


def run_and_die(experiment, write):
    """Do a run that dies when the `write`-th file is renamed (negative: just before; 0: never)."""
    plain, places = Path.replace, count(1)

    def replace(path, target):
        place = next(places)
        if place == -write:
            os.kill(os.getpid(), signal.SIGKILL)
        done = plain(path, target)
        if place == write:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    Path.replace = replace
    launch(experiment)


def run(experiment, write=0) -> int:
    """The exit code of a run in a process of its own, which has imported everything."""
    process = multiprocessing.get_context("fork").Process(target=run_and_die, args=[experiment, write])
    process.start()
    process.join()
    return process.exitcode


def differences(folder: Path, other: Path) -> list[str]:
    """The files (records without columns of times, and `last.safetensors`) in which two finished runs differ."""
    found = []
    for name in ("rounds.csv", "clients.csv", "details.csv", "summary.csv"):
        paths = [path for path in (folder / name, other / name) if path.exists()]
        tables = [numbers(path) for path in paths]
        if len(tables) == 1 or (tables and not (list(tables[0]) == list(tables[1]) and tables[0].equals(tables[1]))):
            found.append(name)
    one, two = (load_file(path / "last.safetensors") for path in (folder, other))
    equal = one.keys() == two.keys() and all(one[name].tobytes() == two[name].tobytes() for name in one)
    return found + ([] if equal else ["last.safetensors"])


@pytest.mark.slow
def test_killed_before_and_after_every_write(tmp_path):
    """An incomplete round is not taken for a complete one."""

    def of(name):
        return small_experiment(tmp_path / name, "gperxan", train={"rounds": 2}, run={"processes": 1})

    assert run(of("whole")) == 0
    for place in range(1, 1000):
        if run(of(f"before{place}"), -place) == 0:
            break
        assert run(of(f"after{place}"), place) == -signal.SIGKILL
        for cut in (of(f"before{place}"), of(f"after{place}")):
            assert run(cut) == 0
            assert differences(run_folder(cut), run_folder(of("whole"))) == []
    assert place > 20


VICTIM, CONTINUE = "rot15", {"on_client_failure": "continue"}


@pytest.fixture
def spoil(monkeypatch):
    """spoil(change): every client's model becomes change(client, round, received, trained)."""
    plain = DomainClient.train

    def patch(change):
        def train(self, tensors, order):
            sent, *rest = plain(self, tensors, order)
            changed = change(order["client"], order["round"], list(tensors.values()), list(sent.values()))
            return dict(zip(sent, changed, strict=True)), *rest

        monkeypatch.setattr(DomainClient, "train", train)

    return patch


def not_finite(client, round, received, trained):
    """As after training with a learning rate that is too large."""
    return [array * np.nan if array.dtype.kind == "f" else array for array in trained]


def failing(client, round, received, trained):
    """One fault a round, in rounds 2 and 3."""
    if (client, round) == (VICTIM, 2):
        raise OSError("the disk is full")
    return not_finite(client, round, received, trained) if (client, round) == (VICTIM, 3) else trained


def test_the_run_goes_on_by_name(spoil, tmp_path, caplog):
    """With `continue` the round has only the other clients, and the client is in the next one; else the run stops."""
    spoil(failing)
    folder, _ = run_small(tiny_experiment(tmp_path / "on", rounds=4, run=CONTINUE))
    said = [record.getMessage() for record in caplog.records if record.name == "fedsim"]
    assert [each.startswith(f"round {round}: client '{VICTIM}': ") for round, each in enumerate(said, start=2)] == [
        True
    ] * 2
    rows = numbers(folder / "clients.csv").set_index("client").loc[VICTIM].set_index("round")
    assert rows["status"][2] == "error 2: OSError: the disk is full"
    assert "has NaN or infinite values" in rows["status"][3]
    assert rows["weight"].tolist() == pytest.approx([1 / 3, np.nan, np.nan, 1 / 3], nan_ok=True)
    assert list(numbers(folder / "rounds.csv")["failed"]) == [0, 0, 1, 1, 0]
    with pytest.raises(ClientFailedError, match=f"client '{VICTIM}' failed in round 2: error 2: OSError: the disk"):
        run_small(tiny_experiment(tmp_path))


def test_a_run_in_which_no_round_is_made_fails(spoil, tmp_path, capsys):
    """Nobody ever trains: exit code 1, no summary, and the same again when the command is repeated."""
    spoil(not_finite)
    experiment = tiny_experiment(tmp_path, run=CONTINUE)
    for _ in range(2):
        assert guarded(lambda: run_one(experiment)) == 1
        said = capsys.readouterr().err
        assert "no round was made: no client's reply was accepted in 2 rounds" in said
        assert "client 'rot0': reply refused: tensor" in said
    rounds = numbers(run_folder(experiment) / "rounds.csv")
    assert (rounds["clients"].tolist(), rounds["target_loss"].nunique()) == ([0, 0, 0], 1)  # the model stays
    assert not [*tmp_path.rglob("summary.csv"), *tmp_path.rglob("best.safetensors")]


def test_a_round_without_a_reply_is_not_the_best(spoil, tmp_path):
    """All models are the initial one. The first that is the clients' reply is selected, and not the first of all."""
    spoil(lambda client, round, received, trained: [array * np.nan if round == 1 else array for array in received])
    folder, _ = run_small(tiny_experiment(tmp_path, rounds=3, run=CONTINUE))
    rounds = numbers(folder / "rounds.csv")
    assert list(rounds["clients"]) == [0, 0, 3, 3]
    assert rounds["mean_validation_accuracy"][1:].nunique() == 1
    assert numbers(folder / "summary.csv")["best_validation_round"].item() == 2
    assert round_of(folder / "best.safetensors") == 2
