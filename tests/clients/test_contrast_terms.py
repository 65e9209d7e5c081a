"""MOON, SelfReg and CLIP's loss inside a batch, with the heads of the first two."""

import math

import pytest
import torch
import torch.nn.functional as F
from small_round import digits_net, ready_round, small_round, snapshot
from torch import nn

from clients.parts import Batch
from clients.terms.in_batch_contrast import InBatchContrast, in_batch_contrast
from clients.terms.moon import PREVIOUS, ModelContrast, contrast
from clients.terms.self_reg import SelfReg, class_permutations
from fedsim.models.clip_family import TextHead
from fedsim.models.inserts.projection_head import ProjectionHead
from fedsim.models.inserts.projector import Projector


def test_moons_contrast():
    """log(1 + e^-2); log 2 and no gradient for equal similarities; the length of z does not matter; the mean of
    -log( e^(s/T) / (e^(s/T) + e^(p/T)) ) over the batch, even when the exponentials would overflow."""
    z, previous = torch.tensor([[1.0, 0.0]], requires_grad=True), torch.tensor([[0.0, 1.0]])
    assert contrast(z, z.detach(), previous, 0.5).item() == pytest.approx(0.126928, abs=1e-6)
    equal = contrast(z, previous, previous, 0.5)
    equal.backward()
    assert equal.item() == pytest.approx(math.log(2), abs=1e-6)
    assert z.grad.abs().max() == 0
    torch.manual_seed(0)
    z, g, p = (torch.randn(6, 3, dtype=torch.float64) for _ in range(3))
    near, far = (torch.exp(torch.cosine_similarity(z, other) / 0.5) for other in (g, p))
    expected = -(near / (near + far)).log().mean().item()
    assert contrast(z, g, p, 0.5).item() == pytest.approx(expected, abs=1e-6)
    assert contrast(7 * z, g, p, 0.5).item() == pytest.approx(expected, abs=1e-6)
    assert math.isfinite(contrast(z, g, p, 1e-4).item())


def test_moons_reference_models_are_frozen():
    """z has gradients only through the trained network; in round 1 the previous model is the received one."""
    torch.manual_seed(0)
    round = ready_round(digits_net(28, 1, 8))
    net, part = round.net, ModelContrast(mu=2.0)
    term, before = part.begin(round), snapshot(net)
    batch = Batch(torch.rand(6, 1, 28, 28), torch.arange(6) % 3)
    first = term(Batch(batch.images, batch.labels, features=net.features(batch.images)))
    assert first.item() == pytest.approx(2 * math.log(2))
    net.load_state_dict(before)
    part.end(round)
    round.store.commit()
    round.store.open_round(2)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    term = part.begin(round)
    round.forward(batch)
    term(batch).backward()
    assert all(parameter.grad is not None for name, parameter in net.named_parameters() if not name.startswith("head"))
    assert net.head.weight.grad is None
    kept = round.store.get(PREVIOUS)
    assert kept.keys() == net.state_dict().keys()
    assert not kept["head.weight"].equal(net.head.weight)


def test_projection_head():
    """It is d - d - 256 before the classifier; a bottleneck is used instead, unless the head is always wanted."""
    net, narrow = digits_net(28, 1, classes=10), digits_net(28, 1, 8, classes=10)
    d = net.feature_dim
    ProjectionHead().apply(net)
    assert [tuple(p.shape) for p in net.bottleneck.parameters()] == [(d, d), (d,), (256, d), (256,)]
    assert (net.feature_dim, net.head.in_features, net.head.out_features) == (256, 256, 10)
    assert net(torch.rand(2, 1, 28, 28)).shape == (2, 10)
    names = list(narrow.state_dict())
    ProjectionHead().apply(narrow)
    assert list(narrow.state_dict()) == names
    ProjectionHead(width=5, always=True).apply(narrow)
    assert narrow.features(torch.rand(2, 1, 28, 28)).shape == (2, 5)


def test_permutations_stay_within_classes():
    """This holds for labels that do not start at 0 too; both are permutations, and they differ."""
    labels, generator = torch.tensor([7, 3, 7, 7, 3, 9, 3, 7, 7, 3]), torch.Generator().manual_seed(0)
    order, first, second = class_permutations(labels, generator)
    for partner in (first, second):
        assert partner.sort().values.tolist() == list(range(10))
        assert labels[order][partner].equal(labels[order])
    assert not first.equal(second)
    drawn = {tuple(class_permutations(labels[:3], generator)[1].tolist()) for _ in range(30)}
    assert drawn == {(0, 1, 2), (0, 2, 1)}  # the two sevens swap or stay, the three stays


def with_projector():
    """A round of a network whose projector leaves features as they are."""
    net = nn.Module()
    net.projector = nn.Identity()
    return small_round(net=net, steps=1)


@pytest.mark.parametrize(("loss", "scale"), [(3.0, 1.0), (0.2, 0.2)])
def test_selfregs_scale_is_the_cross_entropy_up_to_one(loss, scale):
    """The loss equals the formula with the same draws, and the scale has no gradient; single classes give 0."""
    torch.manual_seed(0)
    z, o, labels = torch.randn(6, 5), torch.randn(6, 3, requires_grad=True), torch.tensor([0, 0, 0, 1, 1, 1])
    ce = torch.tensor(loss, requires_grad=True)
    value = SelfReg().begin(with_projector())(Batch(z, labels, features=z, logits=o, loss=ce))
    round = with_projector()
    lam = round.rng("self-reg").beta(0.5, 0.5)
    order, p1, p2 = class_permutations(labels, round.generator("self-reg"))

    def two(x):
        x = x[order]
        return lam * ((x - x[p1]) ** 2).mean() + (1 - lam) * ((x - lam * x[p1] - (1 - lam) * x[p2]) ** 2).mean()

    assert value.item() == pytest.approx(scale * (two(o) + 0.3 * two(z)).item(), rel=1e-5)
    value.backward()
    assert ce.grad is None
    assert o.grad.abs().max() > 0
    single = SelfReg().begin(with_projector())(Batch(z, torch.arange(6), features=z, logits=o, loss=ce))
    assert single.item() == pytest.approx(0, abs=1e-12)
    assert SelfReg(weight=0.0).begin(None) is None


def test_projector_of_a_network():
    """Norms follow each linear layer; logits do not change; only 2048 features are not widened, as in the code."""
    net, images = digits_net(28, 1, 8).eval(), torch.rand(4, 1, 28, 28)
    logits = net(images)
    Projector().apply(net)
    shapes = [tuple(m.weight.shape) for m in net.projector if hasattr(m, "weight")]
    assert shapes == [(16, 8), (16,), (16, 16), (16,), (8, 16), (8,)]
    assert isinstance(net.projector[-1], nn.BatchNorm1d)
    assert net.eval()(images).equal(logits)
    assert any(name.startswith("projector.") for name in net.state_dict())
    for net.feature_dim, hidden in ((50, 100), (512, 1024), (1280, 2560), (2048, 2048), (4096, 8192)):
        with torch.device("meta"):
            Projector().apply(net)
        width, linear = net.feature_dim, [module for module in net.projector if isinstance(module, nn.Linear)]
        assert [tuple(layer.weight.shape) for layer in linear] == [(hidden, width), (hidden, hidden), (width, hidden)]


def test_clips_loss_inside_a_batch():
    """l = (2 2; 0 0) for two images of one class, which are negatives: the rows give log 2 each, the columns
    log(1 + e^-2) = .126928 and 2.126928. With a text head it is s f_i . t_j for the text t_j of image j."""
    logits, labels = torch.tensor([[2.0, -5.0], [0.0, 9.0]]), torch.tensor([0, 0])
    assert in_batch_contrast(logits, labels).item() == pytest.approx((0.693147 + 1.126928) / 2, abs=1e-6)
    torch.manual_seed(0)
    features, labels, head = torch.randn(6, 4), torch.tensor([0, 2, 1, 2, 0, 2]), TextHead(torch.randn(3, 4), 10.0)
    pairs = 10.0 * F.normalize(features, dim=1) @ head.text[labels].T
    expected = (F.cross_entropy(pairs, torch.arange(6)) + F.cross_entropy(pairs.T, torch.arange(6))) / 2
    torch.testing.assert_close(in_batch_contrast(head(features), labels), expected)


def test_clips_loss_replaces_a_share_of_the_cross_entropy():
    logits, labels = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1])
    loss, own = F.cross_entropy(logits, labels), in_batch_contrast(logits, labels)
    for share in (0.25, 1.0):
        term = InBatchContrast(share).begin(small_round())(Batch(None, labels, logits=logits, loss=loss))
        torch.testing.assert_close(loss + term, (1 - share) * loss + share * own)
    assert InBatchContrast(0.0).begin(small_round()) is None
