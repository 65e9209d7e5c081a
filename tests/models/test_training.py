"""`model.train`: what is trained, what is frozen, and that frozen tensors are neither changed nor sent."""

import pytest
import torch
from safetensors.torch import load_file
from support import run_small, small_experiment

from fedsim.errors import UserError
from fedsim.models.norms import BIN, DSON, IBN, XAN, MixIG
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
