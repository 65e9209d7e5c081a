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
    EvalMode,
    FixedAlpha,
    MixNorm,
    RandomAlpha,
    Recompute,
    TsmoBN,
    ZeroShotAdapter,
    accuracy_and_loss,
)
from fedsim.models.infer.alpha import mix_by
from fedsim.models.infer.iabn import instance_aware
from fedsim.models.infer.statistics import RuledNorm
from fedsim.settings.experiment import Experiment

RULES = tuple(parts_by_slot()["infer"].values())


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def predictions(rule, net, images, **more):
    with torch.inference_mode():
        return rule.begin(net, lambda: [images], **more)(images).clone()


def instance_norm_network(net):
    net = copy.deepcopy(net).eval()
    for module in net.modules():
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                norm = nn.InstanceNorm2d(child.num_features, eps=child.eps, affine=True)
                norm.load_state_dict({"weight": child.weight, "bias": child.bias})
                setattr(module, name, norm)
    return net


def norm_of(mean, variance, eps=0.0):
    bn = nn.BatchNorm2d(1, eps=eps).eval()
    bn.running_mean.fill_(mean)
    bn.running_var.fill_(variance)
    return bn


def test_eval_mode_is_independent_of_batch_and_order(net, digits):
    whole = predictions(EvalMode(), net, digits)
    apart = torch.cat([predictions(EvalMode(), net, image[None]) for image in digits])
    torch.testing.assert_close(apart, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(predictions(EvalMode(), net, digits.flip(0)).flip(0), whole, atol=1e-5, rtol=1e-5)


NEUTRAL = [FixedAlpha(alpha=0.0), RandomAlpha(high=0.0), IABN(k=1e4), MixNorm(m=0.0), TsmoBN(tau=1.0, init="global")]


@pytest.mark.parametrize("rule", [*NEUTRAL, Recompute()], ids=lambda rule: type(rule).__name__)
def test_neutral_settings_give_eval_mode_and_leave_the_network_alone(net, digits, rule):
    before = copy.deepcopy(net.state_dict())
    expected = predictions(EvalMode(), net, digits)
    found = predictions(rule, net, digits)
    if rule in NEUTRAL:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not any(isinstance(module, RuledNorm) for module in net.modules())


INDUCTIVE = [FixedAlpha(), IABN(k=1.0), MixNorm(m=0.3)]


@pytest.mark.parametrize("rule", INDUCTIVE, ids=lambda rule: type(rule).__name__)
def test_inductive_rules_are_per_image(net, digits, rule):
    whole = predictions(rule, net, digits)
    apart = torch.cat([predictions(rule, net, image[None]) for image in digits])
    torch.testing.assert_close(apart, whole, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(whole, predictions(EvalMode(), net, digits), atol=1e-3)
    assert not rule.transductive


def test_only_rules_that_look_at_the_target_are_transductive():
    assert {rule.__name__ for rule in RULES if rule.transductive} == {"Recompute", "TsmoBN"}
    assert {rule.__name__ for rule in RULES if rule.shuffled} == {"Recompute", "TsmoBN"}
    assert {rule.__name__ for rule in RULES if rule.on_sources} == {"ZeroShotAdapter", "SampledRepresentation"}


# -------------------------------------------------------------------------------------------------------------- TsmoBN


def tracked_means(rule, values, bn):
    tracker = rule._tracker()
    return [tracker(torch.full((4, 1), value), torch.ones(4, 1), bn, 9)[0].item() for value in values]


def test_tsmobn_tracks():
    bn = norm_of(0.0, 1.0)
    assert tracked_means(TsmoBN(init="global"), [2.0, 2.0], bn) == pytest.approx([0.2, 0.38])
    assert tracked_means(TsmoBN(), [2.0, 3.0], bn) == pytest.approx([2.0, 2.1])
    assert tracked_means(TsmoBN(tau=0.0), [2.0, 5.0], bn) == pytest.approx([2.0, 5.0])


def test_tsmobn_with_tau_0_is_batch_norm_of_the_current_batch(net, digits):
    ours = predictions(TsmoBN(tau=0.0), net, digits)
    torch.testing.assert_close(ours, copy.deepcopy(net).train()(digits), atol=1e-4, rtol=1e-4)


def test_tsmobn_starts_anew_in_every_evaluation(net):
    images = torch.rand(10, 1, 28, 28)
    rule = TsmoBN(batch=4)
    first, again = predictions(rule, net, images), predictions(rule, net, images)
    assert torch.equal(first, again)
    predict = rule.begin(net, tuple)
    with torch.inference_mode():
        assert not torch.equal(predict(images), predict(images))  # within one evaluation it goes on tracking


# ---------------------------------------------------------------------------------------------------- IABN and MixNorm


def test_iabn_numbers():
    one, zero = torch.ones(1), torch.zeros(1)
    mean, variance = instance_aware(zero + 0.8, one * 2, zero, one, positions=4, k=1)
    assert mean.item() == pytest.approx(0.3)
    assert variance.item() == pytest.approx(2 - math.sqrt(2 / 3))
    assert variance.item() == pytest.approx(1.183503, abs=1e-6)
    mean, variance = instance_aware(zero + 0.8, one * 2, zero, one, positions=4, k=100)
    assert (mean.item(), variance.item()) == (0.0, 1.0)
    mean, variance = instance_aware(zero - 0.8, one * 2, zero, one, positions=4, k=0)
    assert (mean.item(), variance.item()) == pytest.approx((-0.8, 2.0))


def test_iabn_with_k_0_is_instance_norm_with_unbiased_variance(trained_bn, images):
    layer = IABN(k=0).begin(nn.Sequential(trained_bn), tuple)[0]
    variance, mean = torch.var_mean(images, dim=(2, 3), keepdim=True)
    expected = (images - mean) / torch.sqrt(variance + trained_bn.eps)
    shape = (1, 4, 1, 1)
    expected = expected * trained_bn.weight.view(shape) + trained_bn.bias.view(shape)
    torch.testing.assert_close(layer(images), expected, atol=1e-4, rtol=1e-4)


def test_mixnorm_numbers():
    rule = MixNorm(views=2).begin(nn.Sequential(norm_of(0.0, 1.0)), tuple)
    ruled = next(cell.cell_contents for cell in rule.__closure__ if isinstance(cell.cell_contents, nn.Module))[0].rule
    mean, std = ruled(torch.tensor([[1.0], [3.0]]), torch.ones(2, 1), norm_of(0.0, 1.0), 4)  # two views of one image
    assert mean.flatten().tolist() == pytest.approx([0.1, 0.1])
    assert std[0].item() == pytest.approx(math.sqrt(0.05 * (1 + 1) + 0.95))


def test_mixnorm_with_one_view_mixes_variances(net, digits):
    ours = predictions(MixNorm(views=1, m=0.4), net, digits)
    fixed = FixedAlpha(alpha=0.4).begin(net, tuple)
    for module in fixed.modules():
        if isinstance(module, RuledNorm):
            module.rule = lambda mean, variance, bn, positions: (
                0.4 * mean + 0.6 * bn.running_mean,
                torch.sqrt(0.4 * variance + 0.6 * bn.running_var + bn.eps),
            )
    with torch.inference_mode():
        torch.testing.assert_close(ours, fixed(digits), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(ours, predictions(FixedAlpha(alpha=0.4), net, digits), atol=1e-5)


def test_mixnorm_views():
    images = torch.rand(3, 2, 20, 30)
    views = MixNorm(views=5).make_views(images).view(5, 3, 2, 20, 30)
    assert torch.equal(views[0], images)
    assert not any(torch.equal(view, images) for view in views[1:])
    assert torch.equal(MixNorm(views=5).make_views(images[1:2]).view(5, 2, 20, 30), views[:, 1])


# ------------------------------------------------------------------------------------------------------------ alpha


def test_alpha_mixes_standard_deviations():
    bn = norm_of(0.0, 9.0)
    mean, std = mix_by(0.5, torch.tensor([[4.0]]), torch.tensor([[1.0]]), bn)
    assert ((6 - mean) / std).item() == pytest.approx(2.0)
    assert ((6 - mean) / math.sqrt(0.5 * 1 + 0.5 * 9)).item() == pytest.approx(1.788854, abs=1e-6)


def test_alpha_1_is_instance_norm(net, digits):
    with torch.no_grad():
        expected = instance_norm_network(net)(digits)
    torch.testing.assert_close(predictions(FixedAlpha(alpha=1.0), net, digits), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bounds", [{"low": 0.6, "high": 0.4}, {"low": -0.1}, {"high": 1.1}])
def test_random_alpha_has_bounds(bounds):
    with pytest.raises(UserError, match=r"random_alpha\.(low|high)"):
        build_recipe(Experiment(method={"name": "fedig", "infer": "random_alpha"}, parts={"random_alpha": bounds}))


def test_random_alpha_is_reproducible_and_differs_between_samples(net, digits):
    same = digits[:1].repeat(4, 1, 1, 1)
    first, again = predictions(RandomAlpha(), net, same), predictions(RandomAlpha(), net, same)
    assert torch.equal(first, again)
    assert not torch.allclose(first[0], first[1], atol=1e-4)
    assert not torch.equal(predictions(RandomAlpha(seed=1), net, same), first)


# ------------------------------------------------------------------------------------------------------ combinations


def test_one_pixel_maps_stay_plain():
    layer = RuledNorm(norm_of(1.0, 4.0), None)
    torch.testing.assert_close(layer(torch.full((2, 1, 1, 1), 3.0)), torch.ones(2, 1, 1, 1))


def test_statistics_over_several_images_or_views_exist_on_one_pixel_maps():
    """On a 1 x 1 map tau = 0 is the batch norm of the current batch; MixNorm's are over its views.

    Values -1, 5 of one channel: mean 2, biased variance 9. A single value changes no statistics.
    """
    net = nn.Sequential(norm_of(1.0, 4.0))
    pair, single = torch.tensor([-1.0, 5.0]).view(2, 1, 1, 1), torch.full((1, 1, 1, 1), 3.0)
    for init in ("global", "first_batch"):
        predict = TsmoBN(tau=0.0, init=init).begin(net, [])
        torch.testing.assert_close(predict(single), torch.ones(1, 1, 1, 1))
        torch.testing.assert_close(predict(pair), torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1), atol=1e-4, rtol=0)
        torch.testing.assert_close(predict(single), torch.full((1, 1, 1, 1), 1 / 3), atol=1e-4, rtol=0)
    # All views of a single pixel are the pixel: mean 3, variance 0; m = 0.5 gives mean 2 and variance 2.
    mixed = MixNorm(m=0.5, views=2).begin(net, [])(single)
    torch.testing.assert_close(mixed, torch.full((1, 1, 1, 1), 2**-0.5), atol=1e-4, rtol=0)
    torch.testing.assert_close(MixNorm(m=0.5, views=1).begin(net, [])(single), torch.ones(1, 1, 1, 1))


def test_recompute_equals_statistics_of_the_test_images(net, digits):
    expected = copy.deepcopy(net).train()(digits)  # biased variances, where running ones are unbiased
    torch.testing.assert_close(predictions(Recompute(), net, digits), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("rule", ["fixed_alpha", "random_alpha", "iabn", "mix_norm", "tsmo_bn", "ensemble_of_local_bn"])
def test_rules_are_settings_of_any_method_with_batch_norm(rule):
    for method in ("fedavg", "fedbn", "fedig", "fedig-a"):
        recipe = build_recipe(Experiment(method={"name": method, "infer": rule}))
        assert type(recipe.infer) in RULES
    if rule != "ensemble_of_local_bn":
        with pytest.raises(UserError, match="by their own statistics, which does not hold with xan"):
            build_recipe(Experiment(method={"name": "gperxan", "infer": rule}))
    else:
        assert "third parties" in recipe.disclosure()


def test_adapter_rule_needs_adapters(net):
    with pytest.raises(UserError, match="adapter = true"):
        ZeroShotAdapter().begin(net, tuple)


def test_accuracy_and_loss():
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0]])
    batches = [(logits[:2], torch.tensor([0, 0])), (logits[2:], torch.tensor([0]))]
    accuracy, loss, count = accuracy_and_loss(lambda images: images, batches)
    assert (accuracy, count) == (pytest.approx(2 / 3), 3)
    assert loss == pytest.approx((2 * math.log(1 + math.exp(-2)) + math.log(1 + math.exp(2))) / 3)
    assert all(math.isnan(value) for value in accuracy_and_loss(lambda images: images, [])[:2])
