"""FISC's client: its style, its two losses, the second pass, and its exchange."""

import numpy as np
import pytest
import torch
from small_round import colour_images, digits_net, small_data, small_round
from support import small_experiment

from clients.augment import clustered_style, style
from clients.augment.clustered_style import map_clusters, map_products, pool_clusters, style_clusters
from clients.augment.spaces import image_statistics
from clients.augment.vgg_style import Vgg, decoder, encoder
from clients.terms import style_contrast
from clients.terms.style_contrast import StyleContrast, mean_squares, triplet
from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe
from strategies.tools.finch import finch

FIRST = torch.zeros(2, dtype=torch.float64)  # draws that choose the first sample with another label
TARGET = {"interpolation": {"mean": np.full((1, 3), 0.2, np.float32), "std": np.full((1, 3), 0.1, np.float32)}}


def rows(*values):
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize(("images", "clusters", "mean", "deviation"), [
    ([[0], [2], [4], [6], [8]], [0, 0, 1, 1, 1], 3.5, 2.843122),  # every cluster counts the same
    ([[0, 2], [4, 6, 8]], [0, 1], 3.5, 2.843122),  # positions of one image
    ([[0], [2], [4], [6], [8]], [0] * 5, 4, 2.828429),  # as one, as CCST pools: every position counts the same
])  # fmt: skip
def test_pooled_clusters(images, clusters, mean, deviation):
    moments = (torch.tensor([[f(image)] for image in images]) for f in (np.mean, np.var))
    found, variance = pool_clusters(*moments, np.array(clusters))
    assert (found.item(), style.deviation(variance).item()) == (mean, pytest.approx(deviation, abs=1e-6))


def test_triplet():
    """Distances .765367 and 1.414214: 0, and .948847 when positive and negative are exchanged."""
    labels, anchor = torch.tensor([0, 1]), rows((3, 0), (2, 0))
    near, far = (5, 5), (0, 7)  # lengths do not matter; each is the other's negative
    for styled in (rows(near, far), rows(far, near)):
        assert triplet(anchor, styled, labels, FIRST, 0.3).item() == pytest.approx((0 + 0.948847) / 2, abs=1e-6)
    assert triplet(anchor[:1], rows(near), labels[:1], FIRST[:1], 0.3) == 0
    one = torch.tensor([0, 1, 1])  # of three samples, the first has the two others as negatives
    features, styled = rows((1, 0), (0, 1), (0, 1)), rows((1, 1), (0, 1), (1, 1))
    chosen = [triplet(features, styled, one, torch.tensor([draw, 0.0, 0.0]).double(), 2.0).item() for draw in (0, 0.99)]
    distance = np.hypot(1 - 0.5**0.5, 0.5**0.5)  # of (1, 0) and (1, 1) / sqrt 2
    rest = (2 - distance) + 2  # the two others: the stylised first sample is their negative
    assert chosen == pytest.approx([(distance - 2**0.5 + 2 + rest) / 3, (2 + rest) / 3], abs=1e-5)
    features, styled = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    loss = triplet(features, styled, torch.ones(4, dtype=torch.long), torch.zeros(4).double(), 0.3)
    loss.backward()
    assert loss.item() == features.grad.abs().max() == 0
    zero = torch.zeros(2, 3, requires_grad=True)
    triplet(zero, zero * 2, torch.tensor([0, 1]), FIRST, 0.3).backward()
    assert zero.grad.isfinite().all()


def small(part, records=TARGET, images=8):
    """A round on the digits CNN, the function of the term in it, and a batch."""
    data = small_data(colour_images(images), augment=lambda x: x.flip(3))
    round = small_round(data, records, digits_net().train())
    return round, part.begin(round), data.batch(np.arange(images))


def test_term_of_a_batch(monkeypatch):
    """Both losses of the features of x and of x', which is made of the augmented batch; x' has no cross-entropy."""
    monkeypatch.setattr(style_contrast, "on_device", lambda numbers, device: torch.from_numpy(numbers))
    round, term, batch = small(StyleContrast(margin=0.5))
    seen = []
    round.net.register_forward_hook(lambda *_: seen.append("whole"))
    hook = round.net.backbone.register_forward_pre_hook(lambda module, images: seen.append(images[0]))
    plain = round.forward(batch)
    loss = term(batch)
    hook.remove()
    target = [torch.from_numpy(TARGET["interpolation"][key]) for key in ("mean", "std")]
    affine = style.adain_affine(style.statistics([batch.augmented]), target, 0.5, style.Pixel.gain)
    styled = batch.normalize(style.apply_affine(style.Pixel(), batch.augmented, affine))
    torch.testing.assert_close(seen[-1], styled)
    assert len(seen) == round.net.backbone.norm1.num_batches_tracked == 2
    features = round.net.features(styled)
    draws = torch.from_numpy(round.rng("negatives").random(8))
    wanted = 0.75 * triplet(batch.features, features, batch.labels, draws, 0.5)
    wanted = wanted + 0.2 * mean_squares(batch.features, features)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert round.tallied().keys() == {"triplet_loss", "norm_loss"}
    assert plain is batch.loss
    loss.backward()
    assert round.net.head.weight.grad is None
    assert round.net.backbone.conv1.weight.grad.abs().sum() > 0


def test_no_term_and_few_or_many_images(caplog):
    """One image is one cluster. Of more than `clustered` images some are drawn, always the same; the log says so."""
    assert small(StyleContrast(triplet_weight=0, norm_weight=0))[1] is None
    assert small(StyleContrast(triplet_weight=0))[1] is not None
    assert small(StyleContrast(), {"interpolation": {}})[1] is None
    assert "no client sent a style" in caplog.text
    assert StyleContrast().collect(small_round(small_data(colour_images(1))))["mean"].shape == (1, 3)
    constant = StyleContrast().collect(small_round(small_data(np.full((5, 3, 16, 16), 51, np.uint8))))
    assert constant["mean"][0] == pytest.approx([0.2] * 3)
    assert constant["std"][0] == pytest.approx([1e-5**0.5] * 3, rel=1e-3)
    data, part = small_data(colour_images(12)), StyleContrast(clustered=5)
    first, again = (part.collect(small_round(data, round=number)) for number in (0, 3))
    assert all(np.array_equal(first[key], again[key]) for key in first)
    assert "its style is that of 5 of its images" in caplog.text
    assert not np.array_equal(first["mean"], StyleContrast().collect(small_round(data))["mean"])


def test_local_style():
    """From the training split alone: the pooled clusters of FINCH on the flattened images, or on their styles."""
    images = colour_images(11, seed=1)
    images[:3, :, :8] //= 8  # three groups: dark above, dark on the left, with little red
    images[3:6, :, :, :8] //= 8
    images[6:9, 0] //= 8
    images[9:] = 255
    round, positions = small_round(small_data(images, validation=2)), np.arange(9)
    raw = round.data.raw(positions)
    found = finch(raw.flatten(1).double().numpy())
    assert map_clusters(round, style.Pixel(), positions).tolist() == found.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for cluster in ("features", "style"):
        record = StyleContrast(cluster=cluster).collect(round)
        labels = found if cluster == "features" else style_clusters(*style.statistics([raw]))
        members = [raw[labels == label] for label in range(labels.max() + 1)]
        mean = torch.stack([each.mean((0, 2, 3)) for each in members]).mean(0)
        second = torch.stack([each.square().mean((0, 2, 3)) for each in members]).mean(0)
        assert record["mean"][0] == pytest.approx(mean.numpy(), abs=1e-6)
        assert record["std"][0] == pytest.approx((second - mean**2 + 1e-5).sqrt().numpy(), abs=1e-6)
        assert {array.dtype for array in record.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("kept", [0, 30_000, 60_000, 10**9])
def test_products_of_maps_in_any_memory(kept, monkeypatch):
    """Maps that do not all fit are made again; the products are those of all maps at once."""
    monkeypatch.setattr(clustered_style, "chunks_of", lambda positions, space: np.array_split(positions, 5))
    round, positions = small_round(small_data(colour_images(13))), np.array([0, 2, 3, 5, 6, 7, 8, 9, 10, 12])
    maps = torch.cat([band.flatten(1) for band in style.Haar().encode(round.data.raw(positions))], dim=1).double()
    monkeypatch.setattr(clustered_style, "KEPT_BYTES", kept)
    found = map_products(round, style.Haar(), positions)
    np.testing.assert_allclose(found, (maps @ maps.T).numpy(), rtol=1e-12)


def test_the_official_layer_is_before_the_relu(monkeypatch):
    """Statistics there may be negative; the transfer stays where it is."""
    torch.manual_seed(0)
    space = Vgg(encoder().requires_grad_(False), decoder())
    monkeypatch.setattr(style_contrast, "space_of", lambda part, device: space)
    round = small_round(small_data(colour_images(3)))
    same = StyleContrast(encoder="vgg").collect(round)
    before = StyleContrast(encoder="vgg", statistics_layer="before_relu").collect(round)
    assert same["mean"].shape == before["mean"].shape == (1, 512)
    assert same["mean"].min() >= 0 > before["mean"].min()
    maps = space.phi[:-1](round.data.raw(np.arange(3)))
    wanted = style.pool(*style.statistics([maps]))[0]  # of three images there is one cluster
    assert before["mean"][0] == pytest.approx(wanted.float().numpy(), abs=1e-6)
    one = image_statistics(round, space, np.arange(3))
    assert same["mean"][0] == pytest.approx(style.pool(*one)[0].float().numpy(), abs=1e-6)


PACS = {"data": {"dataset": "pacs", "image_size": 32, "domains": []}, "run": {"target": "photo"}}


@pytest.mark.parametrize(("method", "sections", "words"), [
    ({"style_contrast": {"encoder": "vgg"}}, {}, "colour images"),
    ({"style_contrast": {"statistics_layer": "before_relu"}}, {}, "'before_relu' is for encoder 'vgg'"),
    ({"terms": []}, {}, "no part contributes to interpolation_style"),
    ({"interpolation_style": {"shared": False}}, {}, "shared = false leaves style_contrast without its bank"),
    ({"style_contrast": {"encoder": "vgg"}}, PACS, "method.style_contrast.encoder_weights is not set"),
])  # fmt: skip
def test_settings_that_cannot_work_are_refused(method, sections, words, tmp_path):
    with pytest.raises(UserError, match=words):
        build_recipe(small_experiment(tmp_path, {"name": "fisc", **method}, **sections))
