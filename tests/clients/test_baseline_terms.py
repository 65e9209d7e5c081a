"""FedDecorr, FedNTD and FedProto on numbers worked out by hand."""

import math

import pytest
import torch
from small_round import Scaled, ready_round, small_round
from torch import nn

from clients.parts import Batch
from clients.terms.decorrelation import Decorrelation, decorrelation
from clients.terms.not_true_distillation import NotTrueDistillation, not_true_distillation
from clients.terms.prototype_distance import PrototypeDistance, prototype_distance


def double(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_decorrelation_numbers():
    """Z has unbiased variance. Two equal columns have K = N - 1 everywhere: paper ((N-1)/N)^2, code (N-1)^2 / N."""
    z = double((1, 2, 0), (3, 1, 1), (2, 4, 5), (0, 1, 2))
    assert decorrelation(z, "released").item() == pytest.approx(0.4732142822, abs=1e-9)
    assert decorrelation(z, "paper").item() == pytest.approx(0.2663690454, abs=1e-9)
    equal = double((1, 1), (2, 2), (6, 6))
    assert decorrelation(equal).item() == pytest.approx(4 / 9)
    assert decorrelation(equal, "released").item() == pytest.approx(4 / 3)
    apart = double((1, 1), (1, -1), (-1, 1), (-1, -1))
    assert decorrelation(apart, "released").item() == pytest.approx(0, abs=1e-12)
    assert decorrelation(apart).item() == pytest.approx(2 * (3 / 4) ** 2 / 4)  # the diagonal alone
    single = torch.ones(1, 3, requires_grad=True)
    decorrelation(single).backward()
    assert single.grad.abs().sum() == 0


def test_gradients_of_both_forms_differ_by_a_factor():
    """N d / (d - 1) = 4 * 3 / 2."""
    gradients = []
    for form in ("released", "paper"):
        z = double((1, 2, 0), (3, 1, 1), (2, 4, 5), (0, 1, 2)).requires_grad_()
        gradients.append(torch.autograd.grad(decorrelation(z, form), z)[0])
    torch.testing.assert_close(gradients[0], 6 * gradients[1], atol=1e-7, rtol=1e-6)


def test_the_term_is_weighted_and_tallied():
    net = nn.Linear(1, 1)
    round = ready_round(net)
    assert Decorrelation(beta=0).begin(round) is None
    batch = Batch(None, None, features=torch.tensor([[1.0, 1.0], [2.0, 2.0], [6.0, 6.0]]))
    assert Decorrelation(beta=0.5).begin(round)(batch).item() == pytest.approx(2 / 9, abs=1e-6)
    assert round.tallied() == {"decorrelation_loss": pytest.approx(4 / 9, abs=1e-6)}


def test_not_true_distillation_numbers():
    """Own (2, 1, 0), received (1, 2, 0), label 0: classes 1 and 2 have p = (.731, .269) and q = (.881, .119)."""
    p, q = (1 / (1 + math.exp(-gap)) for gap in (1, 2))
    by_hand = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    assert by_hand == pytest.approx(0.0671307545, abs=1e-9)
    own, received = double((2, 1, 0)), double((1, 2, 0))
    label = torch.tensor([0])
    assert not_true_distillation(own, received, label, 1.0).item() == pytest.approx(by_hand, abs=1e-9)
    halves = not_true_distillation(own / 3, received / 3, label, 1.0).item()
    assert not_true_distillation(own, received, label, 3.0).item() == pytest.approx(9 * halves)
    assert not_true_distillation(own, received, torch.tensor([2]), 1.0).item() > 0
    two = double((5, 0), (0, 5))
    assert not_true_distillation(two, -two, torch.tensor([0, 1]), 1.0).item() == 0


def test_the_label_has_no_gradient_and_the_received_model_stays():
    own = double((2, 1, 0), (0, 1, 5)).requires_grad_()
    received = double((1, 2, 0), (0, 1, 1)).requires_grad_()
    not_true_distillation(own, received, torch.tensor([0, 2]), 1.0).backward()
    assert own.grad[0, 0] == own.grad[1, 2] == 0
    assert torch.isfinite(own.grad).all()
    assert own.grad[0, 1] != 0
    assert received.grad is None


def test_the_reference_is_the_model_as_it_was_received():
    """It is 0 at the first step, and not after the network has moved."""
    net = Scaled(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    round, images = ready_round(net), torch.tensor([[1.0, 2.0], [3.0, 1.0]])
    assert NotTrueDistillation(beta=0).begin(round) is None
    term = NotTrueDistillation(beta=2.0).begin(round)
    batch = Batch(images, torch.tensor([0, 1]))
    round.forward(batch)
    assert term(batch).item() == pytest.approx(0, abs=1e-6)
    net.scale.data.fill_(2.0)
    round.forward(batch)
    expected = not_true_distillation(2 * images @ net.head.weight.T, images @ net.head.weight.T, batch.labels, 1.0)
    assert term(batch).item() == pytest.approx(2 * expected.item(), rel=1e-5)


def test_prototype_distance_numbers():
    """z = (1,0), (3,2) of class 0 with P = (1,1), (0,4) of class 1 with P = (2,2): (1 + 5 + 8) / 6."""
    z = double((1, 0), (3, 2), (0, 4)).requires_grad_()
    labels, protos = torch.tensor([0, 0, 1]), double((1, 1), (2, 2))
    loss = prototype_distance(z, labels, protos, torch.tensor([True, True]))
    loss.backward()
    assert loss.item() == pytest.approx(7 / 3)
    torch.testing.assert_close(z.grad, double((0, -1), (2, 1), (-2, 2)) / 3)
    missing = prototype_distance(z.detach(), labels, protos, torch.tensor([False, True]))
    assert missing.item() == pytest.approx(8 / 6)


def test_the_term_of_a_round_and_what_is_sent():
    """The prototypes of class 0 are (1, 1); class 1 has none. Means of both features of class 0: (2, 1)."""
    net = Scaled(torch.eye(2))
    net.feature_dim = 2
    records = {"prototypes": {"cluster_protos": double((1, 1)).float().numpy(), "classes": torch.tensor([0]).numpy()}}
    round = ready_round(net, records, images=3)
    term = PrototypeDistance(lam=3.0).begin(round)
    images = torch.tensor([[1.0, 0.0], [3.0, 2.0], [0.0, 4.0]])
    batch = Batch(images, torch.tensor([0, 0, 1]))
    round.forward(batch)
    for hook in round.before_step:
        hook()
    assert term(batch).item() == pytest.approx(3 * 1.0)  # (1 + 5) / 6
    round.scratch["prototypes"].round.data.labels = torch.tensor([0, 0, 1])
    sent = round.scratch["prototypes"].prototypes(1)
    assert sent["classes"].tolist() == [0, 1]
    assert sent["protos"].tolist() == [[2, 1], [0, 4]]
    assert round.scratch["prototypes"].prototypes(2)["classes"].tolist() == [0]


def test_without_prototypes_the_term_is_0():
    net = Scaled(torch.eye(2))
    net.feature_dim = 2
    round = ready_round(net, {"prototypes": {}}, images=3)
    batch = Batch(torch.ones(3, 2), torch.tensor([0, 0, 1]))
    round.forward(batch)
    assert PrototypeDistance().begin(round)(batch).item() == 0
    with pytest.raises(Exception, match="needs the record 'prototypes'"):
        PrototypeDistance().begin(small_round(round.data, net=net, steps=1))
