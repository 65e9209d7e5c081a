"""Loss terms: smoothing, the guiding head, the proximal penalty, MMD, MOON, SelfReg, and CLIP's loss in a batch."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from small_round import digits_net, ready_round, small_round, snapshot
from torch import nn

from clients.parts import Batch
from clients.terms.guiding_head import GuidingHead
from clients.terms.in_batch_contrast import InBatchContrast, in_batch_contrast
from clients.terms.label_smoothing import LabelSmoothing
from clients.terms.moon import PREVIOUS, ModelContrast, contrast
from clients.terms.proximal import Proximal
from clients.terms.self_reg import SelfReg, class_permutations
from clients.tools.losses import MMD_SCALES, mk_mmd, proximal
from fedsim.models.clip_family import TextHead
from fedsim.models.inserts.projection_head import ProjectionHead
from fedsim.models.inserts.projector import Projector

X = torch.tensor([[0.0], [1.0]])
Y = torch.tensor([[2.0], [3.0]])


def naive_mmd(x, y, scales=MMD_SCALES, statistic="u"):
    z = torch.cat([x, y])
    s = (z[:, None] - z[None]).square().sum(2).mean().detach()

    def kernel(u, v):
        distance = (u[:, None] - v[None]).square().sum(2)
        return sum(torch.exp(-distance / (2 * a * s)) for a in scales)

    def within(u):
        k, n = kernel(u, u), len(u)
        return k.mean() if statistic == "v" else (k.sum() - k.diagonal().sum()) / (n * (n - 1))

    return within(x) + within(y) - 2 * kernel(x, y).mean()


def smoothed_cross_entropy(logits, labels, eps):
    loss, term = F.cross_entropy(logits, labels), LabelSmoothing(eps).begin(None)
    return loss + term(Batch(None, labels, logits=logits, loss=loss)) if term else loss


@pytest.mark.parametrize(("logits", "eps", "expected"), [
    ([2.0, 1.0, 0.0, -1.0], 0.0, 0.440190), ([2.0, 1.0, 0.0, -1.0], 0.2, 0.740190), ([0.0] * 7, 0.1, 1.945910),
    ([4.158883] + [0.0] * 6, 0.1, 0.446088), ([6.542472] + [0.0] * 6, 0.01, 0.064687),  # the entropy of the labels
])  # fmt: skip
def test_smoothed_cross_entropy(logits, eps, expected):
    loss = smoothed_cross_entropy(torch.tensor([logits] * 2), torch.tensor([0, 0]), eps)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_proximal_numbers():
    """Squared over all tensors (unsquared norms would give .075); gradients in both orders, none in the reference."""
    w = [torch.tensor([1.5], requires_grad=True), torch.tensor([2.0], requires_grad=True)]
    penalty = proximal(w, [torch.ones(1)] * 2, 0.1)
    penalty.backward()
    assert penalty.item() == pytest.approx(0.0625)
    assert [value.grad.item() for value in w] == pytest.approx([0.05, 0.10])
    w = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2), (4,))]
    reference = [torch.randn_like(p).requires_grad_() for p in w]
    assert torch.autograd.gradcheck(lambda *p: proximal(p, reference, 0.3), w)
    assert torch.autograd.gradgradcheck(lambda *p: proximal(p, reference, 0.3), w)
    proximal(w, reference, 0.3).backward()
    assert all(r.grad is None for r in reference)
    assert torch.autograd.grad(proximal(w, [p.detach() for p in w], 1.0), w)[0].abs().max() == 0
    assert proximal(w, reference, 0.0).item() == 0
    net = nn.Linear(1, 1, bias=False)
    term = Proximal(1.0).begin(small_round(net=net))
    with torch.no_grad():
        net.weight += 1.0
    penalty = term(None)
    penalty.backward()
    assert (penalty.item(), net.weight.grad.item()) == pytest.approx((0.5, 1.0))
    for part in (GuidingHead(0.0), LabelSmoothing(0.0), Proximal(0.0)):
        assert part.begin(small_round(net=net)) is None


@pytest.mark.parametrize("factor", [1, 10])
@pytest.mark.parametrize(("scales", "statistic", "expected"), [
    (MMD_SCALES, "u", 2.043262), (MMD_SCALES, "v", 4.570397), ((1.0,), "v", 0.877387), ((1.0,), "u", 0.696118),
])  # fmt: skip
def test_mmd_by_hand(scales, statistic, expected, factor):
    assert mk_mmd(factor * X, factor * Y, scales, statistic).item() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("statistic", ["u", "v"])
def test_mmd_equals_the_naive_form_with_gradients(statistic):
    torch.manual_seed(0)
    x, y = torch.randn(6, 2, 3, dtype=torch.float64), 0.5 + torch.randn(6, 2, 3, dtype=torch.float64)
    x.requires_grad_(), y.requires_grad_()
    fast, slow = mk_mmd(x, y, statistic=statistic), naive_mmd(x.flatten(1), y.flatten(1), statistic=statistic)
    torch.testing.assert_close(fast, slow)
    for a, b in zip(torch.autograd.grad(fast, [x, y]), torch.autograd.grad(slow, [x, y])):
        torch.testing.assert_close(a, b)
    assert mk_mmd(x, y[:4]).isfinite()


def test_mmd_in_less_precision():
    """In float32 it stays close far from the origin; under autocast it is computed in float32."""
    torch.manual_seed(0)
    x, y = torch.randn(32, 50), torch.randn(32, 50) + 0.3
    exact = naive_mmd(x.double(), y.double()).item()
    assert mk_mmd(x, y).item() == pytest.approx(exact, abs=1e-5)
    assert mk_mmd(x + 64, y + 64).item() == pytest.approx(exact, abs=1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mk_mmd(x, y).item() == pytest.approx(exact, abs=1e-4)
        assert mk_mmd(x.bfloat16(), y.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("value", [0.0, 0.1, 1e4])
@pytest.mark.parametrize("rows", [1, 5])
def test_degenerate_mmd_is_zero_and_keeps_the_graph(value, rows):
    x = torch.full((rows, 3), value, requires_grad=True)
    loss = mk_mmd(x, x.detach())
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_guiding_head_numbers():
    """f = [1, 0], identity head, y = 0: CE .313262, half of it is added; the guide is a copy without gradient."""
    head = nn.Linear(2, 2, bias=False)
    nn.init.eye_(head.weight)
    features, label = torch.tensor([[1.0, 0.0]], requires_grad=True), torch.tensor([0])
    term = GuidingHead(0.5).begin(small_round(net=SimpleNamespace(head=head)))
    loss = F.cross_entropy(head(features), label)
    batch = Batch(images=None, labels=label, features=features, logits=head(features), loss=loss)
    total = loss + term(batch)
    total.backward()
    assert (loss.item(), total.item()) == pytest.approx((0.313262, 0.469893), abs=1e-6)
    torch.testing.assert_close(features.grad, torch.tensor([[-0.403412, 0.403412]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(head.weight.grad[0], torch.tensor([-0.268941, 0.0]), atol=1e-6, rtol=0)
    with torch.no_grad():
        head.weight += 5.0
    assert term(batch).item() == pytest.approx(0.5 * 0.313262, abs=1e-6)


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


def test_heads_for_contrasts():
    """MOON: d - d - 256 before the classifier, or a bottleneck. SelfReg: twice as wide but for 2048; logits stay."""
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
    logits, labels = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 1])
    loss, own = F.cross_entropy(logits, labels), in_batch_contrast(logits, labels)
    for share in (0.25, 1.0):
        term = InBatchContrast(share).begin(small_round())(Batch(None, labels, logits=logits, loss=loss))
        torch.testing.assert_close(loss + term, (1 - share) * loss + share * own)
    assert InBatchContrast(0.0).begin(small_round()) is None
