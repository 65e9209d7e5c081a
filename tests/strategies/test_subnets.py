"""FedDrop: what is sent, what a client trains, and how the server averages; SiloBN without statistics."""

import numpy as np
import pytest
import torch
from support import run_small, small_experiment
from torch import nn

from fedsim.common.errors import UserError
from fedsim.models.digits_cnn import DigitsCNN
from fedsim.models.hidden import hidden_layers
from fedsim.models.inserts.kept_scale import KeptScale
from fedsim.models.inserts.projection_head import ProjectionHead
from fedsim.models.net import Net
from strategies.share.random_subnet import RandomSubnet
from strategies.wire.cuts import put_back, taken


class Pool(nn.Module):
    """A backbone without fully connected layers: 512 pooled channels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 512, 1)

    def forward(self, x):
        return self.conv(x).mean((2, 3))


def test_hidden_layers_and_what_is_drawn_of_them():
    (bottleneck,) = hidden_layers(Net(Pool(), 512, 7, bottleneck=256))
    assert bottleneck.units == 256
    assert bottleneck.rows == ("bottleneck.0.weight", "bottleneck.0.bias", "bottleneck.1.weight", "bottleneck.1.bias",
                               "bottleneck.1.running_mean", "bottleneck.1.running_var")  # fmt: skip
    assert (bottleneck.columns, bottleneck.reader) == ("head.weight", "head")
    both = hidden_layers(Net(DigitsCNN(batch_norm=True), 50, 10, bottleneck=16))
    assert [(layer.units, layer.columns) for layer in both] == [(50, "bottleneck.0.weight"), (16, "head.weight")]
    projected = Net(Pool(), 512, 7)
    ProjectionHead(256).apply(projected)
    assert [layer.units for layer in hidden_layers(projected)] == [512, 256]
    assert hidden_layers(Net(Pool(), 512, 7)) == []  # pooled features
    scaled, x = Net(nn.Flatten(), 6, 3, bottleneck=8), torch.randn(16, 1, 2, 3)
    KeptScale(0.5).apply(scaled)
    for scale in (2, 1):  # in training and in eval mode
        scaled.train(scale == 2)
        logits = nn.functional.linear(scale * scaled.features(x), scaled.head.weight, scaled.head.bias)
        assert torch.allclose(scaled(x), logits, atol=1e-6)
    with pytest.raises(UserError, match="nothing to drop"):
        KeptScale(0.5).apply(Net(Pool(), 512, 7))
    net, rule = Net(Pool(), 512, 7, bottleneck=256), RandomSubnet(0.5)
    drawn = (("a", 1), ("a", 1), ("b", 1), ("a", 2))
    first, *others = (rule.cut(net, client, round, 0)["head.weight"][1] for client, round in drawn)
    assert [np.array_equal(first, other) for other in others] == [True, False, False]
    few = len(RandomSubnet(0.9).cut(net, "a", 1, 0)["head.weight"][1])
    assert 5 < few < 60  # a tenth of 256
    assert len(RandomSubnet(0.999).cut(Net(DigitsCNN(), 50, 10), "a", 1, 0)["backbone.fc.bias"][0]) >= 1
    assert RandomSubnet(0.0).cut(net, "a", 1, 0) == {}


def test_average_by_hand():
    """The old values are 4, 4, 1; one client keeps the first and reaches 6, the other drops it: (6 + 4) / 2 = 5."""
    base = {"w": np.array([4.0, 4.0, 1.0], np.float32)}
    kept = (([0, 2], [6.0, 2.0]), ([2], [3.0]))
    first, second = (put_back({"w": np.float32(new)}, {"w": (np.array(at),)}, base)["w"] for at, new in kept)
    np.testing.assert_array_equal((first + second) / 2, [5.0, 4.0, 2.5])
    narrow = taken({"w": np.arange(6.0).reshape(2, 3), "b": np.arange(2.0)}, {"w": (np.array([1]), np.array([0, 2]))})
    assert (narrow["w"].tolist(), narrow["b"].tolist()) == ([[3, 5]], [0, 1])


def test_silobn_without_the_upload_sends_no_statistics(tmp_path):
    method = {"name": "silobn", "infer": "recompute", "without_statistics": {"upload": False}}
    sections = {"model": {"bottleneck": 16}, "train": {"rounds": 1, "iterations": 1}}
    _, grid = run_small(small_experiment(tmp_path, method, **sections))
    sent = [set(reply.content["arrays"]) for message, reply in grid.seen if message.metadata.message_type == "train"]
    assert len(sent) == 3
    assert not [name for name in set.union(*sent) if "running" in name or "num_batches" in name]
