"""Inference rules: numbers worked out by hand, and properties; statistics computed again on the unseen domain."""

import copy
import math

import pytest
import torch
from networks import build
from torch import nn

from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe
from fedsim.models.infer.alpha import FixedAlpha, RandomAlpha
from fedsim.models.infer.base import EvalMode
from fedsim.models.infer.ensemble import EnsembleOfLocalBN, mean_probabilities
from fedsim.models.infer.iabn import IABN
from fedsim.models.infer.mixnorm import MixNorm
from fedsim.models.infer.recompute import Recompute, groups
from fedsim.models.infer.statistics import RuledNorm
from fedsim.models.infer.tsmobn import TsmoBN
from fedsim.models.norms import BIN, DSON, XAN, MixIG
from fedsim.models.tasks import CLASSIFIES
from fedsim.settings.experiment import Experiment
from fedsim.tensors.kinds import Kind, tensor_kinds
from strategies.banks.own_batch_norm import OwnBatchNorm
from strategies.parts import ServerRound, Update


def predictions(rule, net, images, **more):
    with torch.inference_mode():
        return rule.begin(net, lambda: [images], **more)(images).clone()


def norm_of(mean, variance, eps=0.0):
    bn = nn.BatchNorm2d(1, eps=eps).eval()
    bn.running_mean.fill_(mean)
    bn.running_var.fill_(variance)
    return bn


def is_close(found, expected, atol=1e-4):
    torch.testing.assert_close(found, expected, atol=atol, rtol=atol)


NEUTRAL = [FixedAlpha(alpha=0.0), RandomAlpha(high=0.0), IABN(k=1e4), MixNorm(m=0.0), TsmoBN(tau=1.0, init="global")]


@pytest.mark.parametrize("rule", [*NEUTRAL, Recompute()], ids=lambda rule: type(rule).__name__)
def test_neutral_settings_give_eval_mode_and_leave_the_network_alone(net, digits, rule):
    before = copy.deepcopy(net.state_dict())
    found, expected = predictions(rule, net, digits), predictions(EvalMode(), net, digits)
    if rule in NEUTRAL:
        is_close(found, expected)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not any(isinstance(module, RuledNorm) for module in net.modules())


@pytest.mark.parametrize(
    "rule", [EvalMode(), FixedAlpha(), IABN(k=1.0), MixNorm(m=0.3)], ids=lambda r: type(r).__name__
)
def test_inductive_rules_are_per_image_whatever_the_order(net, digits, rule):
    whole = predictions(rule, net, digits)
    is_close(torch.cat([predictions(rule, net, image[None]) for image in digits]), whole, 1e-5)
    is_close(predictions(rule, net, digits.flip(0)).flip(0), whole, 1e-5)
    if not isinstance(rule, EvalMode):
        assert not torch.allclose(whole, predictions(EvalMode(), net, digits), atol=1e-3)


def around(mean, *offsets):
    return torch.tensor([mean + offset for offset in offsets]).view(1, 1, 1, -1)


FOUR = (1.5**0.5, 1.5**0.5, -(1.5**0.5), -(1.5**0.5))  # unbiased variance 2, and biased 1.5


@pytest.mark.parametrize(("rule", "own", "maps", "mu", "variance"), [
    (FixedAlpha(alpha=0.5), (0, 9), [around(4.0, -1, 1)], 2, 4),  # deviations are mixed: (1 + 3) / 2
    (FixedAlpha(alpha=1.0), (0, 9), [around(4.0, -1, 1)], 4, 1),
    (IABN(k=1), (0, 1), [around(0.8, *FOUR)], 0.3, 1.183503),  # 2 - sqrt(2/3)
    (IABN(k=100), (0, 1), [around(0.8, *FOUR)], 0, 1), (IABN(k=0), (0, 1), [around(-0.8, *FOUR)], -0.8, 2),
    (MixNorm(views=1, m=0.4), (0, 4), [around(2.0, -1, 1)], 0.8, 0.4 * 1 + 0.6 * 4),
    (TsmoBN(init="global"), (0, 1), [around(2.0, -1, 1)], 0.2, 1),
    (TsmoBN(init="global"), (0, 1), [around(2.0, -1, 1)] * 2, 0.38, 1),
    (TsmoBN(), (0, 4), [around(2.0, -1, 1)], 2, 1),
    (TsmoBN(), (0, 4), [around(2.0, -1, 1), around(3.0, -1, 1)], 2.1, 1),
    (TsmoBN(tau=0.0), (0, 4), [around(2.0, -1, 1), around(5.0, -2, 2)], 5, 4),
])  # fmt: skip
def test_statistics_on_numbers(rule, own, maps, mu, variance):
    """By which the last of these maps is normalized, with the layer's weight 2 and bias 1."""
    net = nn.Sequential(norm_of(*map(float, own)))
    nn.init.constant_(net[0].weight, 2)
    nn.init.constant_(net[0].bias, 1)
    predict = rule.begin(net, tuple)
    found = [predict(each) for each in maps][-1]
    is_close(found, 2 * (maps[-1] - mu) / math.sqrt(variance) + 1)


def test_tsmobn_starts_anew_in_every_evaluation(net, digits):
    is_close(predictions(TsmoBN(tau=0.0), net, digits), copy.deepcopy(net).train()(digits))
    images, rule = torch.rand(10, 1, 28, 28), TsmoBN(batch=4)
    assert torch.equal(predictions(rule, net, images), predictions(rule, net, images))
    predict = rule.begin(net, tuple)
    assert not torch.equal(predict(images), predict(images))  # within one evaluation it goes on tracking


def test_random_alpha_draws_for_samples_and_layers_in_turn():
    net, x = nn.Sequential(nn.BatchNorm2d(1), nn.BatchNorm2d(1)), torch.rand(5, 1, 3, 3)
    found, generator = RandomAlpha(seed=1).begin(net, tuple)(x), torch.Generator().manual_seed(1)
    for _ in range(2):
        alpha = torch.rand(5, 1, generator=generator)[:, :, None, None]
        variance, mean = torch.var_mean(x, dim=(2, 3), correction=0, keepdim=True)
        std, std_g = torch.sqrt(variance + 1e-5), torch.tensor(1 + 1e-5).sqrt()
        x = (x - alpha * mean) / (alpha * std + (1 - alpha) * std_g)
    is_close(found, x, 1e-5)


def test_statistics_over_several_images_or_views_exist_on_one_pixel_maps():
    """Values -1, 5 of one channel: mean 2, biased variance 9. A single value changes no statistics."""
    net = nn.Sequential(norm_of(1.0, 4.0))
    pair, single = torch.tensor([-1.0, 5.0]).view(2, 1, 1, 1), torch.full((1, 1, 1, 1), 3.0)
    is_close(RuledNorm(norm_of(1.0, 4.0), None)(single), torch.ones(1, 1, 1, 1))
    for init in ("global", "first_batch"):
        predict = TsmoBN(tau=0.0, init=init).begin(net, [])
        found = [predict(images).flatten().tolist() for images in (single, pair, single)]
        assert found == [pytest.approx(each, abs=1e-4) for each in ([1], [-1, 1], [1 / 3])]
    # All views of a single pixel are the pixel: mean 3, variance 0; m = 0.5 gives mean 2 and variance 2.
    is_close(MixNorm(m=0.5, views=2).begin(net, [])(single), torch.full((1, 1, 1, 1), 2**-0.5))
    is_close(MixNorm(m=0.5, views=1).begin(net, [])(single), torch.ones(1, 1, 1, 1))


def test_ensemble_of_sets_that_others_see(net, digits):
    """Probabilities are averaged over the clients' sets: statistics of two layers, or all tensors of their norms."""
    recipe = build_recipe(Experiment(method={"name": "fedavg", "infer": "ensemble_of_local_bn"}))
    assert "third parties" in recipe.disclosure()
    is_close(mean_probabilities([torch.tensor([row]).log() for row in ([0.9, 0.1], [0.3, 0.7])]).exp(),
             torch.tensor([[0.6, 0.4]]))  # by logits the first one would be 0.662614  # fmt: skip
    state = {name: value.numpy() for name, value in net.state_dict().items()}

    def own_set(places):
        server = ServerRound(1, 3, ["a"], {}, places=places, kinds=tensor_kinds(net))
        return list(OwnBatchNorm().gather(Update("a", 1, state), server))

    names = own_set(dict.fromkeys(state, "shared"))
    assert len(names) == 4
    assert len(own_set({name: "upload" if "norm" in name else "shared" for name in state})) == 8  # no counters
    plain = predictions(EvalMode(), net, digits).log_softmax(1)
    own = {name: net.state_dict()[name].clone() for name in names}
    other = {name: value * 2 + 0.1 for name, value in own.items()}
    equal, mixed, alone, none = (predictions(EnsembleOfLocalBN(), net, digits, uploads=sets)
                                 for sets in ([own, own, own], [own, other], [other], []))  # fmt: skip
    is_close(equal, plain)
    is_close(none.log_softmax(1), plain)
    is_close(mixed.exp(), (plain.exp() + alone.exp()) / 2)
    assert not torch.allclose(mixed, plain, atol=1e-3)


def test_accuracy_and_loss():
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0]])
    batches = [(logits[:2], torch.tensor([0, 0])), (logits[2:], torch.tensor([0]))]
    accuracy, loss, count = CLASSIFIES.measure(lambda images: images, batches)
    assert (accuracy, count) == (pytest.approx(2 / 3), 3)
    assert loss == pytest.approx((2 * math.log(1 + math.exp(-2)) + math.log(1 + math.exp(2))) / 3)
    assert all(math.isnan(value) for value in CLASSIFIES.measure(lambda images: images, [])[:2])


def begun(net, images, size=None, batch=64):
    return Recompute(batch).begin(net, lambda: images.split(size or len(images)))


def statistics(net):
    return {name: value.clone() for name, value in net.state_dict().items() if "running" in name}


def test_statistics_are_pooled_over_groups_of_images_and_known_kinds(digits):
    """Groups of 2 and 3 vectors: the mean and the second moment count every vector once."""
    new = begun(nn.Sequential(nn.BatchNorm1d(1)), torch.tensor([[0.0], [2.0], [10.0], [11.0], [12.0]]), batch=2)[0]
    assert new.running_mean.item() == pytest.approx(7.0)
    within = (2 * 2.0 + 3 * 1.0) / 5  # the unbiased variances of the groups, as batch norm itself keeps them
    assert new.running_var.item() == pytest.approx(within + (2 * 6.0**2 + 3 * 4.0**2) / 5)
    assert [len(group) for group in groups([torch.zeros(9, 1), torch.zeros(4, 1)], 4)] == [4, 4, 5]
    odd = nn.Identity()
    odd.tensor_kinds = {"seen": Kind.BN_STATISTICS}
    odd.register_buffer("seen", torch.zeros(1))
    with pytest.raises(UserError, match=r"recompute does not know how to compute 0\.seen again"):
        begun(nn.Sequential(odd), digits)


NORMS = [None, MixIG(), MixIG(local="bin"), XAN(), BIN(), DSON()]


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm).__name__)
def test_every_norm_with_running_statistics_is_recomputed(digits, norm):
    """One group: the new statistics are those of a training batch, and predictions those of training mode."""
    net = build("digits-cnn-bn", norm, channels=1, size=28, bottleneck=16)
    before = copy.deepcopy(net.state_dict())
    new, reference = begun(net, digits), copy.deepcopy(net).train()
    for module in reference.modules():
        if hasattr(module, "momentum"):
            module.momentum = 1.0
    expected = reference(digits)
    torch.testing.assert_close(statistics(new), statistics(reference))
    torch.testing.assert_close(new(digits), expected, atol=5e-2, rtol=5e-2)  # biased variances, running ones unbiased
    assert not torch.allclose(new(digits), EvalMode().begin(net, tuple)(digits), atol=1e-2)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("count", [0, 1])
def test_without_two_images_there_are_no_statistics(digits, count):
    with pytest.raises(UserError, match="recompute needs at least two images of the unseen domain"):
        begun(build("digits-cnn-bn", channels=1, size=28), digits[:count], 8)
