"""IRM, V-REx, GroupDRO, CORAL, MMD and Fish on numbers by hand, and what they do on clients of one and many domains."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_round import colour_images, small_round
from support import small_experiment
from torch import nn

from clients.batch import Batch
from clients.local_data import LocalData
from clients.step.inter_domain import InterDomain, interpolate
from clients.terms.feature_alignment import CorrelationAlignment, MeanDiscrepancy, kernel_mean
from clients.terms.group_robust import ENTRY, GroupRobust
from clients.terms.invariant_risk import InvariantRisk, scale_gradient
from clients.terms.risk_extrapolation import RiskExtrapolation
from fedsim.data import ClientData
from fedsim.data.augment import Normalization, Transforms
from fedsim.methods.further_rows import DOMAIN_METHODS
from fedsim.runtime.launch import carry_out
from fedsim.testing.contract import small_plan

A = [[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.5, 0.0]]
B = [[0.0, 1.0], [1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]
LABELS = torch.tensor([0, 1, 1, 0, 0, 0, 1, 1])
RISKS = 0.8068820926, 0.6116496417
TERMS = InvariantRisk(), RiskExtrapolation(), GroupRobust(), CorrelationAlignment(), MeanDiscrepancy()


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def domain_round(domains, steps=1, **changes):
    """A round of a client with one training example of each of these domains, and an optimizer with a moment."""
    round = small_round(data=None, steps=steps, **changes)
    round.data = SimpleNamespace(domains=np.array(domains))
    weight = nn.Parameter(torch.ones(1))
    round.optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
    round.optimizer.state[weight]["momentum_buffer"] = torch.ones(1)
    return round


def batch_of(logits, labels=LABELS, features=None):
    logits = doubles(logits).requires_grad_()
    loss = F.cross_entropy(logits, labels)
    count = len(labels)
    return Batch(None, labels, logits=logits, features=features, loss=loss, positions=np.arange(count))


def two_domains(**changes):
    return domain_round([0] * 4 + [1] * 4, **changes)


def test_risk_extrapolation_is_the_variance_of_the_risks():
    batch = batch_of(A + B)
    penalty = RiskExtrapolation(lam=10, anneal_steps=0).begin(two_domains())(batch)
    assert penalty.item() == pytest.approx(10 * 0.00952892747, abs=1e-6)
    assert penalty.item() == pytest.approx(10 * (RISKS[0] - RISKS[1]) ** 2 / 4)
    unequal = domain_round([0, 0, 1, 2, 2, 2, 2, 2])  # three domains of 2, 1 and 5 rows
    risks = [F.cross_entropy(batch.logits[rows], LABELS[rows]).item() for rows in ([0, 1], [2], [3, 4, 5, 6, 7])]
    expected = sum((risk - sum(risks) / 3) ** 2 for risk in risks) / 3
    assert RiskExtrapolation(1, 0).begin(unequal)(batch).item() == pytest.approx(expected)


def test_scale_gradient_is_that_of_autograd():
    for logits, labels, halves in (
        (A, LABELS[:4], (0.7463263673, -0.2288558780)),
        (B, LABELS[4:], (0.2463263673, -0.1344707107)),
    ):
        logits = doubles(logits)
        found = [scale_gradient(logits[start::2], labels[start::2]).item() for start in (0, 1)]
        assert found == pytest.approx(halves, abs=1e-9)
        scale = doubles(1.0).requires_grad_()
        (expected,) = torch.autograd.grad(F.cross_entropy(scale * logits, labels), scale)
        assert scale_gradient(logits, labels).item() == pytest.approx(expected.item())


def test_invariant_risk_in_both_estimates():
    """Products of halves -.1708 and -.0331; squares of the halves' means, .2587352447 and .0559278283."""
    batch = batch_of(A + B)
    penalty = InvariantRisk(lam=100, anneal_steps=0).begin(two_domains())(batch)
    assert (batch.loss + penalty).item() == pytest.approx(-9.4869770, abs=1e-6)
    assert penalty.item() == pytest.approx(100 * -0.1019624288, abs=1e-7)
    square = InvariantRisk(1, 0, "square").begin(two_domains())(batch)
    means = (0.7463263673 - 0.2288558780) / 2, (0.2463263673 - 0.1344707107) / 2
    assert square.item() == pytest.approx((means[0] ** 2 + means[1] ** 2) / 2, abs=1e-9)
    penalty.backward()
    assert batch.logits.grad.abs().sum() > 0
    single = domain_round([0] * 7 + [1])  # one row has no second half: only one domain is left
    assert InvariantRisk(100, 0).begin(single)(batch).item() == 0


def test_the_weight_is_one_until_the_switch_where_the_moments_go():
    """Two rounds of two steps with a switch at step 3; the same batch twice (FedSAM) is one step."""
    part, batch_numbers = RiskExtrapolation(lam=10, anneal_steps=3), []
    round = two_domains(steps=2)
    for number in (1, 2):
        round = two_domains(steps=2, store=round.store)
        term = part.begin(round)
        for _ in range(2):
            batch = batch_of(A + B)
            values = [term(batch).item() for _ in range(2)]
            assert values[0] == values[1]
            batch_numbers.append((number, round_to(values[0] / 0.00952892747), len(round.optimizer.state)))
        part.end(round)
        round.store.commit()
    assert batch_numbers == [(1, 1, 1), (1, 1, 1), (2, 1, 1), (2, 10, 0)]


def round_to(value):
    return int(value + 0.5)


def test_group_robust_raises_the_worse_domain_and_remembers():
    round, batch, part = two_domains(), batch_of(A + B), GroupRobust(0.01)
    robust = batch.loss + part.begin(round)(batch)
    assert robust.item() == pytest.approx(0.7093611564, abs=1e-7)
    q = round.scratch[ENTRY]
    assert q.tolist() == pytest.approx([0.5004880810, 0.4995119190], abs=1e-7)
    assert q.grad is None
    part.end(round)
    again = two_domains(store=round.store)
    part.begin(again)(batch_of(A + B))
    ratio = math.exp(2 * 0.01 * (RISKS[0] - RISKS[1]))  # two steps
    assert again.scratch[ENTRY].tolist() == pytest.approx([ratio / (1 + ratio), 1 / (1 + ratio)], abs=1e-6)
    term = GroupRobust(0.5).begin(two_domains())
    assert term(batch).item() == term(batch).item()  # a second pass over a batch raises nothing
    three = domain_round([0] * 4 + [1] * 4 + [2])  # a domain that is not in the batch keeps its weight of 1/3
    GroupRobust(1.0).begin(three)(batch_of(A + B))
    raised = [math.exp(RISKS[0]), math.exp(RISKS[1]), 1.0]
    assert three.scratch[ENTRY].tolist() == pytest.approx([each / sum(raised) for each in raised], abs=1e-6)


FEATURES = [[0.0, 1.0], [2.0, 1.0], [1.0, 4.0], [1.0, 1.0], [3.0, 0.0], [2.0, 2.0]]


def distance_of(part, features, domains):
    features = doubles(features)
    batch = batch_of([[0.0, 0.0]] * len(domains), torch.zeros(len(domains), dtype=torch.long), features)
    return part.begin(domain_round(domains))(batch).item()


def test_correlation_alignment():
    """mu (1, 2) and (2, 1); C_a = [[1, 0], [0, 3]], C_b = [[1, -.5], [-.5, 1]]."""
    domains = [0, 0, 0, 1, 1, 1]
    assert distance_of(CorrelationAlignment(), FEATURES, domains) == pytest.approx(1.0 + 1.125)
    assert distance_of(CorrelationAlignment(2.0, "paper"), FEATURES, domains) == pytest.approx(2 * 4.5 / (4 * 2**2))
    third = [[0.0, 1.0], [2.0, 1.0], [1.0, 4.0]]  # a again: pairs (a, b), (a, a), (b, a)
    found = distance_of(CorrelationAlignment(), FEATURES + third, [*domains, 2, 2, 2])
    assert found == pytest.approx((2.125 + 0 + 2.125) / 3)
    assert distance_of(CorrelationAlignment(), FEATURES, [0, 0, 0, 0, 0, 1]) == 0  # one example has no covariance


def test_mean_discrepancy():
    a, b = doubles(FEATURES[:3]), doubles(FEATURES[3:])
    assert kernel_mean(a, a).item() == pytest.approx(3.9269016220, abs=1e-9)
    assert kernel_mean(a, b).item() == pytest.approx(2.7050518831, abs=1e-9)
    assert distance_of(MeanDiscrepancy(), FEATURES, [0, 0, 0, 1, 1, 1]) == pytest.approx(2.6393062406, abs=1e-9)
    gammas = [10.0**power for power in range(-3, 4)]
    far = 2 * 7 - 2 * sum(math.exp(-gamma * 4) for gamma in gammas)  # two equal points, and two at distance 2
    points = [[0.0], [0.0], [2.0], [2.0]]
    assert distance_of(MeanDiscrepancy(0.5), points, [0, 0, 1, 1]) == pytest.approx(far / 2)


@pytest.mark.parametrize("part", TERMS, ids=lambda part: type(part).__name__)
def test_nothing_is_added_for_one_domain(part):
    """On a client of one domain there is no term; in a batch of one domain it is 0."""
    assert part.begin(domain_round([0] * 8)) is None
    term, features = part.begin(domain_round([0] * 8 + [1])), doubles([[0.0]] * 8)
    assert term(batch_of(A + B, features=features)).item() == 0


def moving_round(targets, theta=1.0, lr=0.1):
    """A round whose network is one number theta, with the loss (theta - target)^2 / 2 for the image's target."""
    net = nn.Linear(1, 1, bias=False).double()
    net.weight.data.fill_(theta)
    net.register_buffer("seen", doubles([0.0]))
    net.register_buffer("steps", torch.tensor(0))
    round = domain_round(range(len(targets)), net=net)
    round.data.domains = np.repeat(np.arange(len(targets)), 2)
    round.optimizer = torch.optim.SGD(net.parameters(), lr)

    def objective(batch):
        net.seen.add_(batch.images.mean())
        net.steps.add_(1)
        batch.loss = 0.5 * (net.weight.squeeze() - batch.images).square().mean()
        return batch.loss

    round.objective = objective
    images = doubles(targets).repeat_interleave(2)
    batch = Batch(images, LABELS[: len(images)], raw=images, augmented=images, positions=np.arange(len(images)))
    return round, batch


def test_inter_domain_step():
    """From 1: 1.2 after the step towards 3, .98 after that towards -1; half of the way is .99."""
    round, batch = moving_round([3.0, -1.0])
    loss = InterDomain(order="fixed").begin(round)(batch)
    assert round.net.weight.item() == pytest.approx(0.99)
    assert loss.item() == pytest.approx((2.0 + 2.42) / 2)  # (1-3)^2/2 and (1.2+1)^2/2
    assert round.net.seen.item() == pytest.approx(0.5 * (3.0 - 1.0))  # buffers move a part of the way too
    assert round.net.steps.item() == 2  # integers do not
    other, batch = moving_round([-1.0, 3.0])
    InterDomain(meta_lr=1.0, order="fixed").begin(other)(batch)  # .8, then 1.02
    assert other.net.weight.item() == pytest.approx(1.02)
    ends = set()
    for seed in range(8):
        round, batch = moving_round([3.0, -1.0])
        round.seed = seed
        InterDomain().begin(round)(batch)
        ends.add(round_to(1000 * round.net.weight.item()))
    assert ends == {990, 1010}  # in both orders
    alone, batch = moving_round([3.0])
    InterDomain().begin(alone)(batch)
    assert alone.net.weight.item() == pytest.approx(1.2)  # FedAvg's step


def test_interpolate_takes_the_share_of_the_way():
    state = {"a": doubles([4.0]), "n": torch.tensor(7)}
    interpolate(state, {"a": doubles([2.0])}, 0.25)
    assert (state["a"].item(), state["n"].item()) == (2.5, 7)


def test_a_part_of_a_batch_has_its_rows_and_their_augmentation():
    images = colour_images(6)
    data = ClientData("a", images, np.arange(6) % 3, np.arange(6), np.arange(0), ("x", "y", "z"), ("p", "q"),
                      np.array([0, 1, 0, 1, 1, 0]))  # fmt: skip
    flip = Transforms(lambda x: torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x), Normalization())
    local = LocalData(data, flip, torch.device("cpu"))
    assert local.domains.tolist() == [0, 1, 0, 1, 1, 0]
    batch = local.batch(np.array([5, 3, 1, 0]))
    part = batch.part(np.array([0, 3]))
    assert part.positions.tolist() == [5, 0]
    assert part.labels.tolist() == [2, 0]
    assert part.images.equal(batch.images[[0, 3]])
    assert part.prepare(part.raw).equal(part.images)


@pytest.mark.parametrize("method", DOMAIN_METHODS)
def test_a_run_says_that_every_client_has_one_domain_and_is_fedavg(method, tmp_path):
    few = ["train.rounds=1", "data.fraction=0.05"]
    run, plain = (carry_out(small_plan(name, tmp_path / name, [*few, "data.mix=0"])) for name in (method, "fedavg"))
    rows = [(folder / "rounds.csv").read_text().splitlines()[-1].split(",") for folder in (run, plain)]
    header = (run / "rounds.csv").read_text().splitlines()[0].split(",")
    same = [column for column in header if "loss" in column or "accuracy" in column]
    assert same
    assert all(rows[0][header.index(column)] == rows[1][header.index(column)] for column in same)
    remarks = json.loads((run / "environment.json").read_text())["data_remarks"]
    said = [text for text in remarks if text.startswith("every client has one domain")]
    assert len(said) == 1
    assert f"set data.mix, or train deepall+{method} on pooled data" in said[0]
    mixed = carry_out(small_plan(method, tmp_path / "mixed", few))
    assert "every client" not in (mixed / "environment.json").read_text()


def test_pooled_data_have_a_term_of_all_domains(tmp_path):
    """deepall+irm differs from deepall, and says nothing of clients."""
    few = ["train.rounds=1", "data.fraction=0.05", "data.mix=0"]
    names = "deepall+irm", "deepall"
    runs = [carry_out(small_plan(name, tmp_path / name, [*few, *add])) for name, add in
            zip(names, ([], ['method.batches="equal_domains"']))]  # fmt: skip
    losses = [(run / "rounds.csv").read_text().splitlines()[-1] for run in runs]
    assert losses[0] != losses[1]
    assert "every client" not in (runs[0] / "environment.json").read_text()


def test_terms_of_domains_are_refused_with_steps_on_single_domains(tmp_path):
    from fedsim.common.errors import UserError
    from fedsim.methods.assembly import build_recipe

    with pytest.raises(
        UserError, match="risk_extrapolation assumes that the loss of a batch is that of all its domains"
    ):
        build_recipe(small_experiment(tmp_path, {"name": "vrex+fish"}))
