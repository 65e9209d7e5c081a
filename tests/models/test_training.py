"""`model.train`: what is trained and what is frozen. Inserts of two rows, whose names stand in any order."""

import itertools

import pytest
import torch
from networks import build, outline
from support import small_experiment

from fedsim.common.errors import UserError
from fedsim.methods.table import METHODS
from fedsim.models.hidden import hidden_layers
from fedsim.models.norms import BIN, DSON, IBN, XAN, MixIG
from fedsim.runs.plan import resolve


def trained(net):
    return net.state_dict().keys() - net.frozen


def test_words():
    assert build("digits-cnn-bn").frozen == build("digits-cnn-bn", train="head+all").frozen == frozenset()
    head = trained(outline("resnet18", train="head", bottleneck=8))
    assert {name.partition(".")[0] for name in head} == {"bottleneck", "head"}
    layer = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    norms = {f"backbone.norm{number}.{name}" for number in (1, 2) for name in layer}
    assert trained(outline("digits-cnn-bn", train="norm+head")) == norms | {"head.weight", "head.bias"}
    assert len(trained(outline("vit-b-32", train="norm+head"))) == 2 * (2 * 12 + 1) + 2
    pattern = outline("resnet18", train="backbone.layer4.1.*+head")
    block = {name for name in pattern.state_dict() if name.startswith("backbone.layer4.1.")}
    assert trained(pattern) == block | {"head.weight", "head.bias"}


@pytest.mark.parametrize(("norm", "added"), [
    (XAN(), {"inorm.weight", "inorm.bias", "s_bn", "s_in"}),
    (BIN(), {"rho"}),
    # the mixing weights are trained, so the running statistics, which follow what is normalized, are too
    (DSON(), {"theta_mean", "theta_var", "running_mean", "running_var", "num_batches_tracked"}),
    (MixIG(), set()),
    (IBN(), set()),  # its halves are copies of the channels that they took over
    (IBN("b"), set()),
])  # fmt: skip
def test_layers_of_a_part_keep_what_they_took_over(norm, added):
    found, prefix = trained(outline("digits-cnn-bn", norm, train="head")), "backbone.norm1."
    assert {name.removeprefix(prefix) for name in found if name.startswith(prefix)} == added


def test_channels_that_ibn_took_over_follow_their_layer():
    """They are trained where the replaced layer is. The instance norm that variant b adds is new, and trained."""
    moving, still = (outline("resnet18", IBN(), train=f"backbone.layer{stage}.*+head") for stage in (1, 2))
    own = {name for name in moving.state_dict() if name.startswith("backbone.layer1.0.bn1")}
    assert (len(own), own <= trained(moving), own & trained(still)) == (7, True, set())
    inorms = {f"backbone.layer{stage}.1.inorm.{name}" for stage in (1, 2) for name in ("weight", "bias")}
    assert trained(outline("resnet18", IBN("b"), train="head")) == inorms | {"head.weight", "head.bias"}


ROWS = [name for name, recipe in METHODS.items() if recipe.inserts]


def built(folder, method):
    try:
        return resolve(small_experiment(folder, method)).build_net()
    except UserError as error:
        return str(error)


def hooks(net):
    return {path: (len(m._forward_pre_hooks), len(m._forward_hooks)) for path, m in net.named_modules()}


def test_the_order_of_names_does_not_change_the_network(tmp_path):
    for pair in itertools.combinations(ROWS, 2):
        one, two = (built(tmp_path, "+".join(names)) for names in (pair, pair[::-1]))
        assert isinstance(one, str) == isinstance(two, str), pair
        if isinstance(one, str):
            continue
        first, second = one.state_dict(), two.state_dict()
        assert list(first) == list(second), pair
        assert all(torch.equal(first[name], second[name]) for name in first), pair
        assert (one.frozen, hooks(one)) == (two.frozen, hooks(two)), pair


@pytest.mark.parametrize("pair", ["feddrop+fada", "feddrop+jigen", "feddrop+selfreg"])
def test_every_layer_of_dropped_units_is_scaled(tmp_path, pair):
    """FedDrop's scale reads the finished network: every layer after dropped units has it, and no other layer."""
    net = built(tmp_path, pair)
    readers = {layer.reader for layer in hidden_layers(net)}
    assert readers == {path for path, (before, _) in hooks(net).items() if before} != set()
