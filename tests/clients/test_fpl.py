"""FPL's client: its losses, and the prototypes that it sends."""

import numpy as np
import pytest
import torch
from small_round import digits_net, ready_round

from clients.budget import fedavg_amount
from clients.parts import Batch
from clients.step.supervised import SupervisedStep
from clients.terms.prototype_contrast import PrototypeContrast, cpcl, upcr
from fedsim.settings import TrainSettings


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


def test_upcr_numbers():
    """Mean .25, sum .5; nothing for a class without prototypes."""
    features, unbiased = matrix((1, 0), (1, 0)), matrix((0.5, 0.5), (0, 0))
    known, labels = torch.tensor([True, False]), torch.tensor([0, 1])
    assert upcr(features, labels, unbiased, known).tolist() == [0.25, 0]
    assert upcr(features, labels, unbiased, known, "sum").tolist() == [0.5, 0]


def test_samples_without_prototypes():
    """One matched sample of four adds a quarter of its loss; the others have no gradient, and none is NaN."""
    features, labels = matrix((1, 0), (0, 1), (2, 1), (1, 1)).requires_grad_(), torch.tensor([0, 2, 2, 2])
    losses = cpcl(features, labels, matrix((1, 0), (-1, 0)), torch.tensor([0, 1]), 0.5)
    assert losses[1:].tolist() == [0, 0, 0]
    losses.mean().backward()
    assert features.grad.isfinite().all()
    assert features.grad[1:].abs().max() == 0


def small(record=None, images=10, **train):
    """A round on the digits CNN, ready to begin."""
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
