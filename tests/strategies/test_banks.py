"""Banks in whole runs: partial participation, failures, and rows that are collected anew."""

import numpy as np
import pytest
from flwr.app import Error, Message
from support import run_small, small_experiment
from tampering import rows_of, short, tamper

from fedsim.common.errors import ClientFailedError
from fedsim.tensors.arrays import record_to_arrays

CLIENTS = ["rot0", "rot15", "rot30"]


def cells(folder, column, round) -> list:
    return list(rows_of(folder).loc[round, column])


def failing(words, phase, rounds):
    def replaced(message: Message, reply: Message) -> Message:
        config = message.content["config"]
        hit = config["phase"] == phase and config["client"] == "rot15" and config["round"] in rounds
        return Message(Error(2, words), reply_to=message) if hit else reply

    return replaced


DRAWN = {"rounds": 5, "iterations": 1, "clients_per_round": 1}


def handed(grid) -> dict[str, set[str]]:
    """The names of the styles that each client got; no client gets them twice."""
    messages = [message.content for message, _ in grid.seen if "style" in message.content.array_records]
    found = {content["config"]["client"]: set(content["style"]) for content in messages}
    assert len(found) == len(messages)
    return found


def test_who_is_drawn_late_gets_the_bank_then(tmp_path):
    _, grid = run_small(small_experiment(tmp_path, "ccst", train=DRAWN))
    trained = {
        message.content["config"]["client"] for message, _ in grid.seen if message.metadata.message_type == "train"
    }
    styles = {f"{name}:{kind}" for name in CLIENTS for kind in ("mean", "std")}
    assert handed(grid) == dict.fromkeys(trained, styles)
    assert len(trained) > 1


def test_a_client_that_fails_does_not_keep_others_from_the_bank_and_gets_it_again(tmp_path):
    tampered = failing("Traceback: out of paint", "collect", (0,))
    with pytest.raises(ClientFailedError, match="out of paint"):
        run_small(small_experiment(tmp_path / "stop", "ccst"), tamper=tampered)
    folder, grid = run_small(short(tmp_path / "on", 1, "ccst"), tamper=tampered)
    assert "out of paint" in cells(folder, "status", 0)[1]
    assert cells(folder, "status", 1) == ["ok"] * 3
    assert {name.split(":")[0] for names in handed(grid).values() for name in names} == {"rot0", "rot30"}
    assert handed(grid)["rot15"]
    folder, _ = run_small(short(tmp_path / "late", 3, "ccst"), tamper=failing("node lost", "train", (2,)))
    assert cells(folder, "bytes_down_style", 3)[1] == 24
    assert np.isnan([*cells(folder, "bytes_down_style", 2)[::2], *cells(folder, "bytes_down_style", 3)[::2]]).all()


# --- FedCCRL's rows ---------------------------------------------------------------------------------------------------

SMALL = {"name": "fedccrl", "aligned_views": {"width": 1}}


def means_of(record):
    return record_to_arrays(record).get("mean", np.zeros((0, 1), np.float32))


def test_rows_anew_in_every_round_and_those_of_a_client_that_fails_stay(tmp_path):
    """In round 2 the rows of rot15 are lost: it does not train, and the others get its rows of round 1."""
    failing = tamper(lambda content: content["pixel_stats"].clear(), "collect")
    anew = {**SMALL, "pixel_statistics": {"refresh": "round"}}
    _, grid = run_small(short(tmp_path, 2, anew), tamper=failing)
    found, handed = {}, {}
    for message, reply in grid.seen:
        config, kind = message.content["config"], message.metadata.message_type
        if kind == "query.collect":
            assert "arrays" not in message.content.array_records
            found[config["round"], config["client"]] = means_of(reply.content["pixel_stats"])
        elif kind == "train":
            handed[config["round"], config["client"]] = means_of(message.content["pixel_stats"])
    assert not any(np.array_equal(found[1, client], found[2, client]) for client in ("rot0", "rot30"))
    assert len(found[1, "rot15"]) == 8
    assert handed.keys() == found.keys() - {(2, "rot15")}
    assert np.array_equal(handed[1, "rot15"], np.concatenate([found[1, "rot0"], found[1, "rot30"]]))
    assert np.array_equal(handed[2, "rot0"], np.concatenate([found[1, "rot15"], found[2, "rot30"]]))
