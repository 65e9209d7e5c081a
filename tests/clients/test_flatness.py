"""FedLGF on numbers worked out by hand."""

import pytest
import torch
import torch.nn.functional as F
from small_round import Scaled, ready_round
from torch import nn

from clients.parts import Batch
from clients.terms.flatness import Flatness, divergence, unit_rows, worst_logits
from fedsim.common.errors import UserError

H = torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=torch.float64)
DRAW = torch.tensor([[3.0, 4.0], [0.0, 9.0]], dtype=torch.float64)  # unit rows (.6, .8) and (0, 1)


def identity():
    head = nn.Linear(2, 2, bias=False).double()
    head.weight.data = torch.eye(2, dtype=torch.float64)
    return head


def test_weight_numbers():
    """The probe gives 3.93e-5; the worst change of .01 has the rows +-(.7038, .7103)."""
    z = H @ torch.eye(2, dtype=torch.float64)
    probe = unit_rows(DRAW)
    assert divergence(z, z + 0.1 * H @ probe.T).item() == pytest.approx(3.9322152577e-5, rel=1e-5)
    worst = worst_logits(identity(), H, z, DRAW, "weight")
    change = (torch.linalg.inv(H) @ (worst - z)).T / 0.01
    rows = torch.tensor([[0.7038366493, 0.7103116952]], dtype=torch.float64)
    assert torch.minimum((change - rows).abs(), (change + rows).abs()).max() < 1e-5
    torch.testing.assert_close(change[0], -change[1])
    assert divergence(worst, z).item() == pytest.approx(9.9854789809e-5, rel=1e-5)
    assert not worst.requires_grad


def test_singular_numbers():
    """W = diag(3, 1): the change of the singular values has length .1, and raises the divergence; a huge negative probe
    gives relu(S + 10 D) = 0 in the gradient's place."""
    head = identity()
    head.weight.data = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    z = head(H).detach()
    worst = worst_logits(head, H, z, DRAW[0], "singular")
    values = (torch.linalg.inv(H) @ worst).diagonal() - torch.tensor([3.0, 1.0], dtype=torch.float64)
    assert values.norm().item() == pytest.approx(0.1, rel=1e-6)
    probe = unit_rows(DRAW[0]).requires_grad_()
    first = divergence(z, H @ torch.diag(torch.relu(torch.tensor([3.0, 1.0]) + 10 * probe)))
    (gradient,) = torch.autograd.grad(first, probe)
    torch.testing.assert_close(values, 0.1 * unit_rows(gradient), atol=1e-7, rtol=0)
    assert divergence(worst, z) > 0


def test_the_term_is_the_sum_of_both_and_each_q_has_its_head():
    """The received model has its own features and head, and the client's predictions as its reference."""
    net = Scaled(torch.eye(2))
    round, images = ready_round(net), H.float()
    assert Flatness(local=0.0, global_=0.0).begin(round) is None
    term = Flatness(local=0.5, global_=2.0).begin(round)
    net.scale.data.fill_(3.0)
    batch = Batch(images, torch.tensor([0, 1]))
    round.forward(batch)
    torch.manual_seed(5)
    found = term(batch)
    torch.manual_seed(5)
    draws = [torch.randn(2, 2) for _ in range(2)]
    own = worst_logits(net.head, 3 * images, 3 * images, draws[0], "weight")
    theirs = worst_logits(net.head, images, 3 * images, draws[1], "weight")
    losses = [F.kl_div((3 * images).log_softmax(1), q.softmax(1), reduction="batchmean") for q in (own, theirs)]
    assert losses[1] > 100 * losses[0]  # the received features are three times shorter
    assert found.item() == pytest.approx((0.5 * losses[0] + 2 * losses[1]).item(), rel=1e-4)
    assert term(batch).item() == found.item()  # the second pass of a step has the same draws


def test_another_head_is_refused():
    net = Scaled(torch.eye(2))
    net.head = nn.Sequential(net.head)
    with pytest.raises(UserError, match="flatness changes the weight of a linear head"):
        Flatness().begin(ready_round(net))
