"""Kinds of tensors, by the type of the module that owns them."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from fedsim.tensors.kinds import Kind, bn_scope, tensor_kinds


class Declares(nn.Module):
    tensor_kinds: ClassVar[dict[str, Kind]] = {"score": Kind.BN_AFFINE, "memory": Kind.BN_STATISTICS}
    bn_group: ClassVar[str] = "xan"

    def __init__(self):
        super().__init__()
        self.score = nn.Parameter(torch.ones(()))
        self.register_buffer("memory", torch.zeros(2))
        self.bn = nn.BatchNorm1d(2)


def test_kinds_and_scopes_come_from_module_types():
    model = nn.ModuleDict({
        "conv": nn.Conv2d(3, 4, 3), "downsample_1": nn.BatchNorm2d(4), "bn_named": nn.Linear(2, 2),
        "inorm": nn.InstanceNorm2d(4, affine=True), "own": Declares(),
    })  # fmt: skip
    kinds = tensor_kinds(model)
    assert list(kinds) == list(model.state_dict())
    expected = {
        "downsample_1.weight": Kind.BN_AFFINE, "downsample_1.running_var": Kind.BN_STATISTICS,
        "downsample_1.num_batches_tracked": Kind.COUNTER, "bn_named.weight": Kind.WEIGHT,
        "inorm.weight": Kind.WEIGHT, "conv.bias": Kind.WEIGHT, "own.score": Kind.BN_AFFINE,
        "own.memory": Kind.BN_STATISTICS,
    }  # fmt: skip
    assert {name: kinds[name] for name in expected} == expected
    own = ["own.score", "own.memory", *(f"own.bn.{name}" for name in nn.BatchNorm1d(2).state_dict())]
    assert bn_scope(model, "xan") == own
    assert bn_scope(model, "all") == [f"downsample_1.{name}" for name in nn.BatchNorm2d(4).state_dict()] + own
    assert bn_scope(nn.Linear(2, 2), "all") == bn_scope(nn.Linear(2, 2), "xan") == []
    with pytest.raises(ValueError, match="scope"):
        bn_scope(model, "some")
