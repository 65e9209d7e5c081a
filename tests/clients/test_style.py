"""Styles: channel statistics, AdaIN and its spaces, and amplitudes, on numbers worked out by hand."""

import pytest
import torch
from safetensors.torch import save_file
from small_round import colour_images, small_data, small_round
from torch import nn

from clients.augment.frequency import amplitude, half_width, interpolate, window_of, window_rows
from clients.augment.style import Haar, Pixel, adain_affine, apply_affine, deviation, move, pool, statistics
from clients.augment.vgg_style import Vgg, decoder, encoder, load_vgg
from clients.step.episodic import EpisodicStep
from fedsim.common.errors import UserError


def row(*values):
    """One image of one channel, with these values."""
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


def test_own_statistics_are_the_identity_under_one_convention():
    features = row(1, 2, 3, 4)
    mean, variance = statistics([features])
    assert adain(features, (mean, deviation(variance))) == pytest.approx([1, 2, 3, 4], abs=1e-5)
    mixed = adain(features, (mean, deviation(variance)), correction=1)
    assert mixed == pytest.approx([1.200961, 2.066987, 2.933013, 3.799039], abs=1e-5)


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


def test_pixel_space_clamps():
    images = row(0.2, 0.4, 0.6, 0.8)
    dark, bright = (
        apply_affine(Pixel(), images, adain_affine(statistics([images]), target(*style))).flatten().tolist()
        for style in ((0.3, 0.1), (0.7, 0.4))
    )
    assert dark == pytest.approx([0.165849, 0.255283, 0.344717, 0.434151], abs=1e-5)
    assert bright[3] == 1
    assert adain(images, target(0.7, 0.4))[3] == pytest.approx(1.236603, abs=1e-5)


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
    with pytest.raises(UserError, match=message) as caught:
        load(vgg_files, phi, psi)
    assert "\n" not in str(caught.value)


X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[None, None]
TWO = torch.full_like(X, 2.0)
OTHER = torch.tensor([[0.0, 4.0], [0.0, 0.0]])[None, None]


def by_definition(x, foreign, share, b):
    """The formula with a centred mask on the whole complex spectrum, in float64."""
    spectrum, other = (torch.fft.fftshift(torch.fft.fft2(v.double()), dim=(-2, -1)) for v in (x, foreign))
    height, width = x.shape[-2:]
    mask = torch.zeros(height, width)
    mask[max(height // 2 - b, 0) : height // 2 + b + 1, max(width // 2 - b, 0) : width // 2 + b + 1] = 1
    own, phase = spectrum.abs(), spectrum.angle()
    changed = own * (1 - mask) + ((1 - share) * own + share * other.abs()) * mask
    result = torch.fft.ifft2(torch.fft.ifftshift(torch.polar(changed, phase), dim=(-2, -1)))
    assert result.imag.abs().max() < 1e-6
    return result.real.float()


@pytest.mark.parametrize(("x", "foreign", "share", "b", "wanted"), [
    (X, TWO, 0.0, 0, [[1, 2], [3, 4]]), (X, TWO, 0.0, 1, [[1, 2], [3, 4]]),
    (X, TWO, 0.5, 0, [[0.75, 1.75], [2.75, 3.75]]), (X, TWO, 1.0, 0, [[0.5, 1.5], [2.5, 3.5]]),  # the mean alone
    (X, OTHER, 1.0, 1, [[0, 0], [0, 4]]), (X, OTHER, 0.5, 1, [[0.5, 1.0], [1.5, 4.0]]),  # the whole spectrum
    (X, 0 * X, 0.0, 0, [[1, 2], [3, 4]]),  # the formula as printed gives [[-1.5, -.5], [.5, 1.5]]
    (-X, TWO, 1.0, 0, [[-0.5, -1.5], [-2.5, -3.5]]),  # the sign is the image's own
])  # fmt: skip
def test_numbers_by_hand(x, foreign, share, b, wanted):
    found = interpolate(x, amplitude(foreign, b), torch.tensor([share]), b)[0, 0]
    assert torch.allclose(found, torch.tensor(wanted, dtype=torch.float32), atol=1e-6)


def test_products_that_are_whole_numbers():
    """0.29 * 100 is below 29 in floating point, and 0.07 * 100 is above 7."""
    assert half_width(0.29, 100, 100) == 29
    found = EpisodicStep(rho=0.07).collect(small_round(small_data(colour_images(100, 4))))
    assert len(found["amplitude"]) == 7


def test_windows():
    for (size, share), b in {(384, 0.01): 3, (384, 0.003): 1, (224, 0.01): 2, (32, 0.01): 0}.items():
        assert half_width(share, size, size) == b
        assert amplitude(torch.zeros(1, 1, size, size), b).shape[2:] == (2 * b + 1, b + 1)
    for height, width in ((8, 8), (7, 9), (5, 12)):
        assert sorted(window_rows(half_width(1.0, height, width), height).tolist()) == list(range(height))
        whole = amplitude(torch.zeros(1, 1, height, width), max(height, width))
        assert whole.shape[2:] == (height, width // 2 + 1)


@pytest.mark.parametrize("size", [(8, 8), (7, 9), (9, 6), (16, 11)])
def test_every_window_follows_the_definition(size):
    """Of the other image it needs the window alone; a constant image stays constant."""
    torch.manual_seed(0)
    x, foreign = torch.rand(2, 3, *size), torch.rand(2, 3, *size)
    x[1] = 0.4
    for b in range(max(size) + 1):
        windowed = amplitude(foreign, b)
        assert torch.allclose(windowed, window_of(amplitude(foreign), b), atol=1e-6)
        for share in (0.0, 0.3, 1.0):
            ours = interpolate(x, windowed, torch.full((2,), share), b)
            assert torch.allclose(ours[:1], by_definition(x, foreign, share, b)[:1], atol=2e-6), (b, share)
            assert ours[1].std(dim=(1, 2)).max() < 1e-6
