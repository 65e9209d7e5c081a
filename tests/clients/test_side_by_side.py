"""Clients that train as one program, or by a compiled pass, end a round with the model of clients that train alone."""

import copy
import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from small_round import colour_images, small_data, small_round
from torch import nn

from clients.base import DomainClient
from clients.compiled import Compiled
from clients.local_round import Batch
from clients.stacked.net import StackedNet
from clients.stacked.side_by_side import SideBySide, reason_apart
from fedsim.apps.client import app
from fedsim.common.errors import ClientFailedError, UserError
from fedsim.methods.table import METHODS
from fedsim.models.net import Net
from fedsim.models.tasks import CLASSIFIES
from fedsim.parts.part import part_name
from fedsim.runs.plan import Plan
from fedsim.runs.serve import serve
from fedsim.runtime.launch import make_grid
from fedsim.runtime.local_grid import InlineGrid
from fedsim.runtime.together import TogetherGrid
from fedsim.settings import TrainSettings
from fedsim.tensors.arrays import record_to_arrays
from fedsim.testing.contract import small_plan

SHORT = ["train.iterations=3", "train.rounds=2", "train.side_by_side=3", "data.fraction=0.05", "train.momentum=0.9"]
ALLOWED = [name for name, recipe in METHODS.items() if not reason_apart(recipe, TrainSettings())]
EVERY_TIME = ("gperxan", "scaffold", "selfreg")  # personal layers; gradients that are changed; a term's own parameters
CLOSE = 1e-5


@pytest.fixture
def double(monkeypatch):
    """Double precision for networks and images: in single, rounding may move a maximum to another pixel."""
    build, pooled = Plan.build_net, Net.pooled
    monkeypatch.setattr(Plan, "build_net", lambda plan: build(plan).double())
    monkeypatch.setattr(Net, "pooled", lambda net, images: pooled(net, images.double()))


class BothWays(TogetherGrid):
    """Trains every group one after the other, then side by side, and compares what is sent."""

    compared = 0

    def _train(self, messages):
        alone = list(InlineGrid.deliver(self, messages))
        together = list(super()._train(messages))
        for first, second in zip(alone, together, strict=True):
            assert not first.has_error(), first.error.reason
            assert not second.has_error(), second.error.reason
            self.compare(first.content, second.content)
        return together

    def compare(self, alone, together):
        assert alone.array_records.keys() == together.array_records.keys()
        for name, record in alone.array_records.items():
            arrays, others = record_to_arrays(record), record_to_arrays(together.array_records[name])
            assert arrays.keys() == others.keys()
            for key, array in arrays.items():
                np.testing.assert_allclose(others[key], array, atol=CLOSE, rtol=CLOSE, err_msg=f"{name} {key}")
        metrics, others = dict(alone["metrics"]), dict(together["metrics"])
        assert others.pop("side_by_side") == 3
        assert metrics.keys() == others.keys()
        for key in metrics:
            if "seconds" not in key:
                assert others[key] == pytest.approx(metrics[key], abs=1e-4), key
        type(self).compared += 1


def train_both_ways(method, folder, *overrides):
    plan = small_plan(method, folder, [*SHORT, *overrides])
    grid = BothWays(app, plan)
    BothWays.compared = 0
    serve(grid, plan)
    assert grid.reason == ""
    assert BothWays.compared == 6  # three clients, two rounds


@pytest.mark.parametrize(
    "method", [name if name in EVERY_TIME else pytest.param(name, marks=pytest.mark.slow) for name in ALLOWED]
)
def test_methods_train_alike(method, double, tmp_path):
    train_both_ways(method, tmp_path)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adam_whose_moments_are_kept_and_the_best_of_three_iterates(optimizer, double, tmp_path):
    changes = [f"train.optimizer={optimizer}", "train.persist_optimizer=true", "train.local_checks=3", "train.lr=0.001"]
    train_both_ways("fedavg", tmp_path, *changes, "train.weight_decay=0.01")


def test_the_methods_that_are_left_out_are_known():
    apart = {name: reason_apart(recipe, TrainSettings()) for name, recipe in METHODS.items() if name not in ALLOWED}
    allowed = {"fedavg", "fedprox", "moon", "scaffold", "fedbn", "fedsb", "gperxan", "feddg-ga", "ccst", "fpl"}
    assert set(ALLOWED) >= allowed
    assert apart["deepall"] == "one client holds all data"
    for name, slot in (("csac", "step"), ("elcfs", "step"), ("fedig", "objective"), ("fedsam", "update")):
        assert part_name(getattr(METHODS[name], slot)) in apart[name]
    assert "mix_style" in apart["mixstyle"]
    assert "classifier_alignment" in apart["fediir"]


def clients_of_one_round(method, folder, *overrides):
    plan = small_plan(method, folder, [*SHORT, "train.rounds=1", *overrides])
    return pd.read_csv(serve(TogetherGrid(app, plan), plan) / "clients.csv").query("round == 1").set_index("client")


@pytest.mark.parametrize(("method", "change", "reason"), [
    ("mixstyle", [], "mix_style: not a function of one client's tensors and batch alone"),
    ("fedavg", ["train.precision=bf16"], "train.precision = bf16 does not reach the convolutions"),
])  # fmt: skip
def test_what_needs_its_own_steps_falls_back_by_name(method, change, reason, tmp_path, caplog):
    assert TogetherGrid(app, small_plan(method, tmp_path, [*SHORT, *change])).reason.startswith(reason)
    assert "clients train one after the other" in caplog.text


def test_a_network_that_branches_on_its_input_falls_back(tmp_path, caplog, monkeypatch):
    pooled = Net.pooled
    monkeypatch.setattr(Net, "pooled", lambda net, x: pooled(net, x if float(x.sum()) < 1e9 else -x))
    clients_of_one_round("fedavg", tmp_path)
    assert [record for record in caplog.records if "the network does not run as one program" in record.message]


@pytest.mark.parametrize(("change", "words"), [
    ("run.runtime=ray", "side_by_side"),
    ("train.compile=default", r"^train\.compile .* train\.side_by_side; set one of them to its default$"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(change, words, tmp_path):
    with pytest.raises(UserError, match=words):
        small_plan("fedavg", tmp_path, [*SHORT, change])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return clients_of_one_round("fedprox", tmp_path_factory.mktemp("unbroken"))


@pytest.mark.parametrize("place", ["begin", "batch", "term", "before_step", "took"])
def test_a_client_that_fails_is_the_only_one(place, unbroken, tmp_path, monkeypatch):
    """At the beginning or in its second step; the two others end with the losses that they have with it."""
    begin = DomainClient.begin_steps

    def broken(client, round):
        if (round.client, place) == ("rot15", "begin"):
            raise ValueError("cannot crop this image")
        steps = begin(client, round)
        if round.client == "rot15":
            calls = itertools.count(1)

            def failing(*arguments):
                if next(calls) == 2:
                    raise ValueError("cannot crop this image")
                return 0.0

            if place == "batch":
                batch, client.data = client.data.batch, copy.copy(client.data)
                client.data.batch = lambda *arguments: failing() or batch(*arguments)
            elif place == "took":
                steps.after = [*steps.after, failing]
            else:
                getattr(round, "terms" if place == "term" else place).append(failing)
        return steps

    monkeypatch.setattr(DomainClient, "begin_steps", broken)
    rows, others = clients_of_one_round("fedprox", tmp_path, "run.on_client_failure=continue"), ["rot0", "rot30"]
    assert "cannot crop this image" in rows["status"]["rot15"]
    assert list(rows["side_by_side"][others]) == [2 if place == "begin" else 3] * 2
    assert list(rows["train_loss"][others]) == pytest.approx(list(unbroken["train_loss"][others]), abs=1e-6)


def test_an_error_of_the_common_pass_is_that_of_each_client(tmp_path, monkeypatch):
    forward, calls = StackedNet.forward, itertools.count(1)

    def broken(stack, rows, *arguments):
        if next(calls) == 3:  # the trial is the first
            raise RuntimeError("out of memory")
        return forward(stack, rows, *arguments)

    monkeypatch.setattr(StackedNet, "forward", broken)
    with pytest.raises(ClientFailedError, match="out of memory"):
        clients_of_one_round("fedavg", tmp_path)


def flat_net(*layers):
    return Net(nn.Sequential(nn.Flatten(), nn.Linear(4, 6), *layers), 6, 3).train()


def test_dropout_frozen_tensors_and_the_trial():
    """Every client has its own dropout; frozen tensors are not stacked; the trial is in the precision of training."""
    torch.manual_seed(0)
    stack = StackedNet(flat_net(nn.Dropout(0.5)), {}, 2, CLASSIFIES)
    images = torch.randn(1, 500, 1, 2, 2).expand(2, -1, -1, -1, -1)
    out = stack.forward(stack.rows([0, 1]), images, torch.zeros(2, 500, dtype=torch.int64)).features == 0
    assert out.float().mean(dim=(1, 2)).sub(0.5).abs().max() < 0.05
    assert 0.4 < (out[0] ^ out[1]).float().mean() < 0.6
    net = flat_net(nn.BatchNorm1d(6))
    frozen = {name: "frozen" for name in net.state_dict() if name.startswith("backbone")}
    stack = StackedNet(net, frozen, 2, CLASSIFIES)
    passed = stack.forward(stack.rows([0, 1]), torch.randn(2, 5, 1, 2, 2), torch.zeros(2, 5, dtype=torch.int64))
    assert set(stack.stacks) == set(passed.leaves) == {"head.weight", "head.bias"}
    assert float(stack.program.net.state_dict()["backbone.2.running_mean"].abs().sum()) == 0

    def refused():
        raise ValueError("bf16 is not for this network")

    data = small_data(np.zeros((6, 1, 2, 2), np.uint8))
    program = SideBySide(flat_net(nn.BatchNorm1d(6)), {}, 2, CLASSIFIES)
    assert program.trial(data) == ""
    assert program.trial(data, refused) == "the network does not run as one program (bf16 is not for this network)"


@pytest.fixture
def eager(monkeypatch):
    """Replace the compiler's code generation, which takes a minute; returns the list of its calls."""
    calls = []

    def compile(module, **words):
        calls.append(words)
        return lambda images: (calls.append(tuple(images.shape)), module(images))[1]

    monkeypatch.setattr(torch, "compile", compile)
    return calls


def small_net():
    return Net(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), 4, 3)


def test_only_full_training_batches_of_the_network_itself_take_the_program(eager):
    net = small_net()
    compiled = Compiled(net, 4, "default")
    round = small_round(small_data(colour_images(8, size=4)), net=net, compiled=compiled)
    for count, train, other in ((4, True, None), (3, True, None), (4, False, None), (4, True, small_net())):
        net.train(train)
        images, labels = torch.rand(count, 3, 2, 2), torch.zeros(count, dtype=torch.int64)
        batch = Batch(images, labels)
        loss = round.forward(batch, other)
        expected = (other or net)(images)
        torch.testing.assert_close(batch.logits, expected)
        torch.testing.assert_close(loss, nn.functional.cross_entropy(expected, labels))
    assert eager == [{"dynamic": False, "mode": "default"}, (4, 3, 2, 2)]
    first, again = compiled.take_seconds(), compiled.take_seconds()
    assert first > 0
    assert again == 0


def test_the_records_say_who_compiled_and_for_how_long(eager, tmp_path):
    plan = small_plan("fedavg", tmp_path, ["train.compile=default", "train.rounds=2", "train.iterations=1"])
    rows = pd.read_csv(serve(make_grid(plan), plan) / "clients.csv").query("round > 0")
    assert len(eager) == 1 + 6  # compiled once for three clients and two rounds
    assert (rows["compile_seconds"] > 0).tolist() == [True, False, False, False, False, False]


def test_a_compiler_that_fails_is_named(monkeypatch):
    def broken(images):
        raise RuntimeError("no C++ compiler\nmore")

    monkeypatch.setattr(torch, "compile", lambda module, **words: broken)
    with pytest.raises(UserError, match=r"no C\+\+ compiler\); .*train.compile = 'off'"):
        Compiled(small_net(), 2, "default")(torch.rand(2, 3, 2, 2))


FAST = ("csac", "gperxan")
SEEN = [pytest.param(row, False, marks=() if row in FAST else pytest.mark.slow) for row in METHODS if row != "plan"]


@pytest.mark.parametrize(("method", "code"), [*SEEN, pytest.param("fedavg", True, marks=pytest.mark.slow)])
def test_the_compiler_sees_what_a_method_does(method, code, tmp_path, monkeypatch):
    """The program as the compiler reads it: a hook or a draw that it does not see is lost. With its code for FedAvg."""
    compile, losses = torch.compile, []
    if not code:
        monkeypatch.setattr(torch, "compile", lambda module, **words: compile(module, backend="eager", dynamic=False))
    for mode in ("off", "default"):
        torch.compiler.reset()
        plan = small_plan(method, tmp_path / mode, [f"train.compile={mode}", "train.rounds=2", "train.iterations=3"])
        losses.append(pd.read_csv(serve(make_grid(plan), plan) / "rounds.csv")["train_loss"].iloc[1:].tolist())
    close = 1e-3 if code else 2e-3 if method == "perada" else 1e-6  # PerAda has other draws
    assert losses[0] == pytest.approx(losses[1], abs=close)
