"""FPL's client: its losses, and what the method exchanges."""

import logging

import numpy as np
import pandas as pd
import pytest
import torch
from small_round import colour_images, small_data, small_round, step_of
from support import numbers, run_small, small_experiment

from clients.budget import fedavg_amount
from clients.optimizers import make_optimizer
from clients.parts import Batch
from clients.step.supervised import SupervisedStep
from clients.terms.prototype_contrast import SEEN, PrototypeContrast, cpcl, upcr
from clients.update.sharpness_aware import SharpnessAware
from fedsim.models import build_model
from fedsim.settings import ModelSettings, TrainSettings
from fedsim.tensors.arrays import record_to_arrays


def matrix(*rows):
    """A tensor float32 [n, d]."""
    return torch.tensor(rows, dtype=torch.float32)


def only(features, protos, classes, tau, label=0):
    """The CPCL loss of one sample."""
    return cpcl(matrix(features), torch.tensor([label]), matrix(*protos), torch.tensor(classes), tau).item()


def test_cpcl_numbers():
    """Two temperatures, lengths do not matter, and exponents of 50 stay finite."""
    protos, classes = ((1, 0), (0, 1), (-1, 0)), (0, 0, 1)
    assert only((1, 0), protos, classes, 1) == pytest.approx(0.094344, abs=1e-6)
    assert only((1, 0), protos, classes, 0.5) == pytest.approx(0.016004, abs=1e-6)
    assert only((5, 0), ((2, 0), (0, 3), (-7, 0)), classes, 0.5) == pytest.approx(0.016004, abs=1e-6)
    assert only((-1, 0), ((1, 0), (-1, 0)), (0, 1), 0.02) == pytest.approx(100.0)
    assert only((3, 4), ((1, 0), (0, 1)), (0, 0), 0.5) == 0  # one class alone
    assert only((0, 0), protos, classes, 1) == pytest.approx(np.log(3 / 2), abs=1e-6)  # a zero feature


def test_upcr_numbers():
    """Mean .25, sum .5; nothing for a class without prototypes."""
    features, unbiased = matrix((1, 0), (1, 0)), matrix((0.5, 0.5), (0, 0))
    known, labels = torch.tensor([True, False]), torch.tensor([0, 1])
    assert upcr(features, labels, unbiased, known).tolist() == [0.25, 0]
    assert upcr(features, labels, unbiased, known, "sum").tolist() == [0.5, 0]


def test_samples_without_prototypes():
    """One matched sample of four adds a quarter of its loss; the others have no gradient, and none is NaN."""
    features = matrix((1, 0), (0, 1), (2, 1), (1, 1)).requires_grad_()
    labels = torch.tensor([0, 2, 2, 2])
    losses = cpcl(features, labels, matrix((1, 0), (-1, 0)), torch.tensor([0, 1]), 0.5)
    assert losses[1:].tolist() == [0, 0, 0]
    losses.mean().backward()
    assert losses.mean().item() == pytest.approx(losses[0].item() / 4)
    assert features.grad.isfinite().all()
    assert features.grad[1:].abs().max() == 0


def small(record=None, images=10, **train):
    """A round on the digits CNN, ready to begin."""
    net = build_model(ModelSettings(backbone="digits-cnn-bn"), 3, 3, 16, None, 0)
    settings = TrainSettings(batch_size=4, **train)
    round = small_round(
        small_data(colour_images(images)), {"prototypes": record or {}}, net.train(), train=settings, lr=0.1
    )
    epoch = fedavg_amount(images, settings.model_copy(update={"epochs": 1}))
    round.steps = int(settings.epochs * epoch.steps)
    round.optimizer = make_optimizer(net, settings, 0.1)
    return round


def record_for(width, labels=(0, 0, 1)):
    """Prototypes as the server sends them."""
    protos = np.random.default_rng(0).normal(size=(len(labels), width)).astype(np.float32)
    return {"cluster_protos": protos, "classes": np.array(labels, np.int64)}


def test_term_of_a_batch():
    """It is the sum of both losses, with U^c the plain mean of the clusters of c; the extractor has gradients (T8)."""
    record = record_for(50)
    round = small(record)
    term = PrototypeContrast(tau=0.5).begin(round)
    batch = Batch(torch.rand(4, 3, 16, 16), torch.tensor([0, 1, 2, 0]))
    round.forward(batch)
    protos, classes = torch.tensor(record["cluster_protos"]), torch.tensor(record["classes"])
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
    round = small(epochs=2)
    part = PrototypeContrast(proto_source=source)
    round.terms = [part.begin(round)]
    step, seen = SupervisedStep().begin(round), []
    for positions in [np.arange(4), np.arange(4, 8), np.arange(8, 10)] * 2:
        batch = round.data.batch(positions)
        step(batch)
        seen.append((batch.features.detach(), batch.labels))
    assert round.steps == 6
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


def test_sharpness_aware_steps_count_the_first_pass():
    """The second pass sees the same images with weights that are nobody's."""
    round = small(images=4)
    batch = round.data.batch(np.arange(4))
    features = round.net.features(batch.images).detach()
    round.terms = [PrototypeContrast().begin(round)]
    step_of(SharpnessAware(0.5), round)(batch)
    means = round.scratch[SEEN]
    assert means.counts.sum() == 4
    assert means.sums.sum(0) == pytest.approx(features.sum(0).numpy(), abs=1e-5)
    assert (batch.features.detach().sum(0) - features.sum(0)).abs().max() > 1e-3


def test_small_and_missing_classes_send_nothing():
    """6.3: there is no entry for a class without images, nor for one with fewer images than the setting asks for."""
    round = small(images=4)
    round.data.labels = torch.tensor([0, 0, 0, 2])
    for least, expected in ((1, [0, 2]), (2, [0]), (5, [])):
        round.outbox.clear()
        part = PrototypeContrast(min_per_proto=least, proto_source="final_pass")
        part.begin(round)
        part.end(round)
        assert round.outbox["prototypes"]["classes"].tolist() == expected
        assert round.outbox["prototypes"]["protos"].shape == (len(expected), 50)
    assert "that image's own feature" in PrototypeContrast().discloses
    assert "at least 5 images" in PrototypeContrast(min_per_proto=5).discloses


def test_an_image_that_is_seen_twice_counts_once():
    """A class with one image is not sent where two are asked for, however often the last epoch shows that image."""
    round = small(images=4)
    round.data.labels = torch.tensor([0, 0, 0, 2])
    part = PrototypeContrast(min_per_proto=2)
    part.begin(round)
    round.scratch["prototypes"].add(torch.ones(6, 50), torch.tensor([0, 0, 0, 2, 2, 2]))
    part.end(round)
    assert round.outbox["prototypes"]["classes"].tolist() == [0]


def test_first_round_is_fedavg_and_the_exchange_is_as_said(tmp_path, caplog):
    """8.1 and 8.2: without prototypes it is FedAvg bit for bit; then C d floats and C numbers are sent each way.

    J_c is recorded.
    """
    with caplog.at_level(logging.WARNING, logger="fedsim"):
        ours, grid = run_small(small_experiment(tmp_path / "a", "fpl"))
    plain, _ = run_small(small_experiment(tmp_path / "b"))
    columns = ["train_loss", "target_accuracy", "target_loss", "mean_validation_accuracy"]
    rows, expected = numbers(ours / "rounds.csv")[columns], numbers(plain / "rounds.csv")[columns]
    assert rows[:2].equals(expected[:2])
    assert not rows[2:].equals(expected[2:])
    clients = numbers(ours / "clients.csv").groupby("round")
    assert list(clients.get_group(1)["bytes_up_prototypes"]) == [10 * 50 * 4 + 10 * 8] * 3
    assert list(clients.get_group(1)["bytes_down_prototypes"]) == [0] * 3
    assert list(clients.get_group(2)["bytes_down_prototypes"]) == [10 * 50 * 4 + 10 * 8] * 3
    sent = [set(record_to_arrays(reply.content.array_records["prototypes"])) for message, reply in grid.seen
            if message.metadata.message_type == "train"]  # fmt: skip
    assert sent == [{"protos", "classes"}] * 9
    details = pd.read_csv(ours / "details.csv")
    assert (details["quantity"] == "prototype_clusters").sum() == 30
    assert (details["value"] == 1).all()
    assert sum("never make two clusters" in record.message for record in caplog.records) == 1


def test_without_prototypes_it_is_fedavg(tmp_path):
    """8.1: when no class has enough images, the records stay empty, and the run is FedAvg bit for bit."""
    method = {"name": "fpl", "prototype_contrast": {"min_per_proto": 1000}}
    ours, _ = run_small(small_experiment(tmp_path / "a", method))
    plain, _ = run_small(small_experiment(tmp_path / "b"))
    assert (ours / "last.safetensors").read_bytes() == (plain / "last.safetensors").read_bytes()


def test_several_clients_per_domain_cluster(tmp_path):
    """With six clients a class may have two or three clusters."""
    folder, _ = run_small(small_experiment(tmp_path, "fpl", data={"clients_per_domain": 2}, train={"rounds": 1}))
    clusters = pd.read_csv(folder / "details.csv")["value"]
    assert clusters.between(1, 3).all()
    assert clusters.max() > 1
