"""SelfReg, and its projector."""

import pytest
import torch
from small_round import colour_images, small_data, small_round
from torch import nn

from clients.parts import Batch
from clients.terms.self_reg import SelfReg, class_permutations, regulariser
from fedsim.models import build_model
from fedsim.models.inserts.projector import Projector
from fedsim.settings import ModelSettings


class WithProjector(nn.Module):
    """A projector that leaves features as they are."""

    def __init__(self):
        super().__init__()
        self.projector = nn.Identity()


def term_of(**fields):
    """The term in a round."""
    return SelfReg(**fields).begin(small_round(small_data(colour_images(6)), net=WithProjector(), steps=1))


def test_regulariser_numbers():
    """p1 swaps, p2 is the identity, lam = .25: the MSE are 4 and .25, and the loss is 1.1875."""
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    swapped, same = torch.tensor([1, 0]), torch.tensor([0, 1])
    assert regulariser(logits, logits, [swapped, same], 0.25).item() == pytest.approx(1.1875)
    assert regulariser(logits, logits, [swapped, same], 1.0).item() == pytest.approx(4 + 0 * 1.0)


def test_permutations_stay_within_classes():
    """This holds for labels that do not start at 0 too; both are permutations, and they differ."""
    labels = torch.tensor([7, 3, 7, 7, 3, 9, 3, 7, 7, 3])
    generator = torch.Generator().manual_seed(0)
    order, first, second = class_permutations(labels, generator)
    for partner in (first, second):
        assert partner.sort().values.tolist() == list(range(10))
        assert labels[order][partner].equal(labels[order])
    assert not first.equal(second)
    drawn = {tuple(class_permutations(labels[:3], generator)[1].tolist()) for _ in range(30)}
    assert drawn == {(0, 1, 2), (0, 2, 1)}  # the two sevens swap or stay, the three stays


def test_single_classes_have_no_logit_term():
    """With all classes singletons (and q the identity) everything is 0."""
    torch.manual_seed(0)
    z = torch.randn(4, 5)
    batch = Batch(z, torch.arange(4), features=z, logits=torch.randn(4, 4), loss=torch.tensor(3.0))
    assert term_of()(batch).item() == pytest.approx(0, abs=1e-12)
    assert SelfReg(weight=0.0).begin(None) is None


@pytest.mark.parametrize(("loss", "scale"), [(3.0, 1.0), (0.2, 0.2)])
def test_scale_is_the_cross_entropy_up_to_one(loss, scale):
    """The loss equals the formula with the same draws, and the scale has no gradient."""
    torch.manual_seed(0)
    z, o = torch.randn(6, 5), torch.randn(6, 3, requires_grad=True)
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    ce = torch.tensor(loss, requires_grad=True)
    value = term_of()(Batch(z, labels, features=z, logits=o, loss=ce))
    round = small_round(small_data(colour_images(6)), net=WithProjector())
    lam = round.rng("self-reg").beta(0.5, 0.5)
    order, p1, p2 = class_permutations(labels, round.generator("self-reg"))

    def two(x):
        x = x[order]
        return lam * ((x - x[p1]) ** 2).mean() + (1 - lam) * ((x - lam * x[p1] - (1 - lam) * x[p2]) ** 2).mean()

    assert value.item() == pytest.approx(scale * (two(o) + 0.3 * two(z)).item(), rel=1e-5)
    value.backward()
    assert ce.grad is None
    assert o.grad.abs().max() > 0


def test_projector():
    """It is d - 2d - 2d - d with batch norm after each linear layer; its tensors are in the network's state."""
    net = build_model(ModelSettings(backbone="digits-cnn-bn", bottleneck=8), 3, 1, 28, None, 0)
    images = torch.rand(4, 1, 28, 28)
    logits = net.eval()(images)
    Projector().apply(net)
    shapes = [tuple(m.weight.shape) for m in net.projector if hasattr(m, "weight")]
    assert shapes == [(16, 8), (16,), (16, 16), (16,), (8, 16), (8,)]
    assert isinstance(net.projector[-1], nn.BatchNorm1d)
    assert net.eval()(images).equal(logits)
    assert any(name.startswith("projector.") for name in net.state_dict())


@pytest.mark.parametrize(("width", "hidden"), [(50, 100), (512, 1024), (1280, 2560), (2048, 2048), (4096, 8192)])
def test_the_projector_is_twice_as_wide_except_for_2048_features(width, hidden):
    """ResNet-50's projector is not widened (the authors' code); MobileNet's and AlexNet's features are doubled too."""
    net = nn.Module()
    net.feature_dim = width
    with torch.device("meta"):
        Projector().apply(net)
    linear = [module for module in net.projector if isinstance(module, nn.Linear)]
    assert [tuple(module.weight.shape) for module in linear] == [(hidden, width), (hidden, hidden), (width, hidden)]
