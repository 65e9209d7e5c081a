"""Banks in whole runs: bytes, partial participation, failures, resuming, and a simple bank in every round."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pandas as pd
import pytest
from flwr.app import Error, Message
from support import Interrupt, numbers, run_small, small_experiment

from clients.parts import LocalRound, StepFunction, Term
from fedsim.common.errors import ClientFailedError
from fedsim.methods import table as methods
from fedsim.methods.assembly import find_recipe
from fedsim.methods.recipe import Recipe
from fedsim.run.workspace import close_workspaces
from fedsim.tensors.arrays import record_to_arrays, state_to_record
from strategies.banks.amplitude import AmplitudeBank
from strategies.banks.checks import layout_of, odd_shapes
from strategies.banks.style import StyleBank
from strategies.parts import Arrays, Bank, Entries, ServerRound

FIRST_ROUND = ServerRound(1, 3, [], {})
noted: list[tuple[str, int, dict]] = []


@dataclass(frozen=True)
class Tally(Bank):
    """The newest number of every client, and how often the bank was merged."""

    name: ClassVar[str] = "tally"
    when: ClassVar[Literal["once", "round"]] = "round"

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """Accept only a single `value`."""
        return "" if arrays.keys() == {"value"} else f"it holds {sorted(arrays)}"

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays:
        """The values of all clients."""
        return {owner: arrays["value"] for owner, arrays in bank.items()}


@dataclass(frozen=True)
class Counting(Term):
    """A term that contributes the number of the round, and does not change the loss."""

    bank: ClassVar[str] = "tally"
    requires: ClassVar[dict[str, str]] = {"banks": "tally"}
    discloses: ClassVar[str] = "the round number"

    def begin(self, round: LocalRound) -> StepFunction | None:
        """Note what was received, and contribute."""
        record = round.record("tally", "counting")
        noted.append((round.client, round.round, {owner: float(value) for owner, value in record.items()}))
        round.outbox["tally"] = {"value": np.array(float(round.round))}
        return None


@pytest.fixture
def toy_method(monkeypatch: pytest.MonkeyPatch) -> str:
    """A row `toy` with a bank in every round."""
    monkeypatch.setitem(methods.METHODS, "toy", Recipe(terms=(Counting(),), banks=(Tally(),)))
    noted.clear()
    close_workspaces()
    return "toy"


def cells(folder: Path, column: str) -> dict[int, list]:
    """Values of a clients.csv column by round."""
    table = pd.read_csv(folder / "clients.csv")
    return {number: list(rows[column]) for number, rows in table.groupby("round")}


def test_a_bank_of_every_round_is_merged_and_handed_out(toy_method: str, tmp_path: Path) -> None:
    folder, _ = run_small(small_experiment(tmp_path, toy_method))
    clients = ["rot0", "rot15", "rot30"]
    assert noted == [
        (client, number, dict.fromkeys(clients, number - 1.0) if number > 1 else {})
        for number in (1, 2, 3)
        for client in clients
    ]
    assert cells(folder, "bytes_up_tally")[1] == [8, 8, 8]
    assert cells(folder, "bytes_down_tally")[3] == [24, 24, 24]
    plain, _ = run_small(small_experiment(tmp_path))
    columns = ["train_loss", "target_accuracy", "target_loss"]
    assert numbers(folder / "rounds.csv")[columns].equals(numbers(plain / "rounds.csv")[columns])
    assert find_recipe("toy").disclosure() == "model updates; the round number"


def test_partial_participation_keeps_the_absent_client_s_entry(toy_method: str, tmp_path: Path) -> None:
    run_small(small_experiment(tmp_path, toy_method, train={"rounds": 5, "clients_per_round": 1}))
    newest: dict[str, float] = {}
    for client, number, record in noted:
        assert record == newest
        newest[client] = float(number)
    assert len(newest) > 1


def test_a_resumed_run_has_the_bank_it_had(toy_method: str, tmp_path: Path) -> None:
    whole, _ = run_small(small_experiment(tmp_path / "whole", toy_method))
    unbroken = list(noted)
    noted.clear()
    with pytest.raises(KeyboardInterrupt):
        run_small(small_experiment(tmp_path / "cut", toy_method), Interrupt(2))
    close_workspaces()
    cut, _ = run_small(small_experiment(tmp_path / "cut", toy_method))
    assert unbroken == noted
    pd.testing.assert_frame_equal(numbers(whole / "clients.csv"), numbers(cut / "clients.csv"))


def test_a_reply_without_its_contribution_is_refused_as_a_whole(toy_method: str, tmp_path: Path) -> None:
    def tamper(message: Message, reply: Message) -> Message:
        config = message.content.config_records["config"]
        if message.metadata.message_type == "train" and config["client"] == "rot15":
            reply.content["tally"] = state_to_record({"wrong": np.zeros(1)})
        return reply

    with pytest.raises(ClientFailedError, match=r"rot15.*tally: it holds \['wrong'\]"):
        run_small(small_experiment(tmp_path / "stop", toy_method), tamper=tamper)
    noted.clear()
    experiment = small_experiment(tmp_path / "on", toy_method, run={"on_client_failure": "continue"})
    folder, _ = run_small(experiment, tamper=tamper)
    assert set(noted[-1][2]) == {"rot0", "rot30"}
    assert "tally: it holds ['wrong']" in cells(folder, "status")[1][1]


@pytest.mark.parametrize(
    ("method", "bank", "up", "down"),
    [
        ("ccst", "style", 8, [24, 24, 24]),
        ("elcfs", "amplitude", 40, [80, 80, 80]),
        ("fedccrl", "pixel_stats", 64, [128, 128, 128]),
    ],
)
def test_a_bank_comes_once_up_and_once_down(method: str, bank: str, up: int, down: list, tmp_path: Path) -> None:
    folder, grid = run_small(small_experiment(tmp_path, method))
    assert cells(folder, f"bytes_up_{bank}")[0] == [up] * 3  # two floats a style or image; ceil(80/8) images of one bin
    assert cells(folder, f"bytes_down_{bank}")[1] == down
    assert np.isnan([*cells(folder, f"bytes_down_{bank}")[2], *cells(folder, f"bytes_down_{bank}")[3]]).all()
    assert cells(folder, "bytes_up")[0] == [up] * 3
    total, model = cells(folder, "bytes_down")[1], cells(folder, "bytes_down_arrays")[1]
    assert [a - b for a, b in zip(total, model)] == down
    assert not any(
        bank in message.content.array_records for message, _ in grid.seen if message.metadata.message_type == "evaluate"
    )


@pytest.mark.parametrize("method", ["ccst", "elcfs"])
def test_who_is_drawn_late_gets_the_bank_then(method: str, tmp_path: Path) -> None:
    _, grid = run_small(small_experiment(tmp_path, method, train={"rounds": 6, "clients_per_round": 1}))
    bank = "style" if method == "ccst" else "amplitude"
    sent = [
        message.content.config_records["config"]["client"]
        for message, _ in grid.seen
        if bank in message.content.array_records
    ]
    trained = {
        message.content.config_records["config"]["client"]
        for message, _ in grid.seen
        if message.metadata.message_type == "train"
    }
    assert sorted(sent) == sorted(trained)
    assert len(sent) > 1


def fail_to_collect(client: str):
    """Replaces the client's contribution by an error."""

    def tamper(message: Message, reply: Message) -> Message:
        config = message.content.config_records["config"]
        if config["phase"] == "collect" and config["client"] == client:
            return Message(Error(2, "Traceback: out of paint"), reply_to=message)
        return reply

    return tamper


@pytest.mark.parametrize("method", ["ccst", "elcfs"])
def test_a_client_that_failed_to_contribute_trains_on_the_others(method: str, tmp_path: Path) -> None:
    with pytest.raises(ClientFailedError, match="out of paint"):
        run_small(small_experiment(tmp_path / "stop", method), tamper=fail_to_collect("rot15"))
    experiment = small_experiment(tmp_path / "on", method, run={"on_client_failure": "continue"})
    folder, grid = run_small(experiment, tamper=fail_to_collect("rot15"))
    assert "out of paint" in cells(folder, "status")[0][1]
    assert cells(folder, "status")[1] == ["ok"] * 3
    bank = "style" if method == "ccst" else "amplitude"
    handed = {
        message.content.config_records["config"]["client"]: set(message.content.array_records[bank])
        for message, _ in grid.seen
        if bank in message.content.array_records
    }
    assert not any("rot15" in name for names in handed.values() for name in names)
    assert handed["rot15"]


def test_a_client_that_failed_in_training_gets_the_bank_again(tmp_path: Path) -> None:
    def tamper(message: Message, reply: Message) -> Message:
        config = message.content.config_records["config"]
        if message.metadata.message_type == "train" and (config["client"], config["round"]) == ("rot15", 2):
            return Message(Error(2, "node lost"), reply_to=message)
        return reply

    folder, _ = run_small(small_experiment(tmp_path, "ccst", run={"on_client_failure": "continue"}), tamper=tamper)
    assert cells(folder, "bytes_down_style")[3][1] == 24
    assert np.isnan(cells(folder, "bytes_down_style")[3][0])


@pytest.mark.parametrize("method", ["ccst", "elcfs"])
def test_a_killed_run_continues_with_its_banks(method: str, tmp_path: Path) -> None:
    whole, _ = run_small(small_experiment(tmp_path / "whole", method))
    with pytest.raises(KeyboardInterrupt):
        run_small(small_experiment(tmp_path / "cut", method), Interrupt(1))
    close_workspaces()  # a new process: what the clients keep comes from their files
    cut, grid = run_small(small_experiment(tmp_path / "cut", method))
    pd.testing.assert_frame_equal(numbers(whole / "clients.csv"), numbers(cut / "clients.csv"))
    pd.testing.assert_frame_equal(numbers(whole / "rounds.csv"), numbers(cut / "rounds.csv"))
    assert not any(message.metadata.message_type == "query.collect" for message, _ in grid.seen)


@pytest.mark.parametrize("method", ["ccst", "elcfs"])
def test_a_single_client_has_an_empty_foreign_bank(method: str, tmp_path: Path) -> None:
    data = {"domains": ["rot0", "rot45"]}
    folder, _ = run_small(small_experiment(tmp_path, method, data=data))
    plain, _ = run_small(small_experiment(tmp_path, data=data))
    assert cells(folder, "status")[3] == ["ok"]
    same = numbers(folder / "rounds.csv")["train_loss"].equals(numbers(plain / "rounds.csv")["train_loss"])
    assert same == (method == "ccst")  # the episode without foreign amplitudes still takes L(theta) + L(theta^)


def test_the_unseen_domain_is_in_no_bank(tmp_path: Path) -> None:
    _, grid = run_small(small_experiment(tmp_path, "ccst", train={"rounds": 1}))
    names = {
        name
        for message, _ in grid.seen
        if "style" in message.content.array_records
        for name in record_to_arrays(message.content.array_records["style"])
    }
    assert names == {f"rot{angle}:{kind}" for angle in (0, 15, 30) for kind in ("mean", "std")}


def test_contributions_are_checked() -> None:
    good = {"mean": np.zeros((2, 3), np.float32), "std": np.ones((2, 3), np.float32)}
    assert StyleBank().accept("a", good, FIRST_ROUND) == ""
    wrong = {
        "it holds ['mean']": {"mean": good["mean"]},
        "expected filled float32": good | {"mean": np.zeros((2, 3))},
        "dimensions": good | {"mean": np.zeros(3, np.float32)},
        "NaN": good | {"mean": np.full((2, 3), np.nan, np.float32)},
        "but std": good | {"std": np.ones((2, 4), np.float32)},
        "not positive": good | {"std": np.zeros((2, 3), np.float32)},
        "filled": {"mean": np.zeros((0, 3), np.float32), "std": np.zeros((0, 3), np.float32)},
    }
    for reason, arrays in wrong.items():
        assert reason in StyleBank().accept("a", arrays, FIRST_ROUND)
    windows = {"amplitude": np.ones((2, 3, 5, 3), np.float32)}
    assert AmplitudeBank().accept("a", windows, FIRST_ROUND) == ""
    assert "negative" in AmplitudeBank().accept("a", {"amplitude": -windows["amplitude"]}, FIRST_ROUND)
    assert AmplitudeBank().hand_out({"a": windows, "b": windows}, "a", FIRST_ROUND).keys() == {"b"}


def test_an_odd_shape_is_refused_whoever_comes_first() -> None:
    usual, odd, longer = (layout_of({"mean": np.zeros(shape)}) for shape in ((1, 3), (1, 30), (9, 3)))
    assert odd_shapes({"a": odd, "b": usual, "c": longer}).keys() == {"a"}
    assert odd_shapes({"a": usual, "b": usual}) == {}
    assert odd_shapes({}) == {}


def test_parts_are_small_frozen_dataclasses() -> None:
    for bank in (StyleBank(), AmplitudeBank()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            bank.when = "round"
