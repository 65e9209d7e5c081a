"""PLAN: the prompts of every client in all layers of both encoders, their aggregators, and the two stages."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_texts import NAMES, build, fitted
from torch import nn

from clients.terms.prompt_stages import divergence
from fedsim.commands.contract import small_plan
from fedsim.models.inserts.prompt_sets import ROWS, Aggregator, PromptSets
from fedsim.run.workspace import Workspace


def prompted(part=None, clients=3):
    """The tiny CLIP with the prompts of so many clients."""
    return build(part or PromptSets(), clients=clients)


def simple_aggregator(layers=1):
    """Width 2: scores of 0, so that the attention is the mean of the clients; and an FFN of zeros."""
    made = Aggregator(2, layers, heads=1)
    for attention in made.attention:
        attention.in_proj_weight.data = torch.cat([torch.zeros(4, 2), torch.eye(2)])
        attention.out_proj.weight.data = torch.eye(2)
    for each in [p for name, p in made.named_parameters() if "bias" in name or "mlp" in name]:
        each.data.zero_()
    return made


@pytest.mark.parametrize("layers", [1, 2])
def test_aggregator_on_numbers(layers):
    """Layer 1: the clients (1, 3) and (5, 3) with their mean (3, 3) give (4, 6) and (8, 6), after LN (-1, 1) and
    (1, -1), with the mean (0, 0). Layer 2: (1, 3) and (2, 8) give (2.5, 8.5) and (3.5, 13.5), both (-1, 1)."""
    rows = torch.tensor([[[[1.0, 3]], [[1.0, 3]]], [[[5.0, 3]], [[2.0, 8]]]])  # [K, D, n, d] = [2, 2, 1, 2]
    found = simple_aggregator(layers)(rows)
    assert torch.allclose(found, torch.tensor([[[0.0, 0]], [[-1.0, 1]]]), atol=1e-4)
    made, drawn = Aggregator(8, 1, 2), torch.randn(4, 3, 2, 8)
    assert torch.allclose(made(drawn), made(drawn.flip(0)), atol=1e-5)


def test_aggregator_with_its_ffn_on_numbers():
    """One client (1, 3): x = LN(2, 6) = (-1, 1). W1 takes x_2 - x_1 = 2 and W2 adds it to x_1: (1, 1) -> LN (0, 0);
    with a second unit of 1 that is added to x_2: (1, 2) -> (-1, 1)."""
    made, rows = simple_aggregator(), torch.tensor([[[[1.0, 3]]]])
    first, _, second = made.mlp[0]
    first.weight.data[0] = torch.tensor([-1.0, 1])
    second.weight.data[0, 0] = 1.0
    assert torch.allclose(made(rows), torch.zeros(1, 1, 2), atol=1e-4)
    first.bias.data[1] = second.weight.data[1, 1] = 1.0
    assert torch.allclose(made(rows), torch.tensor([[[-1.0, 1]]]), atol=1e-4)


def test_numbers_of_released_aggregators_and_divergence():
    """p = (3/4, 1/4), q = (1/2, 1/2): 3/4 log 3/2 + 1/4 log 1/2."""
    with torch.device("meta"):
        found = [sum(p.numel() for p in Aggregator(d, 12, 8).parameters()) for d in (512, 768)]
    assert found == [25_210_880, 56_690_688]
    p = torch.tensor([[0.75, 0.25]]).log()
    assert divergence(p, torch.zeros(1, 2)).item() == pytest.approx(0.130812, abs=1e-6)
    assert divergence(p, p + 5).item() == pytest.approx(0, abs=1e-6)


class Seen(nn.Module):
    """A block for tests, which keeps its input."""

    def forward(self, x, mask=None):
        self.x = x
        return x + 1


def test_prompts_stand_in_every_layer():
    """Images: behind the patches, and gone after the last layer. Texts: behind the start."""
    net = prompted(PromptSets(n=2))
    sets, tower, encoder = net.prompts.train(), net.backbone.transformer, net.head.encoder
    for transformer in (tower, encoder.transformer):
        for layer, block in enumerate(transformer.blocks):
            hooks, transformer.blocks[layer] = block._forward_pre_hooks, Seen()
            transformer.blocks[layer]._forward_pre_hooks = hooks
    sets.client = 1
    x = torch.randn(4, 5, 32)
    out = tower(x)
    for layer, block in enumerate(tower.blocks):
        assert torch.equal(block.x[:, :5], x + layer)
        assert torch.equal(block.x[:, 5:], sets.vision[1, layer].expand(4, 2, 32))
    assert torch.allclose(out, x + 2)
    net.head.read_with(sets.text[1])
    first, second = (block.x for block in encoder.transformer.blocks)
    assert first.shape == (len(NAMES), 1 + 2 + net.head.tails.shape[1], 32)
    assert torch.equal(first[:, 1:3], (sets.text[1, 0] + encoder.positions[1:3]).expand(3, 2, 32))
    assert torch.equal(second[:, 1:3], sets.text[1, 1].expand(3, 2, 32))
    assert torch.equal(second[:, 3:], first[:, 3:] + 1)


@pytest.mark.parametrize("number", [1, 3])
def test_the_loss_of_the_first_stage(tmp_path, number):
    """Round 1: the teacher is zero-shot CLIP. Round 3: the received aggregated prompts. By autograd on CE + KL."""
    changes = ["train.iterations=1", "train.momentum=0", "method.prompt_stages.c=0.5"]
    space = Workspace(small_plan("plan", tmp_path, changes))
    start, (batch,), sent = fitted(space, "rot15", number)
    net, head = space.net.eval(), space.net.head
    net.load_state_dict(start, strict=False)
    with torch.no_grad(), net.prompts.holding(None) if number == 1 else nullcontext():
        features = net.features(batch.images)  # in eval mode with the aggregated prompts, if any
        teacher = head.logits(features, head.zero_shot) if number == 1 else head(features)
    net.prompts.training, net.prompts.client = True, 1
    logits = net(batch.images)
    loss = F.cross_entropy(logits, batch.labels)
    loss = loss + 0.5 * F.kl_div(logits.log_softmax(1), teacher.softmax(1), reduction="batchmean")
    gradients = torch.autograd.grad(loss, [net.get_parameter(name) for name in ROWS])
    for name, gradient in zip(ROWS, gradients):
        assert gradient[1].abs().sum() > 0
        assert np.allclose(sent[name], start[name] - 0.05 * gradient, atol=1e-6)
    assert all(np.array_equal(sent[name], value) for name, value in start.items() if name not in ROWS)


def test_a_round_that_failed_leaves_no_stage_behind(tmp_path, monkeypatch):
    """Clients share the network: after a failure in the stage of the prompts, another client trains aggregators.

    Gradients of 0, which a proximal term has where nothing moves, do not expose the other stage to the decay.
    """
    space = Workspace(small_plan("plan+fedprox", tmp_path, ["train.iterations=2", "train.weight_decay=0.01"]))
    trained = [parameter.requires_grad for parameter in space.net.parameters()]
    monkeypatch.setattr(space.client("rot0", "").data, "batch", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fitted(space, "rot0")
    start, _, sent = fitted(space, "rot15", 2)
    moved = {name for name, array in sent.items() if not np.array_equal(array, start[name])}
    assert moved - set(ROWS) == moved != set()
    assert [parameter.requires_grad for parameter in space.net.parameters()] == trained
