"""FedCCRL's step: its views, its losses on numbers worked out by hand, and its refusals."""

import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_round import colour_images, small_data, small_net, small_round, step_of

from clients.augment.aug_mix import mixed
from clients.objective.aligned_views import AlignedViews, contrast_of, drawn_rows, eight_bit, rows_of
from clients.step.supervised import SupervisedStep
from clients.tools.losses import js_divergence
from fedsim.data.augment import to_float
from fedsim.methods.assembly import assemble

ROWS = {"mean": np.full((4, 3), 0.7, np.float32), "std": np.full((4, 3), 0.2, np.float32)}


def one_step(part, rows=None):
    """(loss, change of every parameter, round) of one SGD step on twelve images."""
    net, data = small_net(), small_data(colour_images(12))
    before = {name: value.detach().clone() for name, value in net.named_parameters()}
    round = small_round(data, {"pixel_stats": ROWS if rows is None else rows}, net, steps=1)
    round.optimizer = torch.optim.SGD(net.parameters(), 1.0)
    torch.manual_seed(3)
    loss = step_of(part, round)(data.batch(np.arange(12)))
    return loss, {name: value.detach() - before[name] for name, value in net.named_parameters()}, round


@pytest.mark.parametrize(
    ("labels", "t", "paper", "official"),
    [([0, 1], 0.1, 0.301136, -0.431097), ([0, 1], 1.0, 0.820488, 0.747264), ([0, 0], 1.0, 1.153821, 1.033876)],
)
def test_contrast(labels, t, paper, official):
    u, v, labels = torch.eye(2), torch.tensor([[1.0, 1.0], [0.0, 2.0]]), torch.tensor(labels)
    for own, wanted in ((False, paper), (True, official)):
        assert contrast_of([v, u], labels, t, own).item() == pytest.approx(wanted, abs=2e-6)
        assert contrast_of([v, u, u], labels, t, own).item() == pytest.approx(wanted, abs=2e-6)


def test_without_weights_and_changes_it_is_three_times_the_cross_entropy(monkeypatch):
    monkeypatch.setattr(AlignedViews, "changed", lambda self, images, styles: images)
    wanted, plain, _ = one_step(SupervisedStep())
    loss, moved, round = one_step(AlignedViews(lambda1=0, lambda2=0))
    assert loss.item() == pytest.approx(3 * wanted.item(), rel=1e-6)
    assert all(torch.allclose(moved[name], 3 * plain[name], atol=1e-6) for name in plain)
    assert round.tallied() == {}
    assert int(round.net.state_dict()["backbone.1.num_batches_tracked"]) == 3
    equal, _, round = one_step(AlignedViews(lambda1=0))
    assert equal.item() == pytest.approx(3 * wanted.item(), rel=1e-6)
    assert round.tallied()["js_loss"] == pytest.approx(0, abs=1e-6)


def test_values_outside_are_clamped():
    """As a conversion without a clamp leaves them, 1.04 is 265 - 256 = 9, and -10.4 of 255 is 256 - 10 = 246."""
    x = torch.tensor([1.04, -10.4 / 255, 265.7 / 255, 0.5])
    assert (255 * eight_bit(x)).tolist() == pytest.approx([255, 0, 255, 128], abs=1e-4)
    assert (255 * eight_bit(x, wraps=True)).tolist() == pytest.approx([9, 246, 9, 127], abs=1e-4)
    values = torch.arange(256) / 255
    assert eight_bit(values).equal(values)


def test_the_loss_is_the_sum_of_its_terms():
    """3 CE + lambda2 JS + lambda1 SC, with a gradient through every view."""
    part = AlignedViews(lambda1=0.3, lambda2=0.2)
    loss, _, round = one_step(part)
    found, batch, net, styles = round.tallied(), round.data.batch(np.arange(12)), small_net(), part.styles(round)
    torch.manual_seed(3)
    views = [batch.images, *(batch.normalize(part.changed(batch.augmented, styles)) for _ in range(2))]
    features = [net.features(view) for view in views]
    logits = [net.head(own) for own in features]
    assert found["js_loss"] == pytest.approx(js_divergence(logits).item(), rel=1e-4)
    assert found["contrast_loss"] == pytest.approx(contrast_of(features, batch.labels, 0.1).item(), rel=1e-4)
    entropy = sum(F.cross_entropy(own, batch.labels) for own in logits)
    wanted = entropy + 0.2 * found["js_loss"] + 0.3 * found["contrast_loss"]
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    js_divergence([own.retain_grad() or own for own in logits]).backward()
    assert all(own.grad.abs().max() > 0 for own in logits)


@pytest.fixture
def unmixed(monkeypatch):
    """AugMix changes nothing; the list of its settings `alike`."""
    asked = []
    monkeypatch.setattr(
        "clients.objective.aligned_views.mixed", lambda images, *words, **more: asked.append(more["alike"]) or images
    )
    return asked


@pytest.fixture
def alternating(monkeypatch, unmixed):
    """lam is 0, 1, 0, 1, ... for the images of a batch, and AugMix changes nothing."""
    monkeypatch.setattr(torch.distributions.Beta, "sample", lambda self, shape: torch.arange(shape[0]) % 2.0)


def test_a_view_has_the_statistics_of_a_row(alternating):
    """lam = 0: mean .5 and standard deviation .1 in all channels; lam = 1: nothing changes."""
    x = to_float(torch.from_numpy(colour_images(8)))
    styles = torch.full((1, 3, 1, 1), 0.5), torch.full((1, 3, 1, 1), 0.1)
    moved = AlignedViews().changed(x, styles)
    assert moved[1::2].equal(x[1::2])
    assert torch.allclose(moved[::2].mean((2, 3)), torch.full((4, 3), 0.5), atol=1e-3)
    assert torch.allclose(moved[::2].std((2, 3)), torch.full((4, 3), 0.1), atol=1e-3)
    assert AlignedViews(p=0.0).changed(x, styles).equal(x)


def test_every_view_has_draws_of_its_own_and_one_colour_stays_one(unmixed):
    x = to_float(torch.from_numpy(colour_images(1))).repeat(12, 1, 1, 1)
    styles = torch.linspace(0.3, 0.7, 12)[:, None, None, None].expand(-1, 3, 1, 1), torch.full((12, 3, 1, 1), 0.1)
    first, second = (AlignedViews(alpha=1.0).changed(x, styles) for _ in range(2))
    assert len(first.mean((1, 2, 3)).unique()) == 12
    assert not first.equal(second)
    moved = AlignedViews(alpha=1.0).changed(torch.full((4, 3, 8, 8), 0.25), styles)
    assert torch.allclose(moved.amax((2, 3)), moved.amin((2, 3)))


def test_the_official_variant_reaches_the_views_the_contrast_and_the_bank(unmixed):
    for name, own in (("paper", False), ("official", True)):
        round = one_step(AlignedViews(variant=name, p=0.0, views=1))[2]
        images = round.data.batch(np.arange(12)).images
        features = [small_net().features(images), small_net().features(eight_bit(images, wraps=own))]
        wanted = contrast_of(features, round.data.labels, 0.1, own).item()
        assert round.tallied()["contrast_loss"] == pytest.approx(wanted, abs=1e-4)
    assert unmixed == [False, True]
    official = {"name": "fedccrl", "aligned_views": {"variant": "official"}}
    assert assemble(official, {}).banks[0].refresh == "round"
    assert assemble({**official, "pixel_statistics": {"refresh": "once"}}, {}).banks[0].refresh == "once"


def test_without_rows_views_are_augmixs_alone(caplog):
    round = small_round(small_data(colour_images(6)), {"pixel_stats": {}}, small_net())
    with caplog.at_level(logging.WARNING):
        assert AlignedViews().styles(round) is AlignedViews().styles(round) is None
    assert caplog.text.count("no statistics of other clients' images") == 1
    x, views = to_float(round.data.images), []
    for change in (lambda: AlignedViews().changed(x, None), lambda: mixed(x)):
        torch.manual_seed(5)
        views.append(change())
    assert views[0].equal(views[1])
    loss, moved, _ = one_step(AlignedViews(), rows={})
    assert all(value.isfinite().all() for value in (loss, *moved.values()))


@pytest.mark.parametrize(("r", "images", "rows"), [(0.1, 9, 0), (0.1, 10, 1), (0.29, 100, 29), (0.1, 30, 3), (1, 7, 7)])
def test_number_of_rows(r, images, rows):
    """Of those that came they are drawn at most once where there are enough."""
    assert rows_of(r, images) == rows
    if images < 50:
        found = AlignedViews(r=r).collect(small_round(small_data(colour_images(images))))
        assert [(found[name].shape, found[name].dtype) for name in ("mean", "std")] == [((rows, 3), np.float32)] * 2
    assert sorted(drawn_rows(6, 6).tolist()) == list(range(6))
    assert {number for _ in range(50) for number in drawn_rows(3, 8).tolist()} == {0, 1, 2}
    assert len(drawn_rows(1, 8)) == 8


def test_rows_are_the_statistics_of_single_training_images():
    """The draw is repeatable, and other rounds draw other images; validation is never drawn."""
    images = colour_images(30, offset=0)
    images[20:] = 255
    part, data = AlignedViews(r=0.25), small_data(images, validation=10)
    found, again, later = (part.collect(small_round(data, round=number)) for number in (1, 1, 2))
    x = to_float(torch.from_numpy(images[:20]))
    means, stds = x.mean((2, 3)).numpy(), (x.var((2, 3)) + 1e-6).sqrt().numpy()
    places = [int(np.abs(means - row).sum(1).argmin()) for row in found["mean"]]
    assert len(set(places)) == 5
    np.testing.assert_allclose(found["mean"], means[places], atol=1e-6)
    np.testing.assert_allclose(found["std"], stds[places], atol=1e-6)
    assert np.array_equal(found["mean"], again["mean"])
    assert not np.array_equal(found["mean"], later["mean"])
