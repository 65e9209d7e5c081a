"""StableFDG's step: what it sends, trains on and leaves unchanged."""

import copy
import math

import numpy as np
import pytest
import torch
from small_round import CONFIG, changed, client_of, digits_net, fit, ready_round, snapshot, step_of
from support import small_experiment

from clients.objective.enlarged_batch import ClassBalanced, EnlargedBatch, own_style
from clients.step.supervised import SupervisedStep
from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe
from fedsim.methods.table import METHODS
from fedsim.models.inserts.feature_highlighter import FeatureHighlighter
from fedsim.models.inserts.style_exploration import StyleExploration
from fedsim.settings import TrainSettings

FOREIGN = {"style": np.tile(np.array([[3.0], [1.0], [0.1], [0.1]], np.float32), (1, 20))}


def network(highlighter=True, **values):
    """A small network with the layers, 20 channels in stage 1."""
    torch.manual_seed(0)
    net = digits_net(28)
    StyleExploration(**values).apply(net)
    if highlighter:
        FeatureHighlighter().apply(net)
    return net.train()


def round_of(net, images=8, record=FOREIGN, **values):
    return ready_round(net, {"feature_style": record}, images, 28, 0.05, steps=2, **values)


def taken(step, net, positions, record=FOREIGN, **values):
    """(batch after one step, its loss, the round)."""
    round = round_of(net, record=record, **values)
    batch = round.data.batch(np.array(positions))
    return batch, step_of(step, round)(batch).item(), round


def test_a_client_sends_the_style_of_all_its_images():
    """Worked out with NumPy from the maps after the second norm, in eval mode; no image is augmented."""
    net, seen = network(), []
    round = round_of(net, 7, train=TrainSettings(batch_size=3))
    found = own_style(round).numpy()
    hook = net.backbone.norm2.register_forward_hook(lambda module, inputs, y: seen.append(y.detach().double().numpy()))
    net.eval()(next(round.data.evaluation(round.data.training_positions(), 7))[0])
    hook.remove()
    mean, std = seen[0].mean((2, 3)), np.sqrt(seen[0].var((2, 3), ddof=1) + 1e-6)
    expected = [each.mean(0) for each in (mean, std)]
    expected += [np.sqrt(each.var(0, ddof=1) + 1e-6) for each in (mean, std)]
    assert found == pytest.approx(np.stack(expected), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_trains_on_the_enlarged_batch(precision):
    """Terms see its features and labels; every weight of the highlighter but that of the values gets a gradient."""
    net = network(p=1.0)
    batch, loss, round = taken(EnlargedBatch(sharing=1.0), net, range(6), train=TrainSettings(precision=precision))
    assert math.isfinite(loss)
    assert batch.labels.tolist()[:6] == [0, 1, 2, 0, 1, 2]
    assert batch.labels.bincount().tolist() == [4, 4, 4]
    assert (len(batch.features), len(batch.logits), len(batch.images)) == (12, 12, 6)
    gradient = net.bottleneck.project.weight.grad
    assert (gradient[:60].abs().sum((1, 2, 3)) > 0).all()
    assert not gradient[60:].any()
    assert round.outbox["feature_style"]["style"].shape == (4, 20)
    assert net.backbone.norm2.num_batches_tracked == 1


@pytest.mark.parametrize(("sharing", "record", "shared"), [(1.0, FOREIGN, True), (1.0, {}, False), (0.0, {}, False)])
def test_without_a_style_nothing_is_shared(sharing, record, shared):
    """Round 1, a client alone in its round, and `sharing = 0`, which sends nothing, give the plain step."""
    net = network(highlighter=False, p=0.0)
    plain = copy.deepcopy(net)
    _, loss, round = taken(EnlargedBatch(sharing=sharing), net, range(6), record)
    _, other, _ = taken(SupervisedStep(), plain, range(6))
    assert (loss != other) == shared == bool(changed(net, plain.state_dict()))
    assert ("feature_style" in round.outbox) == bool(sharing)


def test_the_class_balanced_batch_changes_nothing():
    """Weights, running statistics, counters and gradients are those before; maps and queries are of its images."""
    net = network()
    round = round_of(net)
    labels, before = round.data.labels.numpy(), snapshot(net)
    balanced = ClassBalanced(round, labels, 2.0, net.bottleneck, np.random.default_rng(0))
    balanced.draw(0)
    found = balanced.passed()
    assert not changed(net, before)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert found.labels.tolist() == [0, 1, 2]
    assert found.maps[1].shape[0] == len(found.queries) == 3
    images = balanced.images
    balanced.draw(1)
    assert balanced.images is images
    assert balanced.passed().maps[1].equal(found.maps[1])
    balanced.draw(2)  # the next local epoch
    assert balanced.images is not images


def test_partners_in_the_highlighter():
    """Two samples of one class get each other's query; alone in its class a sample gets that of the balanced batch."""
    net, seen = network(p=0.0), []
    paired = type(net.bottleneck).paired

    def spied(self, partners):
        return paired(self, lambda queries: seen.append((queries, partners(queries))) or seen[-1][1])

    net.bottleneck.paired = spied.__get__(net.bottleneck)
    taken(EnlargedBatch(sharing=0.0), net, [0, 1, 4])
    (balanced, same), (queries, partners) = seen
    assert same.equal(balanced)
    assert partners.equal(torch.stack([balanced[0], queries[2], queries[1]]))


@pytest.mark.parametrize("positions", [[0], [0, 1, 2]])
def test_a_client_with_one_class(positions):
    """It has no class-balanced batch, which would have one image; a batch of one image is its own partner."""
    round = round_of(network(p=1.0))
    round.data.labels = torch.zeros_like(round.data.labels)
    batch = round.data.batch(np.array(positions))
    assert math.isfinite(step_of(EnlargedBatch(), round)(batch).item())
    assert batch.labels.tolist() == [0] * 2 * len(positions)


def test_predictions_do_not_depend_on_the_bank_or_the_seed(tmp_path):
    """After a round, eval mode gives the logits of a network with the same weights that never met the step. The
    client counts with its own images."""
    client = client_of(tmp_path, METHODS["stablefdg"], method="stablefdg")
    fresh = copy.deepcopy(client.net)
    client.records = {"feature_style": FOREIGN}
    _, examples, _ = fit(client, CONFIG)
    assert examples == client.data.examples
    fresh.load_state_dict(client.net.state_dict())
    x = torch.rand(3, 1, 28, 28)
    torch.manual_seed(1)
    assert client.net.eval()(x).equal(fresh.eval()(x))


@pytest.mark.parametrize(("words", "reason"), [
    ({"name": "fisc+stablefdg"}, "style_contrast assumes that the rows of features"),
    ({"name": "stablefdg+jigen"}, "objective is enlarged_batch in one and jigsaw in the other"),
    ({"name": "fedavg", "add": ["style_exploration"]}, "style_exploration acts only beside enlarged_batch"),
    ({"name": "stablefdg+feddrop"}, "kept_scale .* not hold with feature_highlighter"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(words, reason):
    with pytest.raises(UserError, match=reason):
        build_recipe(small_experiment("unused", words))
