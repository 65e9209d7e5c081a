"""`model.train`: what is trained, what is frozen, and that frozen tensors are neither changed nor sent."""

import pytest
import torch
from safetensors.torch import load_file
from support import run_small, small_experiment
from torch import nn

from fedsim.common.errors import UserError
from fedsim.models.net import Net
from fedsim.models.norms import BIN, DSON, IBN, XAN, MixIG
from fedsim.models.training import frozen_tensors
from fedsim.run.workspace import close_workspaces


def test_all_is_the_default_and_freezes_nothing(build):
    assert build("digits-cnn-bn").frozen == frozenset()
    assert build("digits-cnn-bn", train="head+all").frozen == frozenset()


def test_head_is_linear_probing(build):
    net = build("resnet18", train="head", bottleneck=8)
    trained = net.state_dict().keys() - net.frozen
    assert {name.partition(".")[0] for name in trained} == {"bottleneck", "head"}
    assert "bottleneck.1.running_mean" in trained


def test_norm_and_head(build):
    net = build("digits-cnn-bn", train="norm+head")
    trained = net.state_dict().keys() - net.frozen
    layer = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    expected = {f"backbone.norm{number}.{name}" for number in (1, 2) for name in layer}
    assert trained == expected | {"head.weight", "head.bias"}
    vit = build("vit-b-32", train="norm+head")
    assert len(vit.state_dict().keys() - vit.frozen) == 2 * (2 * 12 + 1) + 2


class GlobalNorm(nn.Module):
    """A norm layer that is no layer of torch, as timm has them."""

    def __init__(self, width):
        super().__init__()
        self.scale, self.act = nn.Parameter(torch.ones(width)), nn.ReLU()


class ScaledNorm(GlobalNorm):
    """A norm layer by its base class."""


class ConvNormAct(nn.Module):
    """A block that holds a convolution and a norm."""

    def __init__(self):
        super().__init__()
        self.gain, self.conv, self.norm = nn.Parameter(torch.ones(1)), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)


def test_norm_layers_that_are_not_torch_s():
    """A layer is known by its name or its base's; a block that holds other layers with parameters is no norm layer."""
    backbone = nn.Sequential(ConvNormAct(), GlobalNorm(4), nn.RMSNorm(4), nn.Linear(4, 4))
    backbone.append(type("Own", (ScaledNorm,), {})(4))
    net = Net(backbone, 4, 2)
    frozen = {id(tensor) for tensor in frozen_tensors(net, "norm")}
    trained = {name for name, parameter in net.named_parameters() if id(parameter) not in frozen}
    assert trained == {
        f"backbone.{name}" for name in ("0.norm.weight", "0.norm.bias", "1.scale", "2.weight", "4.scale")
    }


@pytest.mark.parametrize("train", ["norm", "norm+head"])
@pytest.mark.parametrize("backbone", ["digits-cnn", "alexnet"])
def test_norm_without_norm_layers_is_refused(build, backbone, train):
    """Otherwise it would train the head alone, without a word."""
    with pytest.raises(UserError, match=r"model.train: the backbone has no normalization layers") as refused:
        build(backbone, train=train)
    assert "\n" not in str(refused.value)


def test_pattern(build):
    net = build("resnet18", train="backbone.layer4.1.*+head")
    trained = net.state_dict().keys() - net.frozen
    assert {name for name in trained if not name.startswith("head.")} == {
        name for name in net.state_dict() if name.startswith("backbone.layer4.1.")
    }
    with pytest.raises(UserError, match=r"model.train: no parameter is called 'backbone.layer5.\*'") as raised:
        build("resnet18", train="backbone.layer5.*")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("norm", "trained"), [
    (XAN(), {"inorm.weight", "inorm.bias", "s_bn", "s_in"}),
    (BIN(), {"rho"}),
    # the mixing weights are trained, so the running statistics, which follow what is normalized, are too
    (DSON(), {"theta_mean", "theta_var", "running_mean", "running_var", "num_batches_tracked"}),
    (MixIG(), set()),
    (IBN(), set()),  # its halves are copies of the channels that they took over
    (IBN("b"), set()),
])  # fmt: skip
def test_layers_of_a_part_keep_what_they_took_over(build, norm, trained):
    """Tensors of the replaced batch norm stay frozen; tensors that the part adds are trained."""
    net = build("digits-cnn-bn", norm, train="head")
    prefix = "backbone.norm1."
    found = {name.removeprefix(prefix) for name in net.state_dict().keys() - net.frozen if name.startswith(prefix)}
    assert found == trained


def test_channels_that_ibn_took_over_follow_their_layer(build):
    """They are trained where the replaced layer is. The instance norm that variant b adds is new, and trained."""
    layer = "backbone.layer1.0.bn1"
    trained, frozen = (build("resnet18", IBN(), train=f"backbone.layer{stage}.*+head") for stage in (1, 2))
    own = {name for name in trained.state_dict() if name.startswith(layer)}
    assert len(own) == 7
    assert not own & trained.frozen
    assert own <= frozen.frozen
    added = build("resnet18", IBN("b"), train="head")
    assert added.state_dict().keys() - added.frozen == {
        *(f"backbone.layer{stage}.1.inorm.{name}" for stage in (1, 2) for name in ("weight", "bias")),
        "head.weight", "head.bias",
    }  # fmt: skip
    assert not any("took_over" in module.__dict__ for module in added.modules())


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "gperxan", "fedig-a", "csac"])
def test_frozen_tensors_stay_and_do_not_travel(tmp_path, method):
    """Linear probing sends only the head; best.safetensors holds what was trained; the rest follows from the seed."""
    experiment = small_experiment(tmp_path, method, model={"train": "head"}, train={"rounds": 1})
    close_workspaces()
    folder, grid = run_small(experiment)
    net = grid_net(experiment)
    close_workspaces()
    saved = load_file(folder / "last.safetensors")
    assert saved.keys() == net.state_dict().keys() - net.frozen
    sizes = {name: value.numel() for name, value in saved.items()}
    replies = [reply.content for message, reply in grid.seen if message.metadata.message_type == "train"]
    assert replies
    for content in replies:
        for record in content.array_records.values():
            assert set(record) <= saved.keys()
    if method == "fedavg":
        assert sizes == {"head.weight": 500, "head.bias": 10}


def grid_net(experiment):
    """The network in this process that the run's clients trained."""
    from fedsim.run.plan import resolve
    from fedsim.run.workspace import _open

    fresh = resolve(experiment).build_net()
    used = next(iter(_open.values())).net
    for name in fresh.frozen:
        assert torch.equal(fresh.state_dict()[name], used.state_dict()[name]), name
    return fresh
