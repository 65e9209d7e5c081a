"""COPA, with the heads of other clients; SFA, with noise on features; FPL, with prototypes."""

import math

import numpy as np
import pytest
import torch
from small_round import Scaled, digits_net, ready_round, small_round
from torch import nn

from clients.budget import fedavg_amount
from clients.parts import Batch
from clients.step.supervised import SupervisedStep
from clients.terms.feature_augmentation import MOMENTS, ClassMoments, FeatureAugmentation
from clients.terms.other_heads import OtherHeads
from clients.terms.prototype_contrast import PrototypeContrast, cpcl, upcr
from fedsim.models.infer.ensemble import EnsembleOfHeads
from fedsim.settings import TrainSettings
from strategies.banks.heads import Heads
from strategies.parts import ServerRound, Update


def head_of(*probabilities):
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


def test_ensemble_and_bank_of_heads():
    """The mean of (.6, .4), (.2, .8), (.1, .9) is (.3, .7); without heads the network's own. 3 (512 * 7 + 7) = 10,773
    scalars; the global model's head replaces that of a client without a reply."""
    net, x = scaled(0.5, 0.5), torch.ones(1, 1)
    uploads = [{"head.weight": torch.tensor(head_of(*p))} for p in ((0.6, 0.4), (0.2, 0.8), (0.1, 0.9))]
    with torch.no_grad():
        assert EnsembleOfHeads().begin(net, tuple, uploads)(x).exp()[0].tolist() == pytest.approx([0.3, 0.7])
        assert EnsembleOfHeads().begin(net, tuple)(x).softmax(1)[0].tolist() == [0.5, 0.5]
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


def test_no_noise_and_features_that_are_written_over(net):
    """sigma = 0 gives exactly (1 + lam) CE; a CUDA graph gives every step's features in the same memory."""
    batch = batch_of(net, torch.randn(6, 4))
    term = FeatureAugmentation("s", 0.0, 0.0, lam=0.7).begin(small_round(net=net, steps=1))
    assert term(batch).item() == pytest.approx(0.7 * batch.loss.item(), rel=1e-6)
    assert FeatureAugmentation(lam=0.0).begin(small_round(net=net)) is None
    round, z = small_round(net=net, steps=1), torch.ones(6, 4)
    term = FeatureAugmentation("a").begin(round)
    for value in (1.0, 3.0):
        term(batch_of(net, z.fill_(value)))
    assert round.scratch[MOMENTS].merged(None)["sum"].tolist() == [[2 * 1.0 + 2 * 3.0] * 4] * 3


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


def test_covariances_of_all_rounds_by_hand(net):
    """Class 0 has the feature 0 in round 1 and 2 in round 2: the variance of round 2 alone is 0, that of both is 1."""
    stored = {}
    for estimate in ("round", "all"):
        part = FeatureAugmentation("a", estimate=estimate)
        store = None
        for number, value in ((1, 0.0), (2, 2.0)):
            round = small_round(net=net, steps=1, round=number, **({"store": store} if store else {}))
            if store:
                store.open_round(number)
            part.begin(round)(batch_of(net, torch.full((6, 4), value), torch.zeros(6, dtype=torch.int64)))
            part.end(round)
            store = round.store
            store.commit()
        stored[estimate] = store.get(MOMENTS)
    variances = {}
    for estimate, moments in stored.items():
        mean = moments["sum"][0, 0] / moments["count"][0]
        variances[estimate] = (moments["square"][0, 0, 0] / moments["count"][0] - mean**2).item()
    assert variances == pytest.approx({"round": 0.0, "all": 1.0})
    assert [stored[name]["count"][0].item() for name in ("round", "all")] == [6, 12]


def matrix(*rows):
    return torch.tensor(rows, dtype=torch.float32)


PROTOS, CLASSES = ((1, 0), (0, 1), (-1, 0)), (0, 0, 1)


@pytest.mark.parametrize(("feature", "protos", "classes", "tau", "loss"), [
    ((1, 0), PROTOS, CLASSES, 1, 0.094344), ((1, 0), PROTOS, CLASSES, 0.5, 0.016004),
    ((5, 0), ((2, 0), (0, 3), (-7, 0)), CLASSES, 0.5, 0.016004),  # lengths do not matter
    ((-1, 0), ((1, 0), (-1, 0)), (0, 1), 0.02, 100.0),  # exponents of 50 stay finite
    ((3, 4), ((1, 0), (0, 1)), (0, 0), 0.5, 0),  # one class alone
    ((0, 0), PROTOS, CLASSES, 1, np.log(3 / 2)),  # a zero feature
])  # fmt: skip
def test_cpcl_numbers(feature, protos, classes, tau, loss):
    found = cpcl(matrix(feature), torch.tensor([0]), matrix(*protos), torch.tensor(classes), tau)
    assert found.item() == pytest.approx(loss, abs=1e-6)


def test_samples_with_and_without_prototypes():
    """Mean .25, sum .5, and nothing without prototypes, where gradients are 0 and never NaN."""
    features, unbiased = matrix((1, 0), (1, 0)), matrix((0.5, 0.5), (0, 0))
    known, labels = torch.tensor([True, False]), torch.tensor([0, 1])
    assert upcr(features, labels, unbiased, known).tolist() == [0.25, 0]
    assert upcr(features, labels, unbiased, known, "sum").tolist() == [0.5, 0]
    features, labels = matrix((1, 0), (0, 1), (2, 1), (1, 1)).requires_grad_(), torch.tensor([0, 2, 2, 2])
    losses = cpcl(features, labels, matrix((1, 0), (-1, 0)), torch.tensor([0, 1]), 0.5)
    assert losses[1:].tolist() == [0, 0, 0]
    losses.mean().backward()
    assert features.grad.isfinite().all()
    assert features.grad[1:].abs().max() == 0


def small(record=None, images=10, **train):
    settings = TrainSettings(batch_size=4, **train)
    epoch = fedavg_amount(images, settings.model_copy(update={"epochs": 1}))
    steps = int(settings.epochs * epoch.steps)
    return ready_round(digits_net(), {"prototypes": record or {}}, images, train=settings, steps=steps)


def test_term_of_a_batch():
    """It is the sum of both losses, with U^c the plain mean of the clusters of c; the extractor has gradients."""
    protos, classes = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32), np.array([0, 0, 1])
    round = small({"cluster_protos": protos, "classes": classes})
    term, batch = PrototypeContrast(tau=0.5).begin(round), Batch(torch.rand(4, 3, 16, 16), torch.tensor([0, 1, 2, 0]))
    round.forward(batch)
    protos, classes = torch.tensor(protos), torch.tensor(classes)
    unbiased = torch.stack([protos[:2].mean(0), protos[2], torch.zeros(50)])
    wanted = cpcl(batch.features, batch.labels, protos, classes, 0.5)
    wanted = wanted + upcr(batch.features, batch.labels, unbiased, torch.tensor([True, True, False]))
    loss = term(batch)
    assert loss.item() == pytest.approx(wanted.sum().item() / 4, rel=1e-5)
    loss.backward()
    assert round.net.head.weight.grad is None
    assert round.net.backbone.conv1.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("source", ["last_epoch", "final_pass"])
def test_local_prototypes(source):
    """Means per class of the last epoch's features as they were trained on, or of the trained model in eval mode."""
    round, part = small(epochs=2), PrototypeContrast(proto_source=source)
    round.terms = [part.begin(round)]
    step, seen = SupervisedStep().begin(round), []
    for positions in [np.arange(4), np.arange(4, 8), np.arange(8, 10)] * 2:
        batch = round.data.batch(positions)
        step(batch)
        seen.append((batch.features.detach(), batch.labels))
    part.end(round)
    assert round.net.backbone.norm1.training
    features, labels = (torch.cat(parts) for parts in zip(*seen[3:], strict=True))
    if source == "final_pass":
        images, labels = next(round.data.evaluation(np.arange(10), 10))
        features = round.net.eval().features(images).detach()
    sent = round.outbox["prototypes"]
    assert sent["classes"].tolist() == [0, 1, 2]
    for label in range(3):
        assert sent["protos"][label] == pytest.approx(features[labels == label].mean(0).numpy(), abs=1e-5)


@pytest.mark.parametrize(("source", "least", "expected"), [
    ("final_pass", 1, [0, 2]), ("final_pass", 2, [0]), ("final_pass", 5, []), ("last_epoch", 2, [0]),
])  # fmt: skip
def test_small_and_missing_classes_send_nothing(source, least, expected):
    """No entry for a class with fewer images than asked for, however often the last epoch shows its one image."""
    round, part = small(images=4), PrototypeContrast(min_per_proto=least, proto_source=source)
    round.data.labels = torch.tensor([0, 0, 0, 2])
    part.begin(round)
    if source == "last_epoch":
        round.scratch["prototypes"].add(torch.ones(6, 50), torch.tensor([0, 0, 0, 2, 2, 2]))
    part.end(round)
    assert round.outbox["prototypes"]["classes"].tolist() == expected
    assert round.outbox["prototypes"]["protos"].shape == (len(expected), 50)
    words = "that image's own feature" if least == 1 else f"at least {least} images"
    assert words in part.discloses
