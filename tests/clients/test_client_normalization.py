"""FedRDN: images normalized by statistics of clients, on numbers worked out by hand and on small runs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_round import small_data, small_net, small_round

from clients.augment.client_normalization import ClientNormalization, statistics_of
from fedsim.common.errors import UserError
from fedsim.data.augment import Normalization
from fedsim.models.infer.target_normalization import TargetNormalization, image_moments, normalized
from fedsim.runs.workspace import Workspace
from fedsim.testing.contract import run_watched, small_plan
from strategies.banks.image_moments import ImageMoments
from strategies.parts import ServerRound

TWO = torch.tensor([[[[0, 0.2], [0.4, 0.2]]], [[[0.1, 0.1], [0.3, 0.7]]]])
MEANS, STDS = torch.tensor([[0.5], [0.2]]), torch.tensor([[0.25], [0.1]])
QUOTIENTS = {(0, 0): 0.4, (0, 1): 1.0, (1, 0): 1.6, (1, 1): 4.0}  # of 0.6, by the clients of the mean and the deviation
FEW = ("data.fraction=0.05", "train.rounds=1", "train.iterations=2")


def row(mean, std):
    return {"mean": np.array([mean], np.float32), "std": np.array([std], np.float32)}


def two_clients(**changes):
    """A transfer of the part for a client that has the statistics of two."""
    records = {"image_moments": {"mean": MEANS.numpy(), "std": STDS.numpy()}}
    return ClientNormalization(**changes).begin(small_round(records=records))


def test_moments_are_means_over_images():
    mean, std = image_moments([TWO])
    assert (mean.shape, std.shape) == ((1, 1), (1, 1))
    assert (mean.item(), std.item()) == pytest.approx((0.25, 0.2230710143), abs=1e-7)
    one_by_one = image_moments([TWO[:1], TWO[1:]])
    assert torch.equal(torch.stack(one_by_one), torch.stack((mean, std)))


@pytest.mark.parametrize(("pair", "quotient"), QUOTIENTS.items())
def test_quotients(pair, quotient):
    mean, std = MEANS[[pair[0]]], STDS[[pair[1]]]
    assert normalized(torch.full((2, 1, 3, 3), 0.6), mean, std) == pytest.approx(torch.full((2, 1, 3, 3), quotient))


def test_a_mean_and_a_deviation_are_drawn_for_each_batch():
    """All four pairs come, as often as each other, and one holds for the whole batch."""
    torch.manual_seed(0)
    transfer, images = two_clients(), torch.full((5, 1, 2, 2), 0.6)
    values = [transfer(images, np.arange(5)) for _ in range(400)]
    assert all(len(value.unique()) == 1 for value in values)
    counts = {q: sum(value[0, 0, 0, 0].item() == pytest.approx(q) for value in values) for q in QUOTIENTS.values()}
    assert sum(counts.values()) == 400
    assert all(70 < count < 130 for count in counts.values())


def test_the_pair_of_one_client_is_drawn_for_each_image():
    torch.manual_seed(0)
    values = two_clients(draw="image")(torch.full((400, 1, 2, 2), 0.6), np.arange(400))[:, 0, 0, 0]
    shares = [(values - q).abs().lt(1e-5).float().mean().item() for q in (0.4, 4.0)]
    assert sum(shares) == pytest.approx(1)
    assert 0.4 < shares[0] < 0.6


def test_all_versions_of_a_batch_get_its_draws():
    """Other versions of the images repeat the draws of the first ones, and the next batch has new ones."""
    data = small_data(np.full((6, 1, 4, 4), 153, np.uint8), augment=lambda x: x + torch.rand(()))
    torch.manual_seed(0)
    pairs = set()
    for _ in range(20):
        batch = data.batch(np.arange(6), two_clients(), "normalized")
        state = torch.get_rng_state()
        assert torch.equal(batch.normalize(batch.augmented), batch.images)
        assert torch.equal(batch.prepare(batch.raw), batch.images)
        assert torch.equal(torch.get_rng_state(), state)
        back = {pair: batch.images * STDS[pair[1]] + MEANS[pair[0]] for pair in QUOTIENTS}
        (pair,) = [pair for pair, images in back.items() if torch.allclose(images, batch.augmented, atol=1e-5)]
        pairs.add(pair)
    assert len(pairs) > 2


def test_a_client_is_measured_by_its_own_statistics():
    """An evaluation has no draws, and gives images of mean 0; the statistics are those of training images alone."""
    images = np.concatenate([np.full((4, 1, 2, 2), 51), np.full((2, 1, 2, 2), 255)]).astype(np.uint8)
    images[:4, :, 0] = 153  # rows of 0.6 and of 0.2: mean 0.4, deviation sqrt(.04 * 4 / 3)
    data = small_data(images, validation=2)
    mean, std = statistics_of(data)
    assert (mean.item(), std.item()) == pytest.approx((0.4, 0.2309401077), abs=1e-6)
    plain = [shown for shown, _ in data.evaluation(data.validation, 8)]
    data.at_test = ClientNormalization().at_test(data)
    state = torch.get_rng_state()
    with torch.inference_mode():
        shown = [images for images, _ in data.evaluation(data.validation, 8)]
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(shown[0], (plain[0] - 0.4) / 0.2309401077)
    assert not data.at_test(plain[0]).is_inference()


def test_the_unseen_domain_gets_the_mean_of_the_clients_or_its_own():
    net = small_net().eval()
    images = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    uploads = [{"mean": torch.full((1, 3), m), "std": torch.full((1, 3), s)} for m, s in ((0.5, 0.25), (0.2, 0.1))]
    by_mean, by_own = TargetNormalization(), TargetNormalization(statistics="own")
    assert [(rule.transductive, rule.bank) for rule in (by_mean, by_own)] == [(False, "image_moments"), (True, "")]
    with torch.inference_mode():
        torch.testing.assert_close(by_mean.begin(net, tuple, uploads)(images), net((images - 0.35) / 0.175))
        pixels = images.flatten(2)
        mean, std = (value.mean(0)[:, None, None] for value in (pixels.mean(2), pixels.std(2)))
        predict = by_own.begin(net, lambda: iter(images.split(2)))
        torch.testing.assert_close(predict(images), net((images - mean) / std))
    with pytest.raises(UserError, match="a personal model has none"):
        by_mean.begin(net, tuple)


def test_the_bank_hands_all_rows_to_each_client_and_refuses_others():
    bank, server = ImageMoments(), ServerRound(1, 5, ["a", "b", "c"], {})
    entries = {"c": row([0.3], [0.2]), "a": row([0.5], [0.25])}
    rows = bank.hand_out(bank.merge({}, entries, server), "a", server)
    assert rows["mean"].ravel().tolist() == pytest.approx([0.5, 0.3])
    assert rows["std"].ravel().tolist() == pytest.approx([0.25, 0.2])
    assert bank.hand_out({}, "a", server) == {}
    assert bank.accept("a", entries["a"], server) == ""
    refused = [({"mean": rows["mean"]}, "expected"), (rows, "one row each"), (row([0.5], [0.0]), "does not vary"),
               (row([0.5], [0.1, 0.2]), "one row each"), (row([np.nan], [0.1]), "NaN")]  # fmt: skip
    for arrays, reason in refused:
        assert reason in bank.accept("a", arrays, server)


def test_the_normalization_of_the_data_set_changes_nothing(tmp_path):
    """(x - m) / s is the same for x and for (x - 0.1307) / 0.3081, in training, validation and on the unseen domain."""
    runs = [run_watched(small_plan("fedrdn", tmp_path / name, [*FEW, f"data.normalize={name}"]))
            for name in ("mnist", "none")]  # fmt: skip
    for name, value in runs[0].last.items():
        np.testing.assert_allclose(value, runs[1].last[name], rtol=1e-4, atol=1e-5, err_msg=name)
    for column in ("target_loss", "mean_validation_loss"):
        one, other = (run.rounds[column].to_numpy() for run in runs)
        np.testing.assert_allclose(one, other, rtol=1e-4)


@pytest.mark.parametrize(("method", "settings", "reason"), [
    ("fedrdn", ["method.infer=t3a"], "needs target_normalization there"),
    ("fedrdn+fada", [], "assumes that the network gets all images as data.normalize leaves them"),
    ("fedrdn+perada", [], "assumes that the network gets all images as data.normalize leaves them"),
    ("fedrdn+deepall", [], "several clients train"),
    ("fedavg", ["method.augment=client_normalization", "method.infer=eval_mode"], "needs target_normalization there"),
])  # fmt: skip
def test_what_it_refuses(tmp_path, method, settings, reason):
    with pytest.raises(UserError, match=reason) as error:
        small_plan(method, tmp_path, settings)
    assert len(str(error.value).splitlines()) == 1


def test_the_rule_brings_its_augmentation_and_its_bank(tmp_path):
    plan = small_plan("fedavg", tmp_path, ["method.infer=target_normalization"])
    assert [type(part) for part in (plan.recipe.augment, *plan.recipe.banks)] == [ClientNormalization, ImageMoments]
    own = small_plan("fedrdn", tmp_path, ["method.target_normalization.statistics=own"]).recipe
    assert (own.infer.transductive, "unseen domain" in own.disclosure()) == (True, False)


def test_pooled_data_are_measured_as_an_augmentation_says(tmp_path):
    """An augmentation of one's own changed pooled images in training alone, and `at_test` was never asked."""
    space = Workspace(small_plan("deepall", tmp_path, FEW))
    space.recipe = replace(space.recipe, augment=ClientNormalization())
    assert space.local_data("pooled").at_test is not None


def test_normalization_of_the_data_set_comes_first():
    data = small_data(np.full((6, 1, 4, 4), 153, np.uint8))
    data.transforms = type(data.transforms)(data.transforms.augment, Normalization((0.1,), (0.5,)))
    assert statistics_of(data)[0].item() == pytest.approx(1.0)
