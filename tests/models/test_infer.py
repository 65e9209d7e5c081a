"""Inference rules: numbers worked out by hand, and properties."""

import copy
import math

import pytest
import torch
from torch import nn

from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe
from fedsim.methods.registry import parts_by_slot
from fedsim.models.infer import (
    IABN,
    EnsembleOfLocalBN,
    EvalMode,
    FixedAlpha,
    MixNorm,
    RandomAlpha,
    Recompute,
    TsmoBN,
    accuracy_and_loss,
)
from fedsim.models.infer.ensemble import mean_probabilities
from fedsim.models.infer.statistics import RuledNorm
from fedsim.settings.experiment import Experiment
from fedsim.tensors.kinds import tensor_kinds
from strategies.banks.own_batch_norm import OwnBatchNorm
from strategies.parts import ServerRound, Update

RULES = tuple(parts_by_slot()["infer"].values())


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


def test_what_rules_look_at():
    for fact, names in (("transductive", {"Recompute", "TsmoBN"}), ("shuffled", {"Recompute", "TsmoBN"}),
                        ("on_sources", {"ZeroShotAdapter", "SampledRepresentation"})):  # fmt: skip
        assert {rule.__name__ for rule in RULES if getattr(rule, fact)} == names
    assert [TsmoBN().pass_size(wanted) for wanted in (256, 100, 64, 16)] == [256, 64, 64, 64]
    assert EvalMode().pass_size(100) == 100


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


def test_statistics_of_several_views(monkeypatch):
    """(0, 2) and (2, 4) have the mean 2 and the variance 2, which count 0.05 beside 0 and 1."""
    monkeypatch.setattr(MixNorm, "make_views", lambda self, images, draws: torch.cat([images, images + 2]))
    x = around(1.0, -1, 1)
    is_close(MixNorm(views=2).begin(nn.Sequential(norm_of(0.0, 1.0)), tuple)(x), (x - 0.1) / math.sqrt(0.05 * 2 + 0.95))


def test_views():
    images = torch.rand(3, 2, 20, 30)
    views = MixNorm(views=5).make_views(images).view(5, 3, 2, 20, 30)
    assert torch.equal(views[0], images)
    assert not any(torch.equal(view, images) for view in views[1:])
    assert torch.equal(MixNorm(views=5).make_views(images[1:2]).view(5, 2, 20, 30), views[:, 1])


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


@pytest.mark.parametrize(("method", "infer", "own", "said"), [
    ("gperxan", "tsmo_bn", {}, "by their own statistics, which does not hold with xan"),
    *(("fedig", "random_alpha", own, r"random_alpha\.(low|high)")
      for own in ({"low": 0.6, "high": 0.4}, {"low": -0.1}, {"high": 1.1})),
    ("fedavg", "zero_shot_adapter", {}, "adapter"),
])  # fmt: skip
def test_rules_and_bounds_that_do_not_fit(method, infer, own, said):
    with pytest.raises(UserError, match=said):
        build_recipe(Experiment(method={"name": method, "infer": infer}, parts={"random_alpha": own}))


def test_an_ensemble_says_that_others_see_the_sets():
    recipe = build_recipe(Experiment(method={"name": "fedavg", "infer": "ensemble_of_local_bn"}))
    assert "third parties" in recipe.disclosure()


def test_accuracy_and_loss():
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0]])
    batches = [(logits[:2], torch.tensor([0, 0])), (logits[2:], torch.tensor([0]))]
    accuracy, loss, count = accuracy_and_loss(lambda images: images, batches)
    assert (accuracy, count) == (pytest.approx(2 / 3), 3)
    assert loss == pytest.approx((2 * math.log(1 + math.exp(-2)) + math.log(1 + math.exp(2))) / 3)
    assert all(math.isnan(value) for value in accuracy_and_loss(lambda images: images, [])[:2])


def test_ensemble_of_sets(net, digits):
    """Probabilities are averaged over the clients' sets: statistics of two layers, or all tensors of their norms."""
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
