"""Inference rules that replace batch norm keep what inserts have hooked to these layers."""

import pytest
import torch
from networks import build
from torch import nn

from fedsim.models.infer import MixNorm
from fedsim.models.inserts.adapters import Adapter, Adapters
from fedsim.models.inserts.feature_highlighter import FeatureHighlighter, Highlighter
from fedsim.models.inserts.mixstyle import MixStyle, MixStyleLayer
from fedsim.models.inserts.style_exploration import StyleExploration, StyleLayer
from fedsim.models.norms.placement import replace


@pytest.mark.parametrize(("backbone", "size", "channels"), [("digits-cnn-bn", 28, 1), ("densenet121", 32, 3)])
def test_a_rule_calls_every_hook_as_often_as_eval_mode(monkeypatch, backbone, size, channels):
    calls = []

    def counted(layer, original):
        return lambda self, *given: calls.append((layer, given[2].shape[1:])) or original(self, *given)

    for layer, hook in ((Highlighter, "keep"), (Adapter, "after"), (MixStyleLayer, "after"), (StyleLayer, "after")):
        monkeypatch.setattr(layer, hook, counted(layer, getattr(layer, hook)))
    net, images = build(backbone, size=size, channels=channels).eval(), torch.rand(2, channels, size, size)
    for insert in (Adapters(), FeatureHighlighter(), MixStyle(), StyleExploration()):
        insert.apply(net)
    calls.clear()  # of the passes that find the sizes of maps
    with torch.no_grad():
        net.eval()(images)
        plain = list(calls)
        calls.clear()
        MixNorm().begin(net, tuple)(images)
    assert calls == plain
    assert {layer for layer, _ in calls} == {Highlighter, Adapter, MixStyleLayer, StyleLayer}


@pytest.mark.parametrize("before", [False, True])
def test_hooks_move_with_their_options_and_handles(before):
    """To the new layer alone, which may call the old one itself; a handle that was given out still removes its own."""
    net, calls = nn.Sequential(nn.BatchNorm2d(2)), []
    old, hook = net[0], lambda *given: calls.append(len(given))
    handle = (old.register_forward_pre_hook(hook, with_kwargs=True) if before
              else old.register_forward_hook(hook, with_kwargs=True, always_call=True))  # fmt: skip
    replace(net, ["0"], nn.Sequential)
    net(torch.rand(2, 2, 3, 3))
    assert calls == [3 if before else 4]
    assert not {**old._forward_hooks, **old._forward_pre_hooks}
    assert bool(net[0]._forward_hooks_always_called) != before
    handle.remove()
    net(torch.rand(2, 2, 3, 3))
    assert len(calls) == 1
