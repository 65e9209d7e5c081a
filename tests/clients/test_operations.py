"""RandAugment and AugMix: their operations compared with torchvision's, magnitudes, and draws."""

import numpy as np
import pytest
import torch
from small_round import colour_images, small_data, small_round
from torchvision.transforms import v2

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
VALUES = {"posterize": 6.0, "solarize": 178 / 255, "rotate": 25.0, "translate_x": 5.3, "translate_y": 3.9}


def images(count=6, channels=3, size=24):
    torch.manual_seed(0)
    return torch.randint(20, 220, (count, channels, size, size)).float() / 255


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_operations_are_torchvisions(name, channels):
    """Each image of a batch, with its own magnitude, becomes what torchvision makes of that single image."""
    x, value, policy = images(channels=channels), VALUES.get(name, 0.27), v2.RandAugment()
    signs = torch.ones(6) if name in ("posterize", "solarize") else torch.tensor([1.0, -1, 1, -1, -1, 1])
    moved = apply_operations(x, [name, "identity"], torch.tensor([0, 0, 1, 0, 0, 0]), value * signs)
    for index in range(6):
        given = (NAMES[name], float(value * signs[index])) if index != 2 else ("Identity", 0.0)
        wanted = policy._apply_image_or_video_transform(x[index], *given, policy.interpolation, policy._fill)
        assert torch.allclose(moved[index], wanted, atol=2e-6), (index, (moved[index] - wanted).abs().max())
    assert moved[2].equal(x[2])


def test_magnitudes():
    """RandAugment's numbers at M = 9 and 224 pixels; torchvision's whole tables, AugMix's without colours too."""
    table = magnitude_table(9, 31, 224, 224)
    expected = {"rotate": 9, "shear_x": 0.09, "translate_x": 30.453172, "solarize": 0.7, "posterize": 7}
    expected |= dict.fromkeys(("brightness", "color", "contrast", "sharpness"), 0.27)
    assert {name: table[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    for M in range(31):
        mine = magnitude_table(M, 31, 40, 50)
        for name in NAMES:
            theirs = v2.RandAugment._AUGMENTATION_SPACE[NAMES[name]][0](31, 40, 50)
            assert mine[name] == pytest.approx(0 if theirs is None else float(theirs[M]), abs=1e-5), (name, M)
    for every, space in ((True, v2.AugMix._AUGMENTATION_SPACE), (False, v2.AugMix._PARTIAL_AUGMENTATION_SPACE)):
        mine = aug_mix.magnitude_table(40, 50, every)
        assert {NAMES[name] for name in mine} == set(space)
        for name, values in mine.items():
            theirs = space[NAMES[name]][0](10, 40, 50)
            assert theirs is None or values.tolist() == pytest.approx(theirs.tolist(), abs=1e-5)


@pytest.fixture
def noted(monkeypatch):
    """[(images, chosen operations, magnitudes)] of all calls of operations, which change nothing."""
    seen = []
    for module in (rand_augment, aug_mix):
        monkeypatch.setattr(module, "apply_operations", lambda x, names, *drawn: (x, seen.append((x, *drawn)))[0])
    return seen


def test_every_operation_is_drawn_and_directions_are_even(noted):
    """Each of the N operations is uniform over the 14; half of those with a direction have the opposite one."""
    torch.manual_seed(0)
    RandAugment(N=3).augmented(torch.rand(2000, 1, 8, 8))
    assert len(noted) == 3
    chosen, magnitudes = (torch.cat(parts) for parts in list(zip(*noted))[1:])
    assert torch.bincount(chosen, minlength=14).min() > 6000 / 14 * 0.8
    rotated = magnitudes[chosen == 5]  # the sixth of the table
    assert (rotated > 0).double().mean().item() == pytest.approx(0.5, abs=0.08)
    assert rotated.abs().unique().tolist() == [9.0]


def test_it_comes_after_the_augmentation_and_can_be_repeated():
    """Only training batches are changed; `prepare` repeats the same operations; N = 0 does not change the batch."""
    data = small_data(colour_images(8), validation=2, augment=lambda x: x.flip(-1))
    round, positions = small_round(data), np.arange(6)
    plain = data.batch(positions)
    assert data.batch(positions, RandAugment(N=0).begin(round), late=True).images.equal(plain.images)
    torch.manual_seed(3)
    batch = data.batch(positions, RandAugment().begin(round), late=True)
    assert batch.raw.equal(plain.raw)
    assert not batch.images.equal(plain.images)
    assert batch.prepare(batch.raw).equal(batch.images)
    torch.manual_seed(3)
    assert batch.augmented.equal(RandAugment().augmented(plain.raw.flip(-1)))
    assert next(data.evaluation(data.validation, 8))[0].equal(data.raw(data.validation))


def test_augmix_mixes_chains(noted, monkeypatch):
    """If operations have no effect, the mixture is the image; chains have 1 to 3 operations; 1 - m ~ Beta(1, 1)."""
    x = images()
    assert torch.allclose(mixed(x), x, atol=1e-6)
    depths = [len(part) for part, _, _ in noted]
    assert depths[0] == 3 * 6  # the first operation of three chains of six images
    assert len(depths) <= 3
    assert depths == sorted(depths, reverse=True)
    noted.clear()
    mixed(x, width=2, depth=2)
    assert [len(part) for part, _, _ in noted] == [12, 12]
    monkeypatch.setattr(aug_mix, "apply_operations", lambda part, *rest: torch.ones_like(part))
    shares = mixed(torch.zeros(4000, 1, 1, 1)).flatten()  # 1 - m, m ~ Beta(1, 1)
    assert shares.mean().item() == pytest.approx(0.5, abs=0.02)
    assert shares.var().item() == pytest.approx(1 / 12, abs=0.01)
    monkeypatch.undo()
    assert not mixed(x).equal(x)
    assert mixed(x).min() >= 0
    assert mixed(x).max() <= 1


@pytest.mark.parametrize("alike", [True, False])
def test_chains_are_drawn_once_for_the_batch_or_for_each_image(alike, monkeypatch):
    """The weights of the chains and of the image itself are each image's own either way."""
    seen = []

    def note(part, names, chosen, magnitudes):
        seen.extend(zip(chosen.split(40), magnitudes.split(40)))  # the images of one chain after those of another
        return torch.ones_like(part)

    monkeypatch.setattr(aug_mix, "apply_operations", note)
    assert len(mixed(torch.zeros(40, 1, 4, 4), alike=alike).amax((1, 2, 3)).unique()) == 40
    assert 3 <= len(seen) <= 9
    assert {max(len(drawn.unique()) for drawn in draws) == 1 for draws in zip(*seen)} == {alike}
    assert {len(chosen) for chosen, _ in seen} == {40} or not alike  # a chain ends for all of its images


def test_wrong_settings_are_refused():
    with pytest.raises(UserError, match="strengths go from 0"):
        build_recipe(Experiment(method={"name": "randaugment", "rand_augment": {"M": 31}}))
    with pytest.raises(UserError, match="depth"):
        AugMix(depth=0).check(Experiment())
