"""FedAPT: learned vectors that a key of each client scales, and a query that mixes the keys for an unknown image."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_texts import fitted, simple_texts

from clients.parts import Batch
from clients.terms.query_loss import QueryLoss
from fedsim.commands.contract import small_plan
from fedsim.models.inserts import keyed_prompts
from fedsim.models.inserts.keyed_prompts import KeyedPromptHead, key_weights
from fedsim.run.workspace import Workspace

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


@pytest.mark.parametrize(("client", "expected"), [(0, [8.320503, 2.425356]), (1, [6.0, 1.643990])])
def test_logits_of_a_client_that_trains_on_numbers(client, expected):
    """Client 0 has V (1 + kappa) = (0, 2): the means are along (3, 2), (1, 4). Client 1 has (0, 4): (3, 4), (1, 6)."""
    head = simple_head().train()
    head.key = head.keys[client]
    assert torch.allclose(head(torch.tensor([[2.0, 0]])), torch.tensor([expected]), atol=1e-5)


@pytest.mark.parametrize("at_once", [1024, 2])
def test_logits_of_unknown_images_on_numbers(monkeypatch, at_once):
    """The weights are (1/4, 3/4) and (3/4, 1/4): V is (0, 3.5) for the first image and (0, 2.5) for the second."""
    monkeypatch.setattr(keyed_prompts, "AT_ONCE", at_once)
    head, f = simple_head(), torch.tensor([[2.0, 0], [-2, 0]])
    expected = torch.tensor([[6.507914, 1.788854], [-7.682213, -2.169305]])
    assert torch.allclose(head(f), expected, atol=1e-5)  # no client is chosen
    head.key = head.keys[0]
    assert torch.allclose(head.eval()(f), expected, atol=1e-5)  # validation during the training of a client


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
