"""Statistics computed again on the unseen domain: what they are, on what they do not depend, and what stays."""

import copy

import numpy as np
import pytest
import torch
from networks import build
from support import small_experiment
from torch import nn

from fedsim.common.errors import UserError
from fedsim.models.infer import EvalMode, Recompute
from fedsim.models.infer.recompute import groups
from fedsim.models.norms import BIN, DSON, XAN, MixIG
from fedsim.run.plan import resolve
from fedsim.run.target import TargetEvaluator
from fedsim.run.workspace import Workspace
from fedsim.tensors.kinds import Kind


def begun(net, images, size=None, batch=64):
    """The network with the new statistics, after these images in batches of that size."""
    return Recompute(batch).begin(net, lambda: images.split(size or len(images)))


def statistics(net):
    """All running means and variances."""
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


def test_the_clients_of_a_frozen_backbone_never_see_the_targets_statistics(tmp_path):
    """Frozen tensors are not loaded again: after an evaluation by the rule the network is as it was."""
    method = {"name": "fedavg", "infer": "recompute"}
    space = Workspace(resolve(small_experiment(tmp_path, method, model={"train": "head"})))
    before = {name: value.clone() for name, value in space.net.state_dict().items()}
    sent = {name: before[name].numpy() for name in space.travelling}
    assert np.isfinite(TargetEvaluator(space)(sent, {}).loss)
    assert all(torch.equal(value, before[name]) for name, value in space.net.state_dict().items())
