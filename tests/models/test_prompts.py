"""PromptFL's, FedAPT's and PLAN's vectors in the texts of class names, on a tiny CLIP and on numbers by hand."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_texts import NAMES, build, fitted, simple_texts
from torch import nn

from clients.parts import Batch
from clients.terms.prompt_stages import divergence
from clients.terms.query_loss import QueryLoss
from fedsim.common.errors import UserError
from fedsim.models.inserts import keyed_prompts
from fedsim.models.inserts.keyed_prompts import KeyedPromptHead, KeyedPrompts, key_weights
from fedsim.models.inserts.learned_prompts import LearnedPrompts, PromptHead
from fedsim.models.inserts.prompt_sets import ROWS, Aggregator, PromptSets
from fedsim.models.tiny_clip import FIRST, TOKENS, tokens_of
from fedsim.runs.workspace import Workspace
from fedsim.testing.contract import small_plan


def test_tokens_and_names_of_several_lengths():
    """al = 10 * 36 + 21, m = 22, ff = 15 * 36 + 15, zz = 35 * 36 + 35; the bytes of é are 195 and 169, that of
    . 46. The class 3 4 has the mean of (1, 0), (0, 1), (2, 0), (0, 2) and the end; the other's padding has no
    effect."""
    found = tokens_of("Alm ff1 é zz.")
    assert [number - FIRST for number in found] == [381, 22, 555, 1, 36 + 195, 36 + 169, 1295, 36 + 46]
    assert tokens_of("zz") == [TOKENS - 1]
    head, expected = PromptHead(simple_texts(((3,), (3, 4))), torch.tensor([[0.0, 1]])), [9.486833, 7.071068]
    assert torch.allclose(head(torch.tensor([[2.0, 0]])), torch.tensor([expected]), atol=1e-5)
    head.tails[0, 2:] = 100.0
    assert torch.allclose(head(torch.tensor([[2.0, 0]])), torch.tensor([expected]), atol=1e-5)


@pytest.mark.parametrize(("context", "expected"), [
    ([[0.0, 1]], [9.486833, 3.162278]), ([[0.0, 5]], [5.144958, 1.414214]),
    ([[[0.0, 1]], [[0.0, 5]]], [9.486833, 1.414214]),  # a class with its own vectors
])  # fmt: skip
def test_logits_on_numbers(context, expected):
    """[start, V, name, end] with V = (0, 1): means along (3, 1), (1, 3), or (0, 5): (3, 5), (1, 7). f gives 10 cos."""
    head = PromptHead(simple_texts(), torch.tensor([[0.0, 1]]))
    head.context.data = torch.tensor(context)
    assert torch.allclose(head(torch.tensor([[2.0, 0]])), torch.tensor([expected]), atol=1e-5)


@pytest.mark.parametrize(("part", "model", "message"), [
    (LearnedPrompts(L=60), {}, r"learned_prompts.L: with 60 tokens .* 69 tokens .* tiny-clip reads 48"),
    (LearnedPrompts(init="template"), {"prompt": "{}"}, "no word in front of the name"),
    (LearnedPrompts(), {"head": "linear"}, r"insert learned_prompts: .* set model.head = 'text'"),
    (LearnedPrompts(), {"prompt": "a photo of a dog{}"}, "begins inside a token; put a space"),
    (KeyedPrompts(L=60), {"clients": 3}, r"keyed_prompts.L: with 60 tokens .* tiny-clip reads 48"),
    (PromptSets(heads=5), {"clients": 3}, "5 does not divide the encoder's width of 32"),
    (None, {"names": ("dog", "Alarm_Clock", "alarm clock")},
     r"^model.head = 'text': the classes 'Alarm_Clock' and 'alarm clock' are the same text for tiny-clip; give"),
])  # fmt: skip
def test_parts_that_do_not_fit(part, model, message):
    with pytest.raises(UserError, match=message):
        build(part, **model)


ONE_THIRD = 2**0.5 / np.log(3)  # the temperature at which two different scores give the weights 1/4 and 3/4


def simple_head():
    """V = (0, 1) for both classes, the keys (0, 1) and (0, 3), Q f = (0, f_1)."""
    keys = torch.tensor([[[0.0, 1]], [[0.0, 3]]])
    head = KeyedPromptHead(simple_texts(), torch.tensor([[[0.0, 1]], [[0.0, 1]]]), keys, 2, ONE_THIRD)
    head.query.weight.data = torch.tensor([[0.0, 0], [1, 0]])
    return head


@pytest.mark.parametrize(("scores", "temperature", "expected"), [
    ([1.0, 2, 4], 1.0, [0.099483, 0.191452, 0.709065]), ([1.0, 2, 4], 0.01, [0.0, 0, 1]),
    ([0.0] * 4, 0.01, [0.25] * 4), ([7.0], 0.01, [1.0]),
])  # fmt: skip
def test_weights_on_numbers(scores, temperature, expected):
    """The first are the softmax of (-0.872872, -0.218218, 1.091089); equal scores and one client have equal weights."""
    found = key_weights(torch.tensor([scores]), temperature)
    assert torch.allclose(found, torch.tensor([expected]), atol=1e-6)


@pytest.mark.parametrize("at_once", [1024, 2])
def test_logits_of_unknown_images_and_of_a_client_that_trains_on_numbers(monkeypatch, at_once):
    """The weights are (1/4, 3/4) and (3/4, 1/4): V is (0, 3.5) for the first image and (0, 2.5) for the second.
    Client 0 has V (1 + kappa) = (0, 2): the means are along (3, 2), (1, 4). Client 1 has (0, 4): (3, 4), (1, 6)."""
    monkeypatch.setattr(keyed_prompts, "AT_ONCE", at_once)
    head, f = simple_head(), torch.tensor([[2.0, 0], [-2, 0]])
    expected = torch.tensor([[6.507914, 1.788854], [-7.682213, -2.169305]])
    assert torch.allclose(head(f), expected, atol=1e-5)  # no client is chosen
    head.key = head.keys[0]
    assert torch.allclose(head.eval()(f), expected, atol=1e-5)  # validation during the training of a client
    head.train()
    for client, own in enumerate(([8.320503, 2.425356], [6.0, 1.643990])):
        head.key = head.keys[client]
        assert torch.allclose(head(f[:1]), torch.tensor([own]), atol=1e-5)


def test_the_loss_of_the_query_on_numbers():
    """Scores (0, 2): log(1 + e^2) as client 0, log(1 + e^-2) as client 1. Half of it with the weight 0.5."""
    head = simple_head()
    round = SimpleNamespace(net=SimpleNamespace(head=head), tally=lambda *_: None, autocast=torch.no_grad)
    batch = Batch(None, torch.tensor([1]), features=torch.tensor([[2.0, 0]]))
    for round.index, expected in ((0, 2.126928), (1, 0.126928)):
        assert QueryLoss(0.5).begin(round)(batch).item() == pytest.approx(expected / 2, abs=1e-6)
        assert torch.equal(head.key, head.keys[round.index])
        QueryLoss().end(round)
        assert head.key is None
    assert QueryLoss(0.0).begin(round) is None
    assert torch.equal(head.key, head.keys[1])


def test_a_round_of_a_client_is_cross_entropy_with_its_own_key(tmp_path):
    """The first step of client 1 (of the domains rot0, rot15, rot30), by autograd on the two losses."""
    space = Workspace(small_plan("fedapt", tmp_path, ["train.iterations=1", "train.momentum=0"]))
    start, (batch,), sent = fitted(space, "rot15")
    head, names = space.net.head, ["head.context", "head.query.weight"]
    assert (list(sent), head.key) == (names, None)
    with torch.no_grad():
        head.context.copy_(start[names[0]])
        head.query.weight.copy_(start[names[1]])
        features = space.net.features(batch.images)
    texts = head.read(head.context + head.context * head.keys[1])
    loss = F.cross_entropy(head.scale * F.normalize(features, dim=1) @ texts.T, batch.labels)
    loss = loss + F.cross_entropy(features @ head.query.weight.T, torch.ones_like(batch.labels))
    for name, gradient in zip(names, torch.autograd.grad(loss, [head.context, head.query.weight])):
        assert np.allclose(sent[name], start[name] - 0.05 * gradient, atol=1e-6)


def prompted(part=None, clients=3):
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


def test_aggregators_on_numbers_and_as_released():
    """One client (1, 3): x = LN(2, 6) = (-1, 1). W1 takes x_2 - x_1 = 2 and W2 adds it to x_1: (1, 1) -> LN (0, 0);
    with a second unit of 1 that is added to x_2: (1, 2) -> (-1, 1). p = (3/4, 1/4), q = (1/2, 1/2): 3/4 log 3/2 + 1/4
    log 1/2."""
    made, rows = simple_aggregator(), torch.tensor([[[[1.0, 3]]]])
    first, _, second = made.mlp[0]
    first.weight.data[0] = torch.tensor([-1.0, 1])
    second.weight.data[0, 0] = 1.0
    assert torch.allclose(made(rows), torch.zeros(1, 1, 2), atol=1e-4)
    first.bias.data[1] = second.weight.data[1, 1] = 1.0
    assert torch.allclose(made(rows), torch.tensor([[[-1.0, 1]]]), atol=1e-4)
    with torch.device("meta"):
        found = [sum(p.numel() for p in Aggregator(d, 12, 8).parameters()) for d in (512, 768)]
    assert found == [25_210_880, 56_690_688]
    p = torch.tensor([[0.75, 0.25]]).log()
    assert divergence(p, torch.zeros(1, 2)).item() == pytest.approx(0.130812, abs=1e-6)
    assert divergence(p, p + 5).item() == pytest.approx(0, abs=1e-6)


class Seen(nn.Module):
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
    with torch.no_grad(), net.prompts.holding("vision", None) if number == 1 else nullcontext():
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
    Gradients of 0, which a proximal term has where nothing moves, do not expose the other stage to the decay."""
    space = Workspace(small_plan("plan+fedprox", tmp_path, ["train.iterations=2", "train.weight_decay=0.01"]))
    trained = [parameter.requires_grad for parameter in space.net.parameters()]
    monkeypatch.setattr(space.client("rot0", "").data, "batch", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fitted(space, "rot0")
    start, _, sent = fitted(space, "rot15", 2)
    moved = {name for name, array in sent.items() if not np.array_equal(array, start[name])}
    assert moved - set(ROWS) == moved != set()
    assert [parameter.requires_grad for parameter in space.net.parameters()] == trained
