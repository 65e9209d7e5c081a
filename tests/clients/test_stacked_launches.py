"""How many operations a step of a stack of clients starts on a device, and that the host does not wait for it."""

from pathlib import Path

import pytest
import torch

from clients.local_data import plain_batches
from clients.stacked import side_by_side
from clients.stacked.net import Rows
from clients.stacked.optimizer import StackedOptimizer
from fedsim.apps.client import app
from fedsim.runs.serve import serve
from fedsim.runtime.together import TogetherGrid
from fedsim.settings import TrainSettings
from fedsim.testing.contract import small_plan
from fedsim.testing.other_device import OTHER, other_device

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CLIENTS, TENSORS = 3, 10


@pytest.mark.parametrize(("kind", "most"), [("sgd", 4), ("adam", 17 + 2 * TENSORS), ("adamw", 18 + 2 * TENSORS)])
def test_one_optimizer_steps_the_tensors_of_all_clients(kind, most, monkeypatch):
    """SGD: the count, and three operations for all tensors. Adam has a client's own correction for each of them."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from launches import counted

    train = TrainSettings(optimizer=kind, momentum=0.9 if kind == "sgd" else 0.0, weight_decay=0.01 * (kind == "adamw"))
    defaults = {"betas": (0.9, 0.999), "eps": 1e-8}
    with other_device():
        names = [f"w{index}" for index in range(TENSORS)]
        stacks = {name: torch.rand(CLIENTS, 4, device=OTHER) for name in names}
        optimizer = StackedOptimizer(stacks, dict.fromkeys(names, 0.1), train, defaults)
        leaves = {name: stack.clone().requires_grad_() for name, stack in stacks.items()}
        for leaf in leaves.values():
            leaf.grad = torch.rand(CLIENTS, 4, device=OTHER)
        rows = Rows(range(CLIENTS), OTHER)
        assert counted(lambda: optimizer.step(rows, leaves), OTHER).names.total() <= most


def test_the_count_of_steps_is_taken_over_without_a_wait(monkeypatch):
    train = TrainSettings(optimizer="adam")
    with other_device():
        stacks = {name: torch.rand(2, 4, device=OTHER) for name in "ab"}
        optimizer = StackedOptimizer(stacks, {"a": 0.1, "b": 0.1}, train, {})
        parameters = {name: stack[1] for name, stack in stacks.items()}
        state = {parameter: {"step": torch.full((), 7.0, device=OTHER)} for parameter in parameters.values()}
        monkeypatch.setattr(torch.Tensor, "__float__", lambda value: pytest.fail("the host waited"))
        optimizer.load(1, state, parameters)
        assert optimizer.steps.cpu().tolist() == [0.0, 7.0]


@pytest.mark.parametrize(("words", "together"), [
    ([], [3] * 4), (["data.augment=flip"], []), (["method.name=fedprox"], []),
    (["data.fraction=0.05", "train.batch_size=1000"], [3] * 4),
])  # fmt: skip
def test_batches_in_which_nothing_is_drawn_are_made_at_once(words, together, tmp_path, monkeypatch):
    """Four steps in two rounds. An augmentation draws for each client, and a term sees the batch of its own client."""
    made = []

    def compared(data, items):
        images, labels = plain_batches(data, items)
        batches = [each.batch(rows) for each, rows in zip(data, items)]
        assert torch.equal(images, torch.stack([batch.images for batch in batches]))
        assert torch.equal(labels, torch.stack([batch.labels for batch in batches]))
        made.append(len(items))
        return images, labels

    monkeypatch.setattr(side_by_side, "plain_batches", compared)
    shared = ["train.side_by_side=3", "train.rounds=2", "train.iterations=2"]
    plan = small_plan("fedavg", tmp_path, [*shared, *words])
    serve(TogetherGrid(app, plan), plan)
    assert made == together
