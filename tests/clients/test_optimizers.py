"""The local optimizer has the numbers of PyTorch's optimizers, without an import of PyTorch's compiler."""

import copy
from dataclasses import dataclass

import pytest
import torch

from clients.optimizers import eager, make_optimizer, optimizer_tensors, restore_optimizer
from clients.parts import Report
from clients.step.supervised import SupervisedStep
from fedsim.commands.contract import run_watched, small_plan
from fedsim.settings import TrainSettings


@pytest.mark.parametrize(("kind", "words"), [
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}), (torch.optim.Adam, {"weight_decay": 0.01}),
    (torch.optim.AdamW, {}),
])  # fmt: skip
def test_steps_are_pytorchs(kind, words):
    torch.manual_seed(0)
    nets = [torch.nn.Linear(5, 3) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    kinds = (kind, eager(kind))
    optimizers = [kind_(net.parameters(), 0.1, fused=True, **words) for kind_, net in zip(kinds, nets)]
    for number in range(3):
        images = torch.randn(4, 5)
        for net, optimizer in zip(nets, optimizers):
            optimizer.zero_grad(set_to_none=True)
            net(images).square().sum().backward()
            optimizer.step()
        assert all((a == b).all() for a, b in zip(*(net.parameters() for net in nets)))
        if number == 1:
            saved = optimizers[1].state_dict()
            optimizers[1] = eager(kind)(nets[1].parameters(), 0.1, fused=True, **words)
            optimizers[1].load_state_dict(saved)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_stored_buffers_fit_weights_in_another_memory_layout(optimizer):
    """The store keeps contiguous copies, whose elements must be assigned correctly to a channels-last weight."""
    torch.manual_seed(0)
    train = TrainSettings(optimizer=optimizer, momentum=0.9)
    start = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    nets = [copy.deepcopy(start) for _ in range(2)]
    optimizers = [make_optimizer(net, train, 0.1) for net in nets]
    for number in range(3):
        gradient = torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last)
        if number == 2:  # the second one goes on from what a client's store gives back
            stored = {k: v.contiguous() for k, v in optimizer_tensors(optimizers[1], nets[1]).items()}
            optimizers[1] = make_optimizer(nets[1], train, 0.1)
            restore_optimizer(optimizers[1], stored)
        for net, one in zip(nets, optimizers):
            net.weight.grad = gradient.clone()
            one.step()
    assert torch.equal(nets[0].weight, nets[1].weight)


@pytest.mark.parametrize(("optimizer", "kind"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam)])
def test_a_tied_parameter_is_stepped_once(optimizer, kind):
    """Two modules that share a weight move it by PyTorch's step, without a warning of the optimizer."""
    torch.manual_seed(0)
    own = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    own[1].weight = own[0].weight
    other, images, train = copy.deepcopy(own), torch.randn(8, 4), TrainSettings(optimizer=optimizer)
    for net, one in ((own, make_optimizer(own, train, 0.1)), (other, kind(other.parameters(), 0.1, fused=True))):
        net(images).square().sum().backward()
        one.step()
    assert torch.equal(own[0].weight, other[0].weight)


@dataclass(frozen=True)
class Halving(SupervisedStep):
    def work(self, round):
        return round.train.model_copy(update={"lr": round.train.lr * 0.5 ** (round.round - 1)})


@dataclass(frozen=True)
class Rate(Report):
    def after(self, round):
        return {"rate": round.lr, "of_optimizer": round.optimizer.param_groups[0]["lr"]}


def test_a_method_brings_a_schedule_of_its_own(tmp_path):
    """As on the page about own methods."""
    parts = ['method.client="test_optimizers:Halving"', 'method.reports=["test_optimizers:Rate"]']
    clients = run_watched(small_plan("fedavg", tmp_path, [*parts, "data.fraction=0.05"])).clients.query("round > 0")
    for column in ("rate", "of_optimizer"):
        assert clients.groupby("round")[column].unique().str[0].tolist() == pytest.approx([0.05, 0.025, 0.0125])
