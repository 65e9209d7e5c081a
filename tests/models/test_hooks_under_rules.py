"""Inference rules that replace batch norm keep what inserts have hooked to these layers."""

import numpy as np
import pytest
import torch
from support import numbers, run_small, small_experiment
from torch import nn

from fedsim.models.infer import MixNorm
from fedsim.models.inserts.adapters import Adapter, Adapters
from fedsim.models.inserts.feature_highlighter import FeatureHighlighter, Highlighter
from fedsim.models.inserts.mixstyle import MixStyle, MixStyleLayer
from fedsim.models.inserts.style_exploration import StyleExploration, StyleLayer
from fedsim.models.norms.placement import replace


@pytest.mark.parametrize(("backbone", "size", "channels"), [("digits-cnn-bn", 28, 1), ("densenet121", 32, 3)])
@pytest.mark.parametrize(("insert", "layer", "hook"), [
    (FeatureHighlighter, Highlighter, "keep"), (Adapters, Adapter, "after"),
    (MixStyle, MixStyleLayer, "after"), (StyleExploration, StyleLayer, "after"),
])  # fmt: skip
def test_a_rule_calls_every_hook_as_often_as_eval_mode(
    build, monkeypatch, insert, layer, hook, backbone, size, channels
):
    calls, original = [], getattr(layer, hook)

    def counted(self, module, inputs, output):
        calls.append(output.shape[1:])
        return original(self, module, inputs, output)

    monkeypatch.setattr(layer, hook, counted)
    net = build(backbone, size=size, channels=channels)
    insert().apply(net)
    images = torch.rand(2, channels, size, size)
    net.eval()(images)
    plain = list(calls)
    calls.clear()
    with torch.no_grad():
        MixNorm().begin(net, tuple)(images)
    assert calls == plain != []


@pytest.mark.parametrize("before", [False, True])
def test_hooks_move_with_their_options_and_handles(before):
    """To the new layer alone, which may call the old one itself; a handle that was given out still removes its own."""
    net, calls = nn.Sequential(nn.BatchNorm2d(2)), []
    if before:
        handle = net[0].register_forward_pre_hook(lambda *given: calls.append(len(given)), with_kwargs=True)
    else:
        handle = net[0].register_forward_hook(lambda *given: calls.append(len(given)), with_kwargs=True,
                                              always_call=True)  # fmt: skip
    old = net[0]
    replace(net, ["0"], nn.Sequential)
    net(torch.rand(2, 2, 3, 3))
    assert calls == [3 if before else 4]
    assert not {**old._forward_hooks, **old._forward_pre_hooks}
    assert bool(net[0]._forward_hooks_always_called) != before
    handle.remove()
    net(torch.rand(2, 2, 3, 3))
    assert len(calls) == 1


def test_a_run_with_hooks_and_a_rule(tmp_path):
    """StableFDG's highlighter needs the map that the hook keeps."""
    method = {"name": "stablefdg", "infer": "mix_norm"}
    folder, _ = run_small(small_experiment(tmp_path, method, train={"rounds": 1}))
    assert np.isfinite(numbers(folder / "rounds.csv")["target_loss"]).all()
