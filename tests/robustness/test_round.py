"""The loop of rounds is ours, with Flower's signature; one round gives one result, and can be taken back."""

import ast
import inspect
import math
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg, Strategy
from scene import CannedGrid, build
from support import Interrupt, run_small, tiny_experiment

import strategies.round
from fedsim.common.errors import UserError
from fedsim.runtime.watched import WatchedGrid
from fedsim.tensors.arrays import record_to_arrays, state_to_record
from strategies.accept import HISTORY
from strategies.base import FedDG, means
from strategies.round import RoundResult, play_round
from strategies.wire.fused_check import largest

HOOKS = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")
MOST_LINES = 60


class Played:
    """A sink that keeps the results of all rounds."""

    def __init__(self) -> None:
        self.results: list[RoundResult] = []
        self.begun: list[int] = []

    def begin_round(self, number):
        self.begun.append(number)

    def end_round(self, result):
        self.results.append(result)


@pytest.fixture
def played(monkeypatch):
    """A sink that every strategy of the test tells of its rounds."""
    sink, begin = Played(), FedDG.__init__

    def with_sink(self, *arguments, **options):
        begin(self, *arguments, **options)
        self.sinks.append(sink)

    monkeypatch.setattr(FedDG, "__init__", with_sink)
    return sink


def test_start_has_the_signature_of_flowers_strategy():
    def plain(function):
        return [(name, each.default, each.kind) for name, each in inspect.signature(function).parameters.items()]

    assert plain(FedDG.start) == plain(Strategy.start)
    assert issubclass(FedDG, Strategy)
    assert not issubclass(FedDG, FedAvg)


def test_a_round_is_one_function_that_fits_on_a_screen():
    tree = ast.parse(Path(strategies.round.__file__).read_text())
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "play_round"]
    assert function.end_lineno - function.lineno < MOST_LINES


@pytest.fixture
def strategy(tmp_path):
    experiment = tiny_experiment(tmp_path)
    return FedDG(build("fedavg", tmp_path).server.parts.recipe, experiment, {}, {"token": "0" * 16})


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_flower_says_what_to_call_instead(strategy, hook):
    arguments = [None] * (len(inspect.signature(getattr(FedDG, hook)).parameters) - 1)
    with pytest.raises(NotImplementedError, match=r"call strategy\.start\(grid, arrays\)"):
        getattr(strategy, hook)(*arguments)


def test_arguments_that_would_have_no_effect_are_refused(strategy, tmp_path):
    with pytest.raises(UserError, match="FedDG knows no clients"):
        strategy.start(CannedGrid([]), None)
    strategy.server.exchange.sites = {"rot0": None}
    with pytest.raises(UserError, match="leave train_config and evaluate_config out"):
        strategy.start(CannedGrid([]), None, train_config=ConfigRecord({"lr": 0.1}))
    with pytest.raises(UserError, match=r"run\.timeout says; set it to 7"):
        strategy.start(CannedGrid([]), None, timeout=7)


def test_each_round_gives_its_result_and_starts_from_the_model_of_the_one_before(tmp_path, played):
    run_small(tiny_experiment(tmp_path, rounds=2))
    assert played.begun == [result.number for result in played.results] == [0, 1, 2]
    first, *later = played.results
    assert (first.accepted, first.validation, first.failures) == ([], {}, {})
    for result in later:
        assert result.accepted == list(result.validation) == ["rot0", "rot15", "rot30"]
        assert {row["validation_examples"] for row in result.validation.values()} == {10}
        assert 0 <= result.target.value <= 1
        assert all(row["bytes_up"] > 0 for row in result.notes.clients.values())


def test_a_resumed_run_plays_only_the_rounds_that_are_left(tmp_path, played):
    experiment = tiny_experiment(tmp_path, rounds=3)
    with pytest.raises(KeyboardInterrupt):
        run_small(experiment, Interrupt(1))
    del played.begun[:]
    run_small(experiment)
    assert played.begun == [2, 3]


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddg-ga"])
def test_a_round_that_is_taken_back_returns_the_model_and_the_state_of_before(method, tmp_path):
    """No record is written: the result has the very record with which the round began."""
    scene = build(method, tmp_path)
    before = {name: np.array(array) for name, array in record_to_arrays(scene.arrays).items()}
    remembered = scene.server.state.snapshot()

    def useless(message, reply):
        if message.content["config"]["phase"] == "evaluate":
            reply.content["metrics"]["loss"] = math.nan
        return reply

    grid = WatchedGrid(len(scene.server.exchange.clients), useless)
    nodes = dict(zip(scene.server.exchange.sites, grid.node_ids))
    assert [site.node_id for site in scene.server.exchange.sites.values()] == list(nodes.values())
    result = play_round(scene.server, grid, 2, scene.arrays)
    assert result.model is scene.arrays
    np.testing.assert_equal(record_to_arrays(result.model), before)
    now = scene.server.state.snapshot()
    assert (now.stored, now.handed, list(now.banks)) == (remembered.stored, remembered.handed, list(remembered.banks))
    np.testing.assert_equal(now.parts, remembered.parts)
    assert result.validation == {}
    assert result.accepted == []
    assert set(result.failures) == {"rot0", "rot15", "rot30"}


def test_a_model_that_no_single_client_ruined_leaves_the_model_and_the_sizes_of_before(tmp_path):
    """All updates are huge. The clients then validate the model of before, and the sizes are not remembered."""
    scene = build("fedavg", tmp_path)
    server = scene.server
    server.probe = lambda arrays: largest(arrays) < 1e30
    before = {name: np.array(array) for name, array in record_to_arrays(scene.arrays).items()}
    sizes = server.state.snapshot().parts[0][HISTORY]

    def tamper(message, reply):
        return huge(reply) if message.content["config"]["phase"] == "train" else reply

    result = play_round(server, WatchedGrid(len(server.exchange.clients), tamper), 2, scene.arrays)
    np.testing.assert_equal(record_to_arrays(result.model), before)
    assert server.state.parts[HISTORY] == sizes
    assert set(result.validation) == {"rot0", "rot15", "rot30"}
    assert result.accepted == []
    reasons = {row["status"] for row in result.notes.clients.values()}
    assert reasons == {"not used: the outputs of the aggregated model are not finite"}


def huge(reply):
    arrays = {name: np.array(array) for name, array in record_to_arrays(reply.content["arrays"]).items()}
    floats = {name: np.full_like(array, 3e38) for name, array in arrays.items() if array.dtype.kind == "f"}
    reply.content["arrays"] = state_to_record({**arrays, **floats})
    return reply


def test_a_snapshot_stays_as_it_was_and_can_be_restored_again(tmp_path):
    """Two clients keep a bank that comes once; what happens after the first `restore` is taken back by the second."""
    server = build("ccst", tmp_path).server
    server.state.handed = {"style": ["rot0", "rot15"]}
    before = server.state.snapshot()
    for _ in range(2):
        server.state.restore(before)
        server.parts.keep(["rot30"])
        assert server.state.handed == {"style": ["rot0", "rot15", "rot30"]}
        assert before.handed == {"style": ["rot0", "rot15"]}
    server.state.restore(before)
    server.exchange.fail("rot0", "its disk is full")
    assert server.state.handed == {"style": ["rot15"]}
    assert before.handed == {"style": ["rot0", "rot15"]}


def test_a_client_that_failed_gets_the_bank_again_also_when_its_round_is_taken_back(tmp_path):
    """It may have lost what it kept, and a state of before the round does not know that."""
    server = build("ccst", tmp_path).server
    server.state.handed = {"style": ["rot0", "rot15"]}
    before = server.state.snapshot()
    server.exchange.fail("rot15", "its disk is full")
    server.parts.keep(["rot30"])
    server.state.restore(before)
    assert server.state.handed == {"style": ["rot0"]}


def test_means_of_validations_by_hand():
    rows = {"a": {"validation_loss": 1.0, "validation_accuracy": 0.5}, "b": {"validation_loss": 3.0}}
    assert dict(means(rows)) == {"validation_loss": 2.0, "validation_accuracy": 0.5}
