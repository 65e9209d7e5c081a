"""RandAugment and AugMix: their operations compared with torchvision's, magnitudes, and draws."""

import numpy as np
import pytest
import torch
from small_round import colour_images, small_data, small_round

from clients.augment import aug_mix, rand_augment
from clients.augment.aug_mix import AugMix, mixed
from clients.augment.operations import apply_operations
from clients.augment.rand_augment import RandAugment, magnitude_table
from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe
from fedsim.settings.experiment import Experiment

NAMES = {
    "identity": "Identity", "shear_x": "ShearX", "shear_y": "ShearY", "translate_x": "TranslateX",
    "translate_y": "TranslateY", "rotate": "Rotate", "brightness": "Brightness", "color": "Color",
    "contrast": "Contrast", "sharpness": "Sharpness", "posterize": "Posterize", "solarize": "Solarize",
    "auto_contrast": "AutoContrast", "equalize": "Equalize",
}  # fmt: skip


def images(count=6, channels=3, size=24):
    """Images in [0, 1] of 256 values."""
    torch.manual_seed(0)
    return torch.randint(20, 220, (count, channels, size, size)).float() / 255


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_operations_are_torchvisions(name, channels):
    """Each image of a batch, with its own magnitude, becomes what torchvision makes of that single image."""
    from torchvision.transforms import v2

    x = images(channels=channels)
    value = {"posterize": 6.0, "solarize": 178 / 255, "rotate": 25.0, "translate_x": 5.3, "translate_y": 3.9}.get(
        name, 0.27
    )
    signs = torch.ones(6) if name in ("posterize", "solarize") else torch.tensor([1.0, -1, 1, -1, -1, 1])
    moved = apply_operations(x, [name, "identity"], torch.tensor([0, 0, 1, 0, 0, 0]), value * signs)
    policy = v2.RandAugment()
    for index in range(6):
        given = (NAMES[name], float(value * signs[index])) if index != 2 else ("Identity", 0.0)
        wanted = policy._apply_image_or_video_transform(x[index], *given, policy.interpolation, policy._fill)
        assert torch.allclose(moved[index], wanted, atol=2e-6), (index, (moved[index] - wanted).abs().max())
    assert moved[2].equal(x[2])


def test_a_mixed_batch_is_each_image_alone():
    """This holds with different operations in one batch."""
    x = images(14)
    values = torch.tensor(list(magnitude_table(9, 31, 24, 24).values()), dtype=torch.float64)
    order = torch.randperm(14)
    moved = apply_operations(x, list(NAMES), order, values[order])
    for index in range(14):
        alone = apply_operations(x[index : index + 1], list(NAMES), order[index : index + 1], values[order[[index]]])
        assert torch.allclose(moved[index], alone[0], atol=1e-6)


def test_magnitudes_of_randaugment():
    """RandAugment's numbers at M = 9 and 224 pixels; and torchvision's whole table."""
    from torchvision.transforms import v2

    table = magnitude_table(9, 31, 224, 224)
    assert table["rotate"] == pytest.approx(9)
    assert table["shear_x"] == pytest.approx(0.09)
    assert table["translate_x"] == pytest.approx(30.453, abs=1e-3)
    for name in ("brightness", "color", "contrast", "sharpness"):
        assert table[name] == pytest.approx(0.27)
    assert table["solarize"] * 255 == pytest.approx(178.5)
    assert table["posterize"] == 7
    for M in range(31):
        mine = magnitude_table(M, 31, 40, 50)
        for name, (values, _) in {n: v2.RandAugment._AUGMENTATION_SPACE[t] for n, t in NAMES.items()}.items():
            theirs = values(31, 40, 50)
            assert mine[name] == pytest.approx(0 if theirs is None else float(theirs[M]), abs=1e-5), (name, M)


def test_magnitudes_of_augmix():
    """torchvision's ten, with and without the colour operations."""
    from torchvision.transforms import v2

    for every, space in ((True, v2.AugMix._AUGMENTATION_SPACE), (False, v2.AugMix._PARTIAL_AUGMENTATION_SPACE)):
        mine = aug_mix.magnitude_table(40, 50, every)
        assert {NAMES[name] for name in mine} == set(space)
        for name, values in mine.items():
            theirs = space[NAMES[name]][0](10, 40, 50)
            assert theirs is None or values.tolist() == pytest.approx(theirs.tolist(), abs=1e-5)


def test_every_operation_is_drawn_and_directions_are_even(monkeypatch):
    """Each of the N operations is uniform over the 14; half of those with a direction have the opposite one."""
    seen = []

    def note(x, names, chosen, magnitudes):
        seen.append((chosen, magnitudes))
        return x

    monkeypatch.setattr(rand_augment, "apply_operations", note)
    torch.manual_seed(0)
    RandAugment(N=3).augmented(torch.rand(2000, 1, 8, 8))
    assert len(seen) == 3
    counts = torch.bincount(torch.cat([chosen for chosen, _ in seen]), minlength=14)
    assert counts.min() > 6000 / 14 * 0.8
    rotated = [magnitudes[chosen == 5] for chosen, magnitudes in seen]  # the sixth of the table
    assert (torch.cat(rotated) > 0).double().mean().item() == pytest.approx(0.5, abs=0.08)
    assert torch.cat(rotated).abs().unique().tolist() == [9.0]


def test_it_comes_after_the_augmentation_and_can_be_repeated():
    """Only training batches are changed; `prepare` repeats the same operations; N = 0 does not change the batch."""
    data = small_data(colour_images(8), validation=2, augment=lambda x: x.flip(-1))
    round = small_round(data)
    positions = np.arange(6)
    plain = data.batch(positions)
    assert data.batch(positions, RandAugment(N=0).begin(round), late=True).images.equal(plain.images)
    torch.manual_seed(3)
    batch = data.batch(positions, RandAugment().begin(round), late=True)
    assert batch.raw.equal(plain.raw)
    assert not batch.images.equal(plain.images)
    assert batch.prepare(batch.raw).equal(batch.images)
    torch.manual_seed(3)
    assert batch.augmented.equal(RandAugment().augmented(plain.raw.flip(-1)))
    evaluated = next(data.evaluation(data.validation, 8))[0]
    assert evaluated.equal(data.raw(data.validation))


def test_augmix_mixes_chains(monkeypatch):
    """If operations have no effect, the mixture is the image; chains have 1 to 3 operations; 1 - m ~ Beta(1, 1)."""
    x = images()
    assert not mixed(x).equal(x)
    assert mixed(x).min() >= 0
    assert mixed(x).max() <= 1
    depths = []

    def note(part, names, chosen, magnitudes):
        depths.append(len(part))
        return part

    monkeypatch.setattr(aug_mix, "apply_operations", note)
    assert torch.allclose(mixed(x), x, atol=1e-6)
    assert depths[0] == 3 * 6  # the first operation of three chains of six images
    assert len(depths) <= 3
    assert depths == sorted(depths, reverse=True)
    depths.clear()
    mixed(x, width=2, depth=2)
    assert depths == [12, 12]
    monkeypatch.setattr(aug_mix, "apply_operations", lambda part, *rest: torch.ones_like(part))
    shares = mixed(torch.zeros(4000, 1, 1, 1)).flatten()  # 1 - m, m ~ Beta(1, 1)
    assert shares.mean().item() == pytest.approx(0.5, abs=0.02)
    assert shares.var().item() == pytest.approx(1 / 12, abs=0.01)


def test_chains_are_drawn_once_for_the_batch_or_for_each_image(monkeypatch):
    """The weights of the chains and of the image itself are each image's own either way."""
    seen = []

    def note(part, names, chosen, magnitudes):
        seen.extend(zip(chosen.split(40), magnitudes.split(40)))  # the images of one chain after those of another
        return torch.ones_like(part)

    monkeypatch.setattr(aug_mix, "apply_operations", note)
    for alike in (True, False):
        seen.clear()
        shares = mixed(torch.zeros(40, 1, 4, 4), alike=alike).amax((1, 2, 3))
        assert len(shares.unique()) == 40
        assert 3 <= len(seen) <= 9
        assert (max(len(chosen.unique()) for chosen, _ in seen) == 1) == alike
        assert (max(len(values.unique()) for _, values in seen) == 1) == alike
        assert {len(chosen) for chosen, _ in seen} == {40} or not alike  # a chain ends for all of its images


def test_wrong_settings_are_refused():
    """The error is one line."""
    with pytest.raises(UserError, match="strengths go from 0"):
        build_recipe(Experiment(method={"name": "randaugment", "rand_augment": {"M": 31}}))
    with pytest.raises(UserError, match="depth"):
        AugMix(depth=0).check(Experiment())
