"""How many operations a step of a stack of clients starts on a device, and that the host does not wait for it."""

from pathlib import Path

import pytest
import torch

from clients.stacked.net import Rows
from clients.stacked.optimizer import StackedOptimizer
from fedsim.settings import TrainSettings
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
