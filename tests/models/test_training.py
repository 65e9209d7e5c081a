"""`model.train`: what is trained, what is frozen, and that frozen tensors are neither changed nor sent."""

import pytest
import torch
from networks import build, outline
from torch import nn

from fedsim.models.net import Net
from fedsim.models.norms import BIN, DSON, IBN, XAN, MixIG
from fedsim.models.training import frozen_tensors


def trained(net):
    """The names of the tensors that are trained."""
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


class GlobalNorm(nn.Module):
    """A norm layer that is no layer of torch, as timm has them."""

    def __init__(self):
        super().__init__()
        self.scale, self.act = nn.Parameter(torch.ones(4)), nn.ReLU()


def test_norm_layers_that_are_not_torch_s():
    """A layer is known by its name or its base's; a block that holds other layers with parameters is no norm layer."""
    block = type("ConvNormAct", (nn.Module,), {})()
    block.gain, block.conv, block.norm = nn.Parameter(torch.ones(1)), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
    own = type("Own", (type("ScaledNorm", (GlobalNorm,), {}),), {})
    net = Net(nn.Sequential(block, GlobalNorm(), nn.RMSNorm(4), nn.Linear(4, 4), own()), 4, 2)
    frozen = {id(tensor) for tensor in frozen_tensors(net, "norm")}
    names = {name for name, parameter in net.named_parameters() if id(parameter) not in frozen}
    assert names == {f"backbone.{name}" for name in ("0.norm.weight", "0.norm.bias", "1.scale", "2.weight", "4.scale")}


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
    """Tensors of the replaced batch norm stay frozen; tensors that the part adds are trained."""
    found, prefix = trained(outline("digits-cnn-bn", norm, train="head")), "backbone.norm1."
    assert {name.removeprefix(prefix) for name in found if name.startswith(prefix)} == added


def test_channels_that_ibn_took_over_follow_their_layer():
    """They are trained where the replaced layer is. The instance norm that variant b adds is new, and trained."""
    moving, still = (outline("resnet18", IBN(), train=f"backbone.layer{stage}.*+head") for stage in (1, 2))
    own = {name for name in moving.state_dict() if name.startswith("backbone.layer1.0.bn1")}
    assert (len(own), own <= trained(moving), own & trained(still)) == (7, True, set())
    inorms = {f"backbone.layer{stage}.1.inorm.{name}" for stage in (1, 2) for name in ("weight", "bias")}
    assert trained(outline("resnet18", IBN("b"), train="head")) == inorms | {"head.weight", "head.bias"}
