"""Flower's strategies as parts, and robust and private means: numbers worked out by hand, and Flower's own classes."""

import math

import flwr.serverapp.strategy as theirs
import numpy as np
import pytest
from replies import model, replies, uniform

from fedsim.settings.experiment import Experiment
from strategies.fuse.bulyan import Bulyan
from strategies.fuse.coordinate_median import CoordinateMedian
from strategies.fuse.krum import Krum
from strategies.fuse.private_mean import PrivateMean
from strategies.fuse.q_fed_avg import QFedAvg
from strategies.fuse.trimmed_mean import TrimmedMean
from strategies.parts import RefusedUpdateError, ServerRound, Update
from strategies.refine.flower_optimizer import FedAdagrad, FedAdam, FedAvgM, FedYogi
from strategies.wire import flower_strategies as flower

ADAM_1 = 0.1 * math.sqrt(0.0199) / 0.19 * 0.05 / (0.05 + 0.001)
M, V = 0.9 * 0.05 - 0.02, 0.99 * 0.0025 + 0.01 * 0.04
ADAM_2 = 0.1 * math.sqrt(1 - 0.99**3) / (1 - 0.9**3) * M / (math.sqrt(V) + 0.001)
YOGI_1, ADAGRAD_1 = 0.01 * 0.05 / 0.051, 0.1 * 0.5 / 0.501
YOGI_2 = 0.01 * (0.9 * 0.05 + 0.01) / (math.sqrt(0.0025 + 0.01 * 0.01) + 0.001)
ADAGRAD_2 = 0.1 * 0.1 / (math.sqrt(0.26) + 0.001)


@pytest.mark.parametrize(("part", "targets", "expected"), [
    # m = .5; then the clients' mean is .25: m = .45 + .25 = .7, theta = .5 - .7 = -.2
    (FedAvgM(1.0, 0.9), (0.5, 0.25), (0.5, -0.2)),
    (FedAvgM(0.5, 0.0), (0.5, 0.25), (0.75, 0.5)),
    # Delta = .5: m = .05, v = .0025, factor .1 sqrt(1 - .99^2)/(1 - .9^2) = .0742460; then Delta = -.2 from there
    (FedAdam(), (1.5, 1 + ADAM_1 - 0.2), (1 + ADAM_1, 1 + ADAM_1 + ADAM_2)),
    # v = .0025, step .01 .05/.051; then Delta = .1: v = .0024
    (FedYogi(), (1.5, 1.1 + YOGI_1), (1 + YOGI_1, 1 + YOGI_1 + YOGI_2)),
    # v = .25, step .1 .5/.501; then .26
    (FedAdagrad(), (1.5, 1.1 + ADAGRAD_1), (1 + ADAGRAD_1, 1 + ADAGRAD_1 + ADAGRAD_2)),
    # with a large tau = eta the divisor is nearly constant, which is FedAvg
    *((part, (1.5, 1.3), (1.5, 1.3)) for part in (FedAdam(1e6, 0, 0, 1e6), FedYogi(1e6, 0, 0, 1e6), FedAvgM(1, 0))),
])  # fmt: skip
def test_server_optimizers_by_hand(part, targets, expected):
    """The parameter starts at 1; the clients' mean is one of the targets in each round; buffers are as fused."""
    arrays, theta = {}, model(1.0)
    for round, (target, value) in enumerate(zip(targets, expected), start=1):
        server = ServerRound(round, 9, ["a"], theta, arrays=arrays, parameters=frozenset({"w"}))
        theta = part.refine(model(target, mean=round, count=round), server)
        assert (theta["mean"], theta["count"], theta["w"].dtype) == (round, round, np.float32)
        assert theta["w"].item() == pytest.approx(value, abs=1e-5)


def sent(*models, start=0.0):
    """(updates with these parameters, the round). Their running means are 0, 1, 4, 9, ..., their counters 1, 2, 3."""
    rows = [np.atleast_1d(np.float64(each)) - start for each in models]
    updates, server = replies(*rows, start=start, metrics=[{"train_loss": 1.0}] * len(rows), means=lambda k: k * k)
    server.experiment = Experiment(train={"lr": 0.5})
    return updates, server


@pytest.mark.parametrize(("part", "start", "models", "w", "mean", "count"), [
    # f = 0, two nearest of each: scores 1 + 1.21, 1 + .01, .01 + 1.21, 64 + 62.41; the second is chosen
    (Krum(), 5.0, (0.0, 1.0, 1.1, 9.0), 1.0, 1.0, 2),
    (Krum(select=2), 5.0, (0.0, 1.0, 1.1, 9.0), 1.05, 2.5, 3),  # b 1.01, c 1.22
    (Krum(), 0.0, (-1.0, 0.0, 1.0, 3.0, 3.1), 1.0, 4.0, 3),  # three nearest: 9 for c; two would be 2 for b
    (Krum(select=9), 5.0, (0.0, 1.0, 1.1, 9.0), 11.1 / 4, 3.5, 4),  # all
    (Krum(2, 4), 0.0, (10.0, 1.0, 1.1, 1.2, 1.3, 1e9), 1.15, None, None),  # 10 is too long also besides 1e9
    # of the five of seven with the lowest scores, the three values nearest to the median; 9: the median of 0, 1, .. 36
    (Bulyan(1), 0.0, (1.0, 2.0, 3.0, 4.0, 5.0, 400.0, -900.0), 3.0, 9.0, None),
    (Bulyan(1), 7.0, (1.0, 2.0, 3.0), 7.0, None, None),  # too few
    (Bulyan(0), 7.0, (1.0, 2.0, 3.0), 2.0, None, None),
    (QFedAvg(0.0), 0.5, (1.0, 3.0), 2.0, None, None),
    # a counter is the lower median: a count that a client really has
    (CoordinateMedian(), 0.0, ([1, 9], [2, -5], [100, 3]), [2, 3], 1, 2),
    (CoordinateMedian(), 0.0, ([1, 0], [2, 0], [4, 0], [1000, 0]), [3, 0], 2.5, 2),
    (TrimmedMean(0.2), 0.0, ([1, 5], [2, 4], [3, 3], [6, 2], [1e30, -1e30]), [11 / 3, 3], None, None),  # middle three
])  # fmt: skip
def test_robust_fusions_by_hand(part, start, models, w, mean, count):
    updates, server = sent(*models, start=start)
    fused = part.fuse(updates, uniform(updates), server)
    assert fused["w"].tolist() == pytest.approx(np.atleast_1d(w).tolist())
    assert fused["mean"].item() == (fused["mean"].item() if mean is None else mean)
    assert fused["count"] == (fused["count"] if count is None else count)
    assert (fused["w"].dtype, fused["count"].dtype) == (np.float32, np.int64)


@pytest.mark.parametrize(("part", "weights"), [(Krum(), [0, 1, 0, 0]), (CoordinateMedian(), [1 / 4] * 4)])
def test_the_records_say_whom_a_fusion_has_used(part, weights):
    updates, server = sent(0.0, 1.0, 1.1, 9.0)
    part.fuse(updates, uniform(updates), server)
    assert [server.client_columns[client]["weight"] for client in "abcd"] == weights


def test_q_fed_avg_by_hand():
    """From 0, models 1 and 3 with losses 2 and 1, q = 1, L = 2: 10/46. A negative loss is refused."""
    updates, server = sent(1.0, 3.0)
    updates[0].metrics["train_loss"] = 2.0
    found = QFedAvg(1.0).fuse(updates, uniform(updates), server)
    assert (found["w"].item(), found["mean"].item()) == (pytest.approx(10 / 46, rel=1e-6), 0.5)
    updates[1].metrics["train_loss"] = -1.0
    with pytest.raises(RefusedUpdateError, match="b: its training loss is -1"):
        QFedAvg().fuse(updates, uniform(updates), server)


@pytest.mark.parametrize(("rule", "part"), [
    (theirs.MultiKrum(num_malicious_nodes=2, num_nodes_to_select=4), Krum(2, 4)),
    (flower.Bulyan(num_malicious_nodes=2), Bulyan(2)),
    (theirs.FedMedian(), CoordinateMedian()),
    (theirs.FedTrimmedAvg(beta=0.34), TrimmedMean(0.34)),
    (theirs.QFedAvg(client_learning_rate=0.5, q=0.7), QFedAvg(0.7)),
])  # fmt: skip
def test_flowers_own_strategies_give_the_same(rule, part):
    rng = np.random.default_rng(3)
    updates, server = sent(*rng.normal(size=(11, 5)))
    for update in updates:
        update.metrics["train_loss"] = float(rng.uniform(0, 3))
    rule.current_arrays = flower.record({"w": server.previous["w"].astype(np.float64)})
    said = [{flower.WEIGHT: 1, flower.LOSS: update.metrics["train_loss"]} for update in updates]
    expected = flower.aggregate(rule, 1, [{"w": update.arrays["w"].astype(np.float64)} for update in updates], said)
    np.testing.assert_allclose(part.fuse(updates, uniform(updates), server)["w"], expected["w"], rtol=1e-6)


def test_private_mean_by_hand():
    """Updates (3, 4), clipped to length 1 over all tensors, and (.3, .4), which stays; noise of deviation z C / K."""
    models = [{name: np.float32([value]) for name, value in zip("ab", own)} for own in ((1, 1), (4, 5), (1.3, 1.4))]
    two = [Update("a", 1, models[1]), Update("b", 1000, models[2])]
    fused = PrivateMean(clip=1.0, noise=0.0).fuse(two, {}, ServerRound(1, 3, [], models[0]))
    assert [fused[name].item() for name in "ab"] == pytest.approx([1.45, 1.6])
    wide = {"w": np.zeros(40_000, np.float32)}
    three, server = [Update(client, 1, wide) for client in "abc"], ServerRound(1, 3, [], wide)
    noisy = [PrivateMean(clip=2.0, noise=3.0).fuse(three, {}, server)["w"] for _ in range(2)]
    assert abs(noisy[0].std() - 3.0 * 2.0 / 3) < 5 * 2.0 / math.sqrt(2 * 40_000)
    assert not np.array_equal(*noisy)  # not from a seed that others know
