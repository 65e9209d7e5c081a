"""Styles: channel statistics, AdaIN and its spaces on numbers by hand, and CCST's transfer between clients."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_round import colour_images, small_data, small_round
from support import small_experiment
from torch import nn

from clients.augment.cross_client_style import CrossClientStyle
from clients.augment.style import Haar, Pixel, adain_affine, apply_affine, deviation, move, pool, statistics
from clients.augment.vgg_style import Vgg, decoder, encoder, load_vgg
from fedsim.common.errors import UserError
from fedsim.data.augment import to_float
from fedsim.methods.assembly import build_recipe
from strategies.banks.style import StyleBank
from strategies.parts import ServerRound


def row(*values):
    return torch.tensor(values, dtype=torch.float32).reshape(1, 1, 1, -1)


def target(mean, std):
    return torch.full((1, 1), float(mean)), torch.full((1, 1), float(std))


def adain(features, style, correction=0, **options):
    return move(features, adain_affine(statistics([features], correction), style, **options)).flatten().tolist()


@pytest.mark.parametrize(("options", "wanted"), [
    ({}, [7.316729, 9.105577, 10.894423, 12.683271]), ({"correction": 1}, [7.676217, 9.225406, 10.774594, 12.323783]),
    ({"alpha": 0}, [1, 2, 3, 4]), ({"correction": 1, "alpha": 0.5}, [4.338108, 5.612703, 6.887297, 8.161892]),
])  # fmt: skip
def test_adain_with_both_variances_and_alpha(options, wanted):
    assert adain(row(1, 2, 3, 4), target(10, 2), **options) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("value", [5.0, 30.1, 0.1, 1000.7])
@pytest.mark.parametrize(("size", "style"), [(4, (10, 20)), (7, (1.7e-5, 20)), (224, (0.3, 3.0))])
def test_constant_content_takes_the_mean_exactly(value, size, style):
    """g F - g mu(F) must not lose digits (30.1 in style (10, 20) gave 10.0038), and the mean must not be rounded."""
    features = torch.full((1, 1, size, size), value)
    assert set(adain(features, target(*style))) == {torch.tensor(float(style[0])).item()}
    found = statistics([features])
    assert deviation(found[1]).item() == pytest.approx(0.0031623, abs=1e-7)
    assert adain_affine(found, target(10, 2))[1].item() == pytest.approx(2 * 316.2278, rel=1e-4)
    assert adain_affine(found, target(10, 2), gain=(0.1, 10))[1].item() == pytest.approx(10)


def test_pooling_is_over_positions_and_images():
    for counts, moments in ((), (3, 5)), ((torch.tensor([1.0, 3.0]),), (4, 4)):
        mean, variance = pool(torch.tensor([[1.0], [5.0]]), torch.ones(2, 1), *counts)
        assert (mean.item(), variance.item()) == moments
    images = torch.rand(10, 3, 8, 8)
    whole = pool(*statistics([images]))
    split = [torch.cat(values) for values in zip(*(statistics([part]) for part in images.split([3, 5, 2])))]
    assert torch.allclose(torch.stack(pool(*split)), torch.stack(whole), atol=1e-12)
    direct = images.transpose(0, 1).reshape(3, -1).double()
    assert torch.allclose(whole[1], direct.var(1, correction=0), atol=1e-7)
    beside = torch.tensor([1000.00, 1000.01]).repeat(50_000).reshape(10, 1, 100, 100)  # a small variance, a large mean
    assert pool(*statistics([beside]))[1].item() == pytest.approx(2.5e-5, rel=0.01)


def test_haar_block_inverse_and_own_style():
    assert [band.item() for band in Haar(1).encode(torch.tensor([[[[1.0, 2], [3, 4]]]]))] == [5, -1, -2, 0]
    space, images = Haar(), torch.rand(2, 3, 28, 37)
    bands = space.encode(images)
    assert torch.allclose(space.decode(bands, images), images, atol=1e-6)
    mean, variance = statistics(bands)
    assert mean.shape == (2, 30)
    own = apply_affine(space, images, adain_affine((mean, variance), (mean, deviation(variance)), gain=space.gain))
    assert torch.allclose(own, images, atol=1e-5)
    square = torch.rand(1, 1, 16, 16)
    energy = sum(band.square().sum() for band in space.encode(square))
    assert energy.item() == pytest.approx(square.square().sum().item(), rel=1e-5)  # orthonormal


@pytest.mark.parametrize("size", [9, 32, 222, 225])
def test_every_space_keeps_the_size(size):
    images, phi, psi = torch.rand(1, 3, size, size), encoder(), decoder()
    if size > 32:  # the layers that change the size alone: padded convolutions do not, as the small sizes show
        phi = nn.Sequential(*[layer for layer in phi if isinstance(layer, nn.MaxPool2d)])
        psi = nn.Sequential(*[layer for layer in psi if isinstance(layer, nn.Upsample)])
    for space in (Pixel(), Haar(), Vgg(phi, psi)):
        bands = space.encode(images)
        assert space.decode(bands, images).shape == images.shape
    assert bands[0].shape[2:] == (-(-size // 8), -(-size // 8))


@pytest.fixture(scope="module")
def vgg_files(tmp_path_factory):
    """Files of a complete VGG-19 (with layers after relu4_1) as .pth, of a decoder as .safetensors, and wrong ones."""
    folder, whole = tmp_path_factory.mktemp("vgg"), encoder().state_dict()
    torch.save({**whole, "32.weight": torch.zeros(512, 512, 3, 3)}, folder / "vgg.pth")
    save_file(decoder().state_dict(), folder / "decoder.safetensors")
    torch.save({"conv.weight": torch.zeros(1)}, folder / "swapped.pth")
    torch.save({**whole, "2.weight": torch.zeros(64, 3, 5, 5)}, folder / "misshapen.pth")
    (folder / "garbage.pth").write_bytes(b"no tensors")
    return folder


def load(folder, *names):
    return load_vgg(*(name and str(folder / name) for name in names), torch.device("cpu"), "method.part")


def test_vgg_loads_local_files(vgg_files):
    space = load(vgg_files, "vgg.pth", "decoder.safetensors")
    stored = torch.load(vgg_files / "vgg.pth", weights_only=True)
    assert torch.equal(space.phi[2].weight, stored["2.weight"])
    features = space.encode(torch.rand(2, 3, 16, 16))[0]
    assert features.shape == (2, 512, 2, 2)
    assert features.min() >= 0
    assert not any(parameter.requires_grad for parameter in (*space.phi.parameters(), *space.psi.parameters()))
    sizes = [sum(parameter.numel() for parameter in part.parameters()) for part in (space.phi, space.psi)]
    assert sizes == [3_505_740, 3_505_219]  # as published


@pytest.mark.parametrize(("phi", "psi", "message"), [
    ("", "decoder.safetensors", "encoder_weights is not set"), ("vgg.pth", "", "decoder_weights is not set"),
    ("nowhere.pth", "decoder.safetensors", "no file '.*nowhere.pth'"),
    ("swapped.pth", "decoder.safetensors", "has no tensor '0.weight'"),
    ("misshapen.pth", "decoder.safetensors", r"'2.weight' has shape \[64, 3, 5, 5\], not \[64, 3, 3, 3\]"),
    ("garbage.pth", "decoder.safetensors", "not a readable weights file"),
])  # fmt: skip
def test_vgg_says_in_one_line_what_is_wrong(phi, psi, message, vgg_files):
    with pytest.raises(UserError, match=rf"\A.*{message}.*\Z"):
        load(vgg_files, phi, psi)


FIRST_ROUND = ServerRound(1, 3, [], {})


def bank_of(part, clients="abc"):
    """What client `a` receives when clients of different brightness contribute."""
    entries = {}
    for index, client in enumerate(clients):
        data = small_data(colour_images(6, seed=index, offset=60 * index), client=client)
        entries[client] = part.collect(small_round(data))
        assert StyleBank().accept(client, entries[client], FIRST_ROUND) == ""
    return {"style": StyleBank().hand_out(entries, "a", FIRST_ROUND)}


def epoch(part, records=None, count=5, **changes):
    """All items of client `a` after the transfer, its original images and its round."""
    data = small_data(colour_images(count + 2), validation=2)
    round = small_round(data, bank_of(part) if records is None else records, **changes)
    items = np.arange(count * part.copies(round))
    return data.batch(items, part.begin(round)), to_float(data.images[:count]), round


@pytest.mark.parametrize("space", ["pixel", "haar", "vgg"])
def test_every_image_l_times_and_once_untouched(space, vgg_files):
    weights = {"encoder_weights": str(vgg_files / "vgg.pth"), "decoder_weights": str(vgg_files / "decoder.safetensors")}
    part = CrossClientStyle(encoder=space, L=3, **(weights if space == "vgg" else {}))
    batch, originals, round = epoch(part)
    assert batch.labels.tolist() == round.data.labels[:5].tolist() * 3
    same = [[torch.equal(image, original) for original in originals] for image in batch.raw]
    assert sum(map(sum, same)) == 5
    assert [sum(column) for column in zip(*same)] == [1] * 5
    assert batch.raw.shape == (15, 3, 16, 16)
    assert 0 <= batch.raw.min() <= batch.raw.max() <= 1
    assert part.__class__(**{**part.__dict__, "L": 1}).copies(round) == 1
    assert part.tag == space


def test_pixel_transfer_and_the_images_of_every_round():
    part = CrossClientStyle(L=2)
    records = bank_of(part, "ab")
    batch, originals, _ = epoch(part, records)
    moved = [index for index in range(10) if not torch.equal(batch.raw[index], originals[index % 5])]
    assert len(moved) == 5
    reached = batch.raw[moved].mean(dim=(2, 3))
    assert torch.allclose(reached, torch.from_numpy(records["style"]["b:mean"]).expand(5, 3), atol=1e-3)
    first, again, later = (epoch(CrossClientStyle(L=1), round=number)[0].raw for number in (1, 1, 2))
    assert torch.equal(first, again)
    assert torch.equal(first, later)
    anew = CrossClientStyle(L=1, resample_each_round=True)
    one, *others = (epoch(anew, round=number)[0].raw for number in (1, 2, 3, 4))
    assert not all(torch.equal(one, other) for other in others)
    values = epoch(CrossClientStyle(quantise=True))[0].raw * 255
    assert torch.allclose(values, values.round(), atol=1e-4)


def test_the_level_is_lowered_to_the_styles_there_are(caplog):
    """A client that failed in phase 0 still gets the others' styles; without any its data stay as they are."""
    part = CrossClientStyle(L=9)
    assert len(epoch(part, bank_of(part, "bc"))[0].images) == 15
    for clients in ("", "a"):
        caplog.clear()
        batch, originals, _ = epoch(part, bank_of(part, clients))
        assert torch.equal(batch.raw, originals)
        assert "no styles of other clients" in caplog.text


def test_single_styles_leave_constant_images_out():
    images = colour_images(10)
    images[:4] = 200
    part = CrossClientStyle(styles="single", J=3)
    assert part.collect(small_round(small_data(images)))["mean"].shape == (3, 3)
    many = CrossClientStyle(styles="single").collect(small_round(small_data(images)))
    assert many["mean"].shape == (6, 3)
    assert (abs(many["mean"] - 200 / 255) > 0.05).all()
    constant = part.collect(small_round(small_data(np.full_like(images, 7))))
    assert constant["mean"].shape == (1, 3)  # nothing but constant images: their overall style
    assert len(epoch(part)[0].images) == 15
    assert "single images" in part.discloses
    assert part.tag == "pixel, single"
    images = colour_images(8)
    images[6:] = 255
    rounds = small_round(small_data(images, validation=2)), small_round(small_data(images[:6]))
    split, whole = (CrossClientStyle().collect(round)["mean"] for round in rounds)
    assert np.array_equal(split, whole)


@pytest.mark.filterwarnings("ignore:var_mean")
@pytest.mark.parametrize("size", [8, 9])
def test_no_unbiased_variance_of_one_value(size):
    """Images of 8 pixels have one value per Haar band of the last level, and its unbiased variance is 0 / 0."""
    options = {"encoder": "haar", "content_variance": "unbiased"}
    round = small_round(small_data(colour_images(4, size)))
    finite = all(values.isfinite().all() for values in CrossClientStyle(**options).content(round, correction=1))
    assert finite == (size == 9)
    method, data = {"name": "ccst", "cross_client_style": options}, {"image_size": size}
    with nullcontext() if finite else pytest.raises(UserError, match="less than 9 pixels"):
        build_recipe(small_experiment("unused", method, data=data))
    options["content_variance"] = "population"
    build_recipe(small_experiment("unused", method, data=data))
