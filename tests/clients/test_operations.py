"""RandAugment and AugMix, compared with torchvision's, and FedCCRL's step: its views and its losses by hand."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_round import colour_images, ready_round, small_data, small_net, small_round, step_of

from clients.augment import aug_mix, rand_augment
from clients.augment.aug_mix import AugMix, mixed
from clients.augment.operations import apply_operations
from clients.augment.rand_augment import RandAugment, magnitude_table
from clients.objective.aligned_views import AlignedViews, contrast_of, drawn_rows, eight_bit, rows_of
from clients.tools.losses import js_divergence
from fedsim.common.errors import UserError
from fedsim.data.augment import to_float
from fedsim.methods.assembly import assemble, build_recipe
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
    from torchvision.transforms import v2

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
    from torchvision.transforms import v2

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
    assert data.batch(positions, RandAugment(N=0).begin(round), moment="augmented").images.equal(plain.images)
    torch.manual_seed(3)
    batch = data.batch(positions, RandAugment().begin(round), moment="augmented")
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
    assert 0 <= mixed(x).min() <= mixed(x).max() <= 1


def test_wrong_settings_are_refused():
    with pytest.raises(UserError, match="strengths go from 0"):
        build_recipe(Experiment(method={"name": "randaugment", "rand_augment": {"M": 31}}))
    with pytest.raises(UserError, match="depth"):
        AugMix(depth=0).check(Experiment())


ROWS = {"mean": np.full((4, 3), 0.7, np.float32), "std": np.full((4, 3), 0.2, np.float32)}


def one_step(part, rows=None):
    """(loss, round) of one step on twelve images."""
    round = ready_round(small_net(), {"pixel_stats": ROWS if rows is None else rows}, 12)
    torch.manual_seed(3)
    return step_of(part, round)(round.data.batch(np.arange(12))), round


@pytest.mark.parametrize(
    ("labels", "t", "paper", "official"),
    [([0, 1], 0.1, 0.301136, -0.431097), ([0, 1], 1.0, 0.820488, 0.747264), ([0, 0], 1.0, 1.153821, 1.033876)],
)
def test_contrast(labels, t, paper, official):
    u, v, labels = torch.eye(2), torch.tensor([[1.0, 1.0], [0.0, 2.0]]), torch.tensor(labels)
    for own, wanted in ((False, paper), (True, official)):
        assert contrast_of([v, u], labels, t, own).item() == pytest.approx(wanted, abs=2e-6)
        assert contrast_of([v, u, u], labels, t, own).item() == pytest.approx(wanted, abs=2e-6)


def test_values_outside_and_the_statistics_of_a_view(unmixed, monkeypatch):
    """As a conversion without a clamp leaves them, 1.04 is 265 - 256 = 9, and -10.4 of 255 is 256 - 10 = 246. lam =
    0: mean .5 and standard deviation .1 in all channels; lam = 1: nothing changes."""
    x = torch.tensor([1.04, -10.4 / 255, 265.7 / 255, 0.5])
    assert (255 * eight_bit(x)).tolist() == pytest.approx([255, 0, 255, 128], abs=1e-4)
    assert (255 * eight_bit(x, wraps=True)).tolist() == pytest.approx([9, 246, 9, 127], abs=1e-4)
    values = torch.arange(256) / 255
    assert eight_bit(values).equal(values)
    monkeypatch.setattr(torch.distributions.Beta, "sample", lambda self, shape: torch.arange(shape[0]) % 2.0)
    x = to_float(torch.from_numpy(colour_images(8)))
    styles = torch.full((1, 3, 1, 1), 0.5), torch.full((1, 3, 1, 1), 0.1)
    moved = AlignedViews().changed(x, styles)
    assert moved[1::2].equal(x[1::2])
    assert torch.allclose(moved[::2].mean((2, 3)), torch.full((4, 3), 0.5), atol=1e-3)
    assert torch.allclose(moved[::2].std((2, 3)), torch.full((4, 3), 0.1), atol=1e-3)
    assert AlignedViews(p=0.0).changed(x, styles).equal(x)


def test_the_loss_is_the_sum_of_its_terms():
    """3 CE + lambda2 JS + lambda1 SC, with a gradient through every view."""
    part = AlignedViews(lambda1=0.3, lambda2=0.2)
    loss, round = one_step(part)
    found, batch, net, styles = round.tallied(), round.data.batch(np.arange(12)), small_net(), part.styles(round)
    torch.manual_seed(3)
    views = [batch.images, *(batch.normalize(part.changed(batch.augmented, styles)) for _ in range(2))]
    features = [net.features(view) for view in views]
    logits = [net.head(own) for own in features]
    assert found["js_loss"] == pytest.approx(js_divergence(logits).item(), rel=1e-4)
    assert found["contrast_loss"] == pytest.approx(contrast_of(features, batch.labels, 0.1).item(), rel=1e-4)
    assert int(round.net.state_dict()["backbone.1.num_batches_tracked"]) == 3
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


def test_the_official_variant_reaches_the_views_the_contrast_and_the_bank(unmixed):
    for name, own in (("paper", False), ("official", True)):
        round = one_step(AlignedViews(variant=name, p=0.0, views=1))[1]
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
    assert AlignedViews().styles(round) is AlignedViews().styles(round) is None
    assert caplog.text.count("no statistics of other clients' images") == 1
    x, views = to_float(round.data.images), []
    for change in (lambda: AlignedViews().changed(x, None), lambda: mixed(x)):
        torch.manual_seed(5)
        views.append(change())
    assert views[0].equal(views[1])
    loss, round = one_step(AlignedViews(), rows={})
    assert all(value.isfinite().all() for value in (loss, *round.net.parameters()))


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
