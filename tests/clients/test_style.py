"""Channel statistics, AdaIN and the spaces it works in, on numbers worked out by hand."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from clients.augment.style import Haar, Pixel, adain_affine, apply_affine, deviation, move, pool, statistics
from clients.augment.vgg_style import Vgg, decoder, encoder, load_vgg
from fedsim.common.errors import UserError

CPU = torch.device("cpu")


def row(*values: float) -> Tensor:
    """One image of one channel, with these values."""
    return torch.tensor(values, dtype=torch.float32).reshape(1, 1, 1, -1)


def target(mean: float, std: float) -> tuple[Tensor, Tensor]:
    return torch.full((1, 1), float(mean)), torch.full((1, 1), float(std))


def adain(features: Tensor, style: tuple[Tensor, Tensor], correction: int = 0, **options) -> list[float]:
    return move(features, adain_affine(statistics([features], correction), style, **options)).flatten().tolist()


def test_t1_adain_with_both_variances_and_alpha() -> None:
    features, style = row(1, 2, 3, 4), target(10, 2)
    assert adain(features, style) == pytest.approx([7.316729, 9.105577, 10.894423, 12.683271], abs=1e-5)
    assert adain(features, style, 1) == pytest.approx([7.676217, 9.225406, 10.774594, 12.323783], abs=1e-5)
    assert adain(features, style, alpha=0) == [1, 2, 3, 4]
    assert adain(features, style, 1, alpha=0.5) == pytest.approx([4.3381, 5.6127, 6.8873, 8.1619], abs=1e-4)


def test_t2_constant_content_takes_the_mean_and_stays_finite() -> None:
    features = torch.full((1, 1, 4, 4), 5.0)
    assert adain(features, target(10, 2)) == pytest.approx([10.0] * 16)
    assert deviation(statistics([features])[1]).item() == pytest.approx(0.0031623, abs=1e-7)
    assert adain_affine(statistics([features]), target(10, 2))[1].item() == pytest.approx(2 * 316.2278, rel=1e-4)
    assert adain_affine(statistics([features]), target(10, 2), gain=(0.1, 10))[1].item() == pytest.approx(10)


@pytest.mark.parametrize("value", [5.0, 30.1, 0.1, 1000.7])
@pytest.mark.parametrize(("size", "style"), [(4, (10, 20)), (7, (1.7e-5, 20)), (224, (0.3, 3.0))])
def test_t2_constant_content_takes_the_mean_exactly(value: float, size: int, style: tuple[float, float]) -> None:
    """g F - g mu(F) must not lose digits (30.1 in style (10, 20) gave 10.0038), and the mean must not be rounded."""
    features = torch.full((1, 1, size, size), value)
    assert set(adain(features, target(*style))) == {torch.tensor(float(style[0])).item()}


def test_t3_own_statistics_are_the_identity_under_one_convention() -> None:
    features = row(1, 2, 3, 4)
    mean, variance = statistics([features])
    assert adain(features, (mean, deviation(variance))) == pytest.approx([1, 2, 3, 4], abs=1e-5)
    mixed = adain(features, (mean, deviation(variance)), correction=1)
    assert mixed == pytest.approx([1.200961, 2.066987, 2.933013, 3.799039], abs=1e-5)


def test_t4_pooling_is_over_positions_and_images() -> None:
    mean, variance = pool(torch.tensor([[1.0], [5.0]]), torch.tensor([[1.0], [1.0]]))
    assert (mean.item(), variance.item()) == (3, 5)
    assert deviation(variance).item() == pytest.approx(2.236068, abs=1e-5)
    images = torch.rand(10, 3, 8, 8)
    whole = pool(*statistics([images]))
    split = [torch.cat(values) for values in zip(*(statistics([part]) for part in images.split([3, 5, 2])))]
    assert torch.allclose(torch.stack(pool(*split)), torch.stack(whole), atol=1e-12)
    assert torch.allclose(torch.stack(pool(*statistics([images.flip(0)]))), torch.stack(whole), atol=1e-12)
    direct = images.transpose(0, 1).reshape(3, -1).double()
    assert torch.allclose(whole[1], direct.var(1, correction=0), atol=1e-7)
    unequal = pool(torch.tensor([[1.0], [5.0]]), torch.zeros(2, 1), torch.tensor([1.0, 3.0]))
    assert (unequal[0].item(), unequal[1].item()) == (4, 3)


def test_t6_small_variance_beside_a_large_mean() -> None:
    images = torch.tensor([1000.00, 1000.01]).repeat(50_000).reshape(10, 1, 100, 100)
    assert pool(*statistics([images]))[1].item() == pytest.approx(2.5e-5, rel=0.01)


def test_t7_pixel_space_clamps() -> None:
    images = row(0.2, 0.4, 0.6, 0.8)

    def transfer(mean: float, std: float) -> list[float]:
        affine = adain_affine(statistics([images]), target(mean, std))
        return apply_affine(Pixel(), images, affine).flatten().tolist()

    assert transfer(0.3, 0.1) == pytest.approx([0.165849, 0.255283, 0.344717, 0.434151], abs=1e-5)
    assert transfer(0.7, 0.4)[3] == 1
    assert adain(images, target(0.7, 0.4))[3] == pytest.approx(1.236603, abs=1e-5)


def test_t8_haar_block_inverse_and_own_style() -> None:
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


def test_haar_moves_contrast_per_scale() -> None:
    fine = torch.tensor([[0.4, 0.6], [0.6, 0.4]]).repeat(4, 4)[None, None]
    smooth = torch.linspace(0.3, 0.7, 8).expand(8, 8)[None, None]
    space = Haar()
    style = statistics(space.encode(smooth))
    affine = adain_affine(statistics(space.encode(fine)), (style[0], deviation(style[1])), gain=space.gain)
    moved = statistics(space.encode(apply_affine(space, fine, affine)))
    assert abs(moved[0][0, 9]) < 0.1 * abs(statistics(space.encode(fine))[0][0, 9])  # the finest HH is gone


@pytest.mark.parametrize("size", [9, 32, 96, 222, 224, 225])
def test_t9_every_space_keeps_the_size(size: int) -> None:
    images = torch.rand(1, 3, size, size)
    phi, psi = encoder(), decoder()
    if size > 32:  # the layers that change the size alone: padded convolutions do not, as the small sizes show
        phi = nn.Sequential(*[layer for layer in phi if isinstance(layer, nn.MaxPool2d)])
        psi = nn.Sequential(*[layer for layer in psi if isinstance(layer, nn.Upsample)])
    for space in (Pixel(), Haar(), Vgg(phi, psi)):
        bands = space.encode(images)
        assert space.decode(bands, images).shape == images.shape
    assert bands[0].shape[2:] == (-(-size // 8), -(-size // 8))


def test_vgg_has_the_published_number_of_parameters() -> None:
    assert sum(parameter.numel() for parameter in encoder().parameters()) == 3_505_740
    assert sum(parameter.numel() for parameter in decoder().parameters()) == 3_505_219


@pytest.fixture
def weight_files(tmp_path: Path) -> tuple[Path, Path]:
    """Files of a complete VGG-19 (with layers after relu4_1) as .pth, and of a decoder as .safetensors."""
    files = tmp_path / "vgg.pth", tmp_path / "decoder.safetensors"
    torch.save({**encoder().state_dict(), "32.weight": torch.zeros(512, 512, 3, 3)}, files[0])
    save_file(decoder().state_dict(), files[1])
    return files


def test_vgg_loads_local_files(weight_files: tuple[Path, Path]) -> None:
    space = load_vgg(*map(str, weight_files), CPU, "method.part")
    stored = torch.load(weight_files[0], weights_only=True)
    assert torch.equal(space.phi[2].weight, stored["2.weight"])
    images = torch.rand(2, 3, 16, 16)
    features = space.encode(images)[0]
    assert features.shape == (2, 512, 2, 2)
    assert features.min() >= 0
    assert not any(parameter.requires_grad for parameter in (*space.phi.parameters(), *space.psi.parameters()))


def test_vgg_says_in_one_line_what_is_wrong(weight_files: tuple[Path, Path], tmp_path: Path) -> None:
    good = [str(file) for file in weight_files]
    swapped, misshapen = tmp_path / "swapped.pth", tmp_path / "misshapen.pth"
    torch.save({"conv.weight": torch.zeros(1)}, swapped)
    torch.save({**encoder().state_dict(), "2.weight": torch.zeros(64, 3, 5, 5)}, misshapen)
    garbage = tmp_path / "garbage.pth"
    garbage.write_bytes(b"no tensors")
    cases = {
        ("", good[1]): "encoder_weights is not set",
        (good[0], ""): "decoder_weights is not set",
        ("nowhere.pth", good[1]): "no file 'nowhere.pth'",
        (str(swapped), good[1]): "has no tensor '0.weight'",
        (str(misshapen), good[1]): "'2.weight' has shape [64, 3, 5, 5], not [64, 3, 3, 3]",
        (str(garbage), good[1]): "not a readable weights file",
    }
    for files, message in cases.items():
        with pytest.raises(UserError) as caught:
            load_vgg(*files, CPU, "method.part")
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
