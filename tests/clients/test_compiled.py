"""The network's pass as one compiled program for all clients."""

import pandas as pd
import pytest
import torch
from small_round import colour_images, small_data, small_round
from torch import nn

from clients.compiled import Compiled
from clients.local_round import Batch
from fedsim.commands.contract import small_plan
from fedsim.common.errors import UserError
from fedsim.models.net import Net
from fedsim.run.serve import serve
from fedsim.runtime.launch import make_grid


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


@pytest.mark.slow
def test_compiled_numbers_are_the_networks_own(tmp_path):
    """With PyTorch's real compiler, two rounds of FedAvg differ only by rounding."""
    losses = []
    for mode in ("off", "default"):
        changes = [f"train.compile={mode}", "train.rounds=2", "train.iterations=2", "data.fraction=0.05"]
        plan = small_plan("fedavg", tmp_path / mode, changes)
        losses.append(pd.read_csv(serve(make_grid(plan), plan) / "rounds.csv")["train_loss"].iloc[1:])
    assert losses[0].tolist() == pytest.approx(losses[1].tolist(), abs=1e-3)
