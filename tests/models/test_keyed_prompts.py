"""FedAPT: learned vectors that a key of each client scales, and a query that mixes the keys for an unknown image."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_texts import IMAGES, NAMES, build, simple_texts

from clients.parts import Batch
from clients.terms.guiding_head import GuidingHead
from clients.terms.query_loss import QueryLoss
from fedsim.commands.contract import run_watched, small_plan
from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe
from fedsim.models.inserts import keyed_prompts
from fedsim.models.inserts.keyed_prompts import KeyedPromptHead, KeyedPrompts, key_weights
from fedsim.models.inserts.learned_prompts import PromptHead
from fedsim.run.workspace import Workspace
from fedsim.settings.experiment import Experiment

ONE_THIRD = 2**0.5 / np.log(3)  # the temperature at which two different scores give the weights 1/4 and 3/4


def simple_head():
    """V = (0, 1) for both classes, the keys (0, 1) and (0, 3), Q f = (0, f_1)."""
    keys = torch.tensor([[[0.0, 1]], [[0.0, 3]]])
    head = KeyedPromptHead(simple_texts(), torch.tensor([[[0.0, 1]], [[0.0, 1]]]), keys, 2, ONE_THIRD)
    head.query.weight.data = torch.tensor([[0.0, 0], [1, 0]])
    return head


def keyed(part=None, clients=3):
    """The tiny CLIP with keys for so many clients."""
    net = build()
    net.clients = clients
    torch.manual_seed(0)
    (part or KeyedPrompts()).apply(net)
    return net.eval()


def test_weights_on_numbers():
    scores = torch.tensor([[1.0, 2, 4]])
    assert torch.allclose(key_weights(scores, 1.0), torch.tensor([[0.099483, 0.191452, 0.709065]]), atol=1e-6)
    z = key_weights(scores, 1.0).log()
    assert torch.allclose(z - z.mean(), torch.tensor([[-0.872872, -0.218218, 1.091089]]), atol=1e-5)
    assert torch.allclose(key_weights(scores, 0.01), torch.tensor([[0.0, 0, 1]]), atol=1e-6)


def test_weights_of_equal_scores_and_of_one_client():
    assert torch.equal(key_weights(torch.zeros(2, 4), 0.01), torch.full((2, 4), 0.25))
    assert torch.equal(key_weights(torch.full((2, 1), 7.0), 0.01), torch.ones(2, 1))


def test_logits_of_a_client_that_trains_on_numbers():
    """Client 0 has V (1 + kappa) = (0, 2): the means are along (3, 2), (1, 4). Client 1 has (0, 4): (3, 4), (1, 6)."""
    head, f = simple_head().train(), torch.tensor([[2.0, 0]])
    for client, expected in ((0, [8.320503, 2.425356]), (1, [6.0, 1.643990])):
        head.key = head.keys[client]
        assert torch.allclose(head(f), torch.tensor([expected]), atol=1e-5)


@pytest.mark.parametrize("at_once", [1024, 2])
def test_logits_of_unknown_images_on_numbers(monkeypatch, at_once):
    """The weights are (1/4, 3/4) and (3/4, 1/4): V is (0, 3.5) for the first image and (0, 2.5) for the second."""
    monkeypatch.setattr(keyed_prompts, "AT_ONCE", at_once)
    head = simple_head()
    expected = torch.tensor([[6.507914, 1.788854], [-7.682213, -2.169305]])
    f = torch.tensor([[2.0, 0], [-2, 0]])
    assert torch.allclose(head(f), expected, atol=1e-5)  # no client is chosen
    head.key = head.keys[0]
    assert torch.allclose(head.eval()(f), expected, atol=1e-5)  # validation during the training of a client


def test_keys_of_zero_are_promptfl():
    net = keyed()
    net.head.keys.zero_()
    plain = PromptHead(build().head.texts(), net.head.context.detach().clone())
    with torch.no_grad():
        features = net.features(IMAGES)
        assert torch.allclose(net(IMAGES), plain(features), atol=1e-5)
        net.head.train().key = net.head.keys[1]
        assert torch.allclose(net.head(features), plain(features), atol=1e-5)


def test_the_loss_of_the_query_on_numbers():
    """Scores (0, 2): log(1 + e^2) as client 0, log(1 + e^-2) as client 1. Half of it with the weight 0.5."""
    round = type("Round", (), {"net": type("Net", (), {"head": simple_head()})(), "tally": lambda *_: None})()
    round.autocast = torch.no_grad
    batch = Batch(None, torch.tensor([1]), features=torch.tensor([[2.0, 0]]))
    for client, expected in ((0, 2.126928), (1, 0.126928)):
        round.index = client
        assert QueryLoss(0.5).begin(round)(batch).item() == pytest.approx(expected / 2, abs=1e-6)
        assert torch.equal(round.net.head.key, round.net.head.keys[client])
        QueryLoss().end(round)
        assert round.net.head.key is None
    assert QueryLoss(0.0).begin(round) is None
    assert torch.equal(round.net.head.key, round.net.head.keys[1])


def test_shapes_keys_and_what_is_frozen():
    net = keyed(KeyedPrompts(L=3), clients=5)
    head = net.head
    assert [tuple(each.shape) for each in (head.context, head.keys, head.query.weight)] == [
        (len(NAMES), 3, 32), (5, 3, 32), (5, 16)
    ]  # fmt: skip
    assert net.state_dict().keys() - net.frozen == {"head.context", "head.query.weight"}
    assert 0 <= head.keys.min() < 0.05 < 0.95 < head.keys.max() < 1
    assert torch.equal(keyed(KeyedPrompts(L=3), clients=5).head.keys, head.keys)


def test_a_round_of_a_client_is_cross_entropy_with_its_own_key(tmp_path):
    """The first step of client 1 (of the domains rot0, rot15, rot30), by autograd on the two losses."""
    plan = small_plan("fedapt", tmp_path, ["train.iterations=1", "train.momentum=0", "train.rounds=1"])
    space = Workspace(plan)
    client = space.client("rot15", "")
    names = [name for name, place in space.places.items() if place == "shared"]
    assert names == ["head.context", "head.query.weight"]
    start = [space.net.state_dict()[name].clone() for name in names]
    batches, of = [], client.data.batch
    client.data.batch = lambda *given: batches.append(of(*given)) or batches[-1]
    sent = client.fit([value.numpy() for value in start], {"client": "rot15", "phase": "train", "round": 1})[0]
    sent = [array.copy() for array in sent]  # they are views of the network
    head, batch = space.net.head, batches[0]
    assert head.key is None
    with torch.no_grad():
        head.context.copy_(start[0]), head.query.weight.copy_(start[1])
        features = space.net.features(batch.images)
    texts = head.read(head.context + head.context * head.keys[1])
    loss = F.cross_entropy(head.scale * F.normalize(features, dim=1) @ texts.T, batch.labels)
    loss = loss + F.cross_entropy(features @ head.query.weight.T, torch.ones_like(batch.labels))
    for value, gradient, new in zip(start, torch.autograd.grad(loss, [head.context, head.query.weight]), sent):
        assert np.allclose(new, value - 0.05 * gradient, atol=1e-6)


def test_every_client_of_a_domain_has_a_key(tmp_path):
    for clients in (1, 2):
        plan = small_plan("fedapt", tmp_path, [f"data.clients_per_domain={clients}"])
        assert len(plan.build_net().head.keys) == len(plan.clients) == 3 * clients


@pytest.mark.parametrize("pair", ["fedsam+fedapt", "fedomg+fedapt", "fedclip+fedapt", "feddyn+fedapt"])
def test_joins_other_methods(pair, tmp_path):
    changes = ["train.rounds=1", "train.iterations=3"]
    both, alone = (run_watched(small_plan(name, tmp_path / name, changes)) for name in (pair, "fedapt"))
    assert np.isfinite(both.rounds["target_loss"]).all()
    assert not np.array_equal(both.last["head.context"], alone.last["head.context"])
    assert "query_loss" in both.clients


def test_other_terms_begin_when_the_key_is_chosen():
    """The guiding head is a copy of the head; its texts are those of the client's own key."""
    recipe = build_recipe(Experiment(method={"name": "gfedavg+fedapt"}))
    assert [type(term) for term in recipe.terms] == [QueryLoss, GuidingHead]


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot both change that the texts"):
        small_plan("fedapt+promptfl", tmp_path)
    with pytest.raises(UserError, match="query_loss acts only beside keyed_prompts"):
        build_recipe(Experiment(method={"name": "promptfl", "add": ["query_loss"]}))
    with pytest.raises(UserError, match="pooled on one client"):
        small_plan("deepall+fedapt", tmp_path)
    with pytest.raises(UserError, match=r"keyed_prompts.L: with 60 tokens .* tiny-clip reads 48"):
        keyed(KeyedPrompts(L=60))
    recipe = build_recipe(Experiment(method={"name": "fedavg", "add": ["keyed_prompts"]}))
    assert recipe.terms == (QueryLoss(),)
