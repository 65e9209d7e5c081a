"""Label smoothing, the guiding head, the proximal penalty, MMD and the supervised contrast: numbers and formulas."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from small_round import small_round
from torch import nn

from clients.parts import Batch
from clients.terms.guiding_head import GuidingHead
from clients.terms.label_smoothing import LabelSmoothing
from clients.terms.proximal import Proximal
from clients.tools.losses import MMD_SCALES, mk_mmd, proximal

X = torch.tensor([[0.0], [1.0]])
Y = torch.tensor([[2.0], [3.0]])


def naive_mmd(x, y, scales=MMD_SCALES, statistic="u"):
    """The formula term by term, with explicit differences."""
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
    """Cross-entropy with the term that smooths its labels."""
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
    """Squared over all tensors (unsquared norms would give .075); the gradient is mu (w - w0)."""
    w = [torch.tensor([1.5], requires_grad=True), torch.tensor([2.0], requires_grad=True)]
    penalty = proximal(w, [torch.ones(1)] * 2, 0.1)
    penalty.backward()
    assert penalty.item() == pytest.approx(0.0625)
    assert [value.grad.item() for value in w] == pytest.approx([0.05, 0.10])


def test_proximal_autograd_in_both_orders_and_detached_reference():
    w = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2), (4,))]
    reference = [torch.randn_like(p).requires_grad_() for p in w]
    assert torch.autograd.gradcheck(lambda *p: proximal(p, reference, 0.3), w)
    assert torch.autograd.gradgradcheck(lambda *p: proximal(p, reference, 0.3), w)
    proximal(w, reference, 0.3).backward()
    assert all(r.grad is None for r in reference)
    assert torch.autograd.grad(proximal(w, [p.detach() for p in w], 1.0), w)[0].abs().max() == 0
    assert proximal(w, reference, 0.0).item() == 0


@pytest.mark.parametrize(
    ("w", "start", "words"), [([X, Y], [X], "2 parameters"), ([X], [X.T], "shape"), ([], [], "at least one")]
)
def test_proximal_refuses_lists_that_do_not_match(w, start, words):
    with pytest.raises(ValueError, match=words):
        proximal(w, start, 0.1)


@pytest.mark.parametrize("factor", [1, 10])
@pytest.mark.parametrize(("scales", "statistic", "expected"), [
    (MMD_SCALES, "u", 2.043262), (MMD_SCALES, "v", 4.570397), ((1.0,), "v", 0.877387), ((1.0,), "u", 0.696118),
])  # fmt: skip
def test_mmd_by_hand(scales, statistic, expected, factor):
    assert mk_mmd(factor * X, factor * Y, scales, statistic).item() == pytest.approx(expected, abs=2e-6)


def test_mmd_of_a_sample_with_itself_and_of_an_unknown_statistic():
    assert mk_mmd(X, X, statistic="v").item() == 0
    assert mk_mmd(X, X).item() == pytest.approx(-3.865679, abs=2e-6)
    with pytest.raises(ValueError, match="statistic"):
        mk_mmd(X, Y, statistic="w")


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
    term, loss = (
        GuidingHead(0.5).begin(small_round(net=SimpleNamespace(head=head))),
        F.cross_entropy(head(features), label),
    )
    batch = Batch(images=None, labels=label, features=features, logits=head(features), loss=loss)
    total = loss + term(batch)
    total.backward()
    assert (loss.item(), total.item()) == pytest.approx((0.313262, 0.469893), abs=1e-6)
    torch.testing.assert_close(features.grad, torch.tensor([[-0.403412, 0.403412]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(head.weight.grad[0], torch.tensor([-0.268941, 0.0]), atol=1e-6, rtol=0)
    with torch.no_grad():
        head.weight += 5.0
    assert term(batch).item() == pytest.approx(0.5 * 0.313262, abs=1e-6)


@pytest.mark.parametrize("part", [GuidingHead(0.0), LabelSmoothing(0.0), Proximal(0.0)])
def test_a_term_without_weight_is_none(part):
    assert part.begin(small_round(net=nn.Linear(2, 2))) is None


def test_proximal_term_pulls_to_the_received_model():
    net = nn.Linear(1, 1, bias=False)
    term = Proximal(1.0).begin(small_round(net=net))
    with torch.no_grad():
        net.weight += 1.0
    penalty = term(None)
    penalty.backward()
    assert (penalty.item(), net.weight.grad.item()) == pytest.approx((0.5, 1.0))
