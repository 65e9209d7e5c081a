"""COPA, with the heads of other clients, and SFA, with noise on features."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_round import Scaled, ready_round, small_round, step_of
from torch import nn

from clients.parts import Batch
from clients.step.supervised import SupervisedStep
from clients.terms.feature_augmentation import MOMENTS, ClassMoments, FeatureAugmentation
from clients.terms.other_heads import OtherHeads
from clients.update.sharpness_aware import SharpnessAware
from fedsim.models.infer import EnsembleOfHeads
from strategies.banks.heads import Heads
from strategies.parts import ServerRound, Update


def head_of(*probabilities):
    """A head that gives these probabilities for the feature 1."""
    return np.log(np.array(probabilities, np.float32))[:, None]


def scaled(*probabilities):
    """A network that multiplies the features, and has a head with these probabilities."""
    return Scaled(torch.tensor(head_of(*probabilities)))


def test_loss_of_all_heads():
    """Own head .6, others .2 and .1: -log .6 - log .2 - log .1; the others' heads stay, f moves."""
    record = {  # this client's own entry is not used
        "a:head.weight": head_of(0.5, 0.5), "b:head.weight": head_of(0.2, 0.8), "c:head.weight": head_of(0.1, 0.9),
    }  # fmt: skip
    net, batch = scaled(0.6, 0.4), Batch(torch.ones(1, 1), torch.tensor([0]))
    round = ready_round(net, {"heads": record}, clients=("a", "b", "c"))
    round.terms = [OtherHeads().begin(round)]
    assert SupervisedStep().begin(round)(batch).item() == pytest.approx(4.422849, abs=1e-5)
    halves = OtherHeads(mean=True).begin(round)(batch).item()
    assert halves == pytest.approx(-(math.log(0.2) + math.log(0.1)) / 2, abs=1e-5)
    assert net.scale.item() != 1
    assert (record["b:head.weight"] == head_of(0.2, 0.8)).all()
    assert OtherHeads(weight=0.0).begin(round) is None


def test_ensemble_of_heads():
    """The mean of (.6, .4), (.2, .8), (.1, .9) is (.3, .7); without heads the network's own."""
    net, x = scaled(0.5, 0.5), torch.ones(1, 1)
    uploads = [{"head.weight": torch.tensor(head_of(*p))} for p in ((0.6, 0.4), (0.2, 0.8), (0.1, 0.9))]
    with torch.no_grad():
        assert EnsembleOfHeads().begin(net, tuple, uploads)(x).exp()[0].tolist() == pytest.approx([0.3, 0.7])
        assert EnsembleOfHeads().begin(net, tuple)(x).softmax(1)[0].tolist() == [0.5, 0.5]


def test_bank_hands_out_all_heads():
    """3 (512 * 7 + 7) = 10,773 scalars; the global model's head replaces that of a client without a reply."""
    initial = {"head.weight": np.zeros((7, 512), np.float32), "head.bias": np.zeros(7, np.float32)}
    server = ServerRound(1, 2, ["a", "b", "c"], {"backbone.x": np.ones(3, np.float32), **initial})
    own = {name: array + 1 for name, array in server.previous.items()}
    taken = Heads().gather(Update("b", 1, own), server)
    assert taken.keys() == initial.keys()
    handed = Heads().hand_out({"b": taken}, "a", server)
    assert sum(array.size for array in handed.values()) == 10_773
    assert [handed[f"{client}:head.weight"].max() for client in "abc"] == [0, 1, 0]


LABELS = torch.arange(6) % 3


def batch_of(net, features, labels=LABELS):
    """A batch after the forward pass."""
    batch = Batch(features, labels, features=features, logits=net.head(features))
    batch.loss = nn.functional.cross_entropy(batch.logits, labels)
    return batch


@pytest.fixture
def net():
    torch.manual_seed(0)
    net = nn.Module()
    net.head = nn.Linear(4, 3)
    return net


def seen_by(net, part, z, labels, **changes):
    """The features that come to the head in the term."""
    net.head, seen = nn.Identity(), []
    net.head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    part.begin(small_round(net=net, steps=1, **changes))(Batch(z, labels, features=z))
    return seen[0]


def test_without_noise_the_loss_is_counted_twice(net):
    """sigma = 0 gives exactly (1 + lam) CE; lam = 0 adds nothing."""
    batch = batch_of(net, torch.randn(6, 4))
    term = FeatureAugmentation("s", 0.0, 0.0, lam=0.7).begin(small_round(net=net, steps=1))
    assert term(batch).item() == pytest.approx(0.7 * batch.loss.item(), rel=1e-6)
    assert FeatureAugmentation(lam=0.0).begin(small_round(net=net)) is None


def test_a_batch_that_passes_twice_in_a_step_counts_once(net):
    """The second pass of a sharpness-aware step has features by weights that are nobody's."""
    part, round = FeatureAugmentation("a"), small_round(net=net, steps=1)
    round.optimizer, round.loss_of = torch.optim.SGD(net.parameters(), 0.1), part.begin(round)
    step, batch = step_of(SharpnessAware(), round), batch_of(net, torch.ones(6, 4))
    for _ in range(2):
        step(replace(batch, drawn={}))
    part.end(round)
    round.store.commit()
    round.store.open_round(2)
    assert round.store.get(MOMENTS)["count"].tolist() == [4, 4, 4]


def test_sfa_a_draws_from_the_class(net):
    """b ~ N(0, nu Sigma_y) after the warm-up, kept on the client; b = 0 in the warm-up round."""
    part, round = FeatureAugmentation("a", sigma1=0.0, nu=4.0), small_round(net=net, steps=1)
    z, labels = torch.randn(600, 4) * torch.tensor([1.0, 0.0, 2.0, 0.0]), torch.arange(600) % 3
    batch = batch_of(net, z, labels)
    assert part.begin(round)(batch).item() == pytest.approx(batch.loss.item(), rel=1e-6)
    part.end(round)
    round.store.commit()
    assert round.outbox == {}  # nothing more than FedAvg goes up
    round.store.open_round(2)
    noise = seen_by(net, part, z, labels, round=2, store=round.store) - z
    assert noise.std(0).tolist() == pytest.approx([2.0, 0.0, 4.0, 0.0], abs=0.3)
    kept, later = round.store.get(MOMENTS), ClassMoments(3)
    later.add(torch.ones(5, 4), torch.ones(5, dtype=torch.int64))
    assert kept["count"].tolist() == [200, 200, 200]
    assert later.merged(kept)["count"].tolist() == [200, 5, 200]  # seen classes are replaced, others stay


def test_features_that_the_next_pass_writes_over_are_kept_as_they_were(net):
    """A CUDA graph (train.compile = reduce-overhead) gives every step's features in the same memory."""
    round, z = small_round(net=net, steps=1), torch.ones(6, 4)
    term = FeatureAugmentation("a").begin(round)
    for value in (1.0, 3.0):
        term(batch_of(net, z.fill_(value)))
    assert round.scratch[MOMENTS].merged(None)["sum"].tolist() == [[2 * 1.0 + 2 * 3.0] * 4] * 3
