"""T3A, Tent, LAME and SHOT-IM on numbers worked out by hand, and on networks that they do not fit."""

import copy

import pytest
import torch
from networks import build
from torch import nn

from fedsim.common.errors import UserError
from fedsim.models.infer.adapted import entropy
from fedsim.models.infer.lame import LAME, laplacian_adjusted, nearest_others
from fedsim.models.infer.shot_im import ShotIM, information_loss, without_head
from fedsim.models.infer.t3a import Supports, T3a
from fedsim.models.infer.tent import Tent, mean_entropy, scales_and_shifts
from fedsim.models.net import Net

RULES = [T3a(), Tent(), LAME(), ShotIM()]


def close(found, expected, atol=1e-6):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), atol=atol, rtol=0)


def logits_of(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_rule_leaves_the_network_alone_and_starts_anew(net, digits, rule):
    """It is said to be transductive, needs a random order, and gives logits or log-probabilities under inference."""
    before = copy.deepcopy(net.state_dict())
    assert (rule.transductive, rule.shuffled, rule.divisible) == (True, True, False)
    with torch.inference_mode():
        first, again = (rule.begin(net, tuple)(digits) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.isfinite(first).all()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    plain = net.eval()(digits)
    assert not torch.allclose(first.log_softmax(1), plain.log_softmax(1), atol=1e-3)


def head_of(*rows):
    head = nn.Linear(2, len(rows)).double()
    nn.init.zeros_(head.bias)
    head.weight.data = torch.tensor(rows, dtype=torch.float64)
    return head


FEATURES = torch.tensor([(1, 0.2), (0.3, 1), (0.6, 0.9)], dtype=torch.float64)


@pytest.mark.parametrize(("kept", "expected", "classes"), [
    (1, FEATURES.tolist(), [0, 1, 1]),
    (0, [[1.0018577233, 0.3430932238], [0.6538233566, 1.0329643389], [0.8942502839, 0.9775882428]], [0, 1, 1]),
    (20, [[1.0018577233, 0.3430932238], [0.6538233566, 1.0329643389], [0.8942502839, 0.9775882428]], [0, 1, 1]),
])  # fmt: skip
@torch.no_grad()
def test_t3a_numbers(kept, expected, classes):
    """W = (2, 0), (0, 1): eval mode says 0, 1, 0. With M = 1 the rows of W stay, because their entropies are lowest."""
    head = head_of((2, 0), (0, 1))
    close(entropy(head(head.weight)), (0.0900947678, 0.5822031089), 1e-9)
    close(entropy(head(FEATURES)), (0.4083095273, 0.6735401884, 0.6820224894), 1e-9)
    supports = Supports(head, kept)
    supports.add(FEATURES)
    logits = FEATURES @ supports.centers().T
    close(logits, expected, 1e-9)
    assert logits.argmax(1).tolist() == classes


@torch.no_grad()
def test_supports_that_were_let_go_do_not_come_back_and_older_ones_win():
    supports = Supports(head_of((2, 0), (0, 1)), 1)
    supports.add(torch.tensor([[9.0, 0.0], [9.0, 0.0]], dtype=torch.float64))
    assert supports.rows.tolist() == [[0, 1], [9, 0]]
    supports.add(torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64))
    assert supports.rows.tolist() == [[0, 1], [9, 0]]
    close(supports.centers(), [[1.0, 0.0], [0.0, 1.0]])
    one_class = Supports(head_of((2, 0), (1, 0)), 20)  # both rows of W are classified as class 0
    close(one_class.centers(), [[1.0, 0.0], [0.0, 0.0]])


@torch.no_grad()
def test_t3a_goes_on_over_batches_of_its_own_size(net, digits):
    one, two = (T3a(batch=size).begin(net, tuple) for size in (4, 4))
    parts = torch.cat([two(digits[:4]), two(digits[4:])])
    assert torch.equal(one(digits), parts)


class OneChannel(nn.Module):
    """Batch norm of one channel; the logits of x are (y, -y)."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.head = nn.Identity()

    def forward(self, x):
        y = self.norm(x).flatten(1)
        return torch.cat([y, -y], dim=1)


def column(*values):
    return torch.tensor(values).view(-1, 1, 1, 1)


def test_tent_numbers(monkeypatch):
    """x = 1, 3, 2, 6 with mean 3 and biased variance 3.5. The prediction is that of before the step, by plain SGD."""
    net = OneChannel()
    seen = []

    def sgd(parameters, lr):
        seen.extend(parameters)
        return torch.optim.SGD(seen, lr)

    monkeypatch.setattr(torch.optim, "Adam", sgd)
    predict, images = Tent(lr=0.1).begin(net, tuple), column(1.0, 3, 2, 6)
    logits = predict(images)
    y = (images.flatten() - 3) / (3.5 + 1e-5) ** 0.5
    torch.testing.assert_close(logits[:, 0], y)
    assert mean_entropy(logits).item() == pytest.approx(0.4407142580, abs=1e-6)
    gamma, beta = (parameter.item() for parameter in seen)
    assert (gamma, beta) == pytest.approx((1.0258298813, -0.0142592155), abs=1e-6)
    torch.testing.assert_close(predict(images)[:, 0], gamma * y + beta)
    alone = predict(column(5.0))  # one image: the running statistics, mean 0 and variance 1
    gamma, beta = (parameter.item() for parameter in seen)
    assert alone[0, 0].item() == pytest.approx(gamma * 5 / (1 + 1e-5) ** 0.5 + beta)
    assert (net.norm.weight.item(), net.norm.running_mean.item()) == (1.0, 0.0)


def test_more_steps_predict_before_the_last_one(net, digits):
    one, two = Tent(steps=2).begin(net, tuple), Tent(steps=1).begin(net, tuple)
    two(digits)
    torch.testing.assert_close(one(digits), two(digits))


def test_what_moves(digits):
    """Tent moves scales and shifts of maps alone; SHOT-IM all but the head and what is frozen."""
    net = build("digits-cnn-bn", channels=1, size=28, bottleneck=8)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    scales = {names[id(parameter)] for parameter in scales_and_shifts(net)}
    assert scales == {f"backbone.norm{layer}.{kind}" for layer in (1, 2) for kind in ("weight", "bias")}
    net.frozen = frozenset({"backbone.conv1.weight"})
    features = {names[id(parameter)] for parameter in without_head(net)}
    assert features == {name for name in names.values() if not name.startswith("head")} - net.frozen
    tent, shot = (rule.begin(net, tuple) for rule in (Tent(lr=0.01), ShotIM(lr=0.01)))
    torch.testing.assert_close(tent(digits), shot(digits))
    assert not torch.allclose(tent(digits), shot(digits), atol=1e-4)


def test_information_loss_numbers():
    """p = (.7, .3), (.4, .6): the mean entropy less that of (.55, .45)."""
    logits = logits_of((0.7, 0.3), (0.4, 0.6))
    assert entropy(logits).mean().item() == pytest.approx(0.6419379845, abs=1e-9)
    assert information_loss(logits).item() == pytest.approx(0.6419379845 - 0.6881388137, abs=1e-9)
    sure = logits_of((1 - 1e-9, 1e-9), (1e-9, 1 - 1e-9))
    assert information_loss(sure).item() == pytest.approx(-(2**-1) * 2 * torch.tensor(2.0).log().item(), abs=1e-6)


def test_lame_numbers():
    """The nearest of (1, 0) and (1, .1) are each other, that of (0, 1) is (1, .1). One step: softmax(log p + W p)."""
    log_p = logits_of((0.6, 0.4), (0.45, 0.55), (0.9, 0.1))
    features = torch.tensor([(1, 0), (1, 0.1), (0, 1)], dtype=torch.float64)
    affinity = nearest_others(features, 1)
    assert affinity.tolist() == [[0, 1, 0], [1, 0, 0], [0, 1, 0]]
    assert nearest_others(features, 5).tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
    once = laplacian_adjusted(log_p, affinity, most=1).exp()
    close(once[:, 0], (0.5757779613, 0.4998323261, 0.8906331295), 1e-9)
    end = laplacian_adjusted(log_p, affinity).exp()
    torch.testing.assert_close(end, torch.softmax(log_p + affinity @ end, 1), atol=1e-4, rtol=0)
    assert torch.equal(laplacian_adjusted(log_p, 0 * affinity), log_p.log_softmax(1))


@torch.no_grad()
def test_one_image_or_no_neighbour_is_eval_mode(net, digits):
    plain = net.eval()(digits).log_softmax(1)
    torch.testing.assert_close(LAME(k=0).begin(net, tuple)(digits), plain)
    torch.testing.assert_close(LAME(batch=1).begin(net, tuple)(digits), plain)


def test_networks_that_a_rule_does_not_fit(digits):
    with pytest.raises(UserError, match="tent trains the scale and shift of batch norm"):
        Tent().begin(build("digits-cnn", channels=1, size=28), tuple)
    net = build("digits-cnn", channels=1, size=28)
    net.head = nn.Sequential(net.head)
    with pytest.raises(UserError, match="t3a begins with the weights of a linear head"):
        T3a().begin(net, tuple)
    frozen = Net(nn.Flatten(), 4, 3)
    with pytest.raises(UserError, match="all layers but the head are frozen"):
        ShotIM().begin(frozen, tuple)
