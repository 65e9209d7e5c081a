"""Metrics of scores and numbers, and the rules of the tasks that use them: by hand, and next to scikit-learn."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn

from fedsim.common.measures import (
    area_under_roc,
    average_precision,
    best_threshold,
    explained_variance,
    mean_absolute_error,
    rates_at,
    root_mean_squared_error,
)
from fedsim.common.tasks import REGRESSION, TASKS
from fedsim.models.scores import Binary, MultiLabel, Regression
from fedsim.models.tasks import Classification, Segmentation
from fedsim.settings import DataSettings, TrainSettings

SCORES = np.array([0.1, 0.4, 0.4, 0.8])
POSITIVE = np.array([False, True, False, True])


def test_ranks_by_hand():
    """Four pairs, of which one is a tie: 3.5 of 4. Downwards: precision 1 at recall 1/2, then 2/3 at recall 1.

    Thresholds .25 and .6 both have J = 1/2; .6 is nearer to 1/2.
    """
    assert area_under_roc(SCORES, POSITIVE) == 3.5 / 4
    assert average_precision(SCORES, POSITIVE) == pytest.approx(1 / 2 + 1 / 2 * 2 / 3)
    assert best_threshold(SCORES, POSITIVE) == pytest.approx(0.6)
    assert rates_at(SCORES, POSITIVE, 0.6) == (0.5, 1.0)
    assert rates_at(SCORES, POSITIVE, 0.25) == (1.0, 0.5)
    assert best_threshold(np.array([0.9, 0.2]), np.array([False, True])) < 0.2  # all are called positive: J = 0


def test_what_one_class_leaves_undefined():
    for flags in ([True, True], [False, False]):
        for measure in (area_under_roc, average_precision, best_threshold):
            assert math.isnan(measure(np.array([0.2, 0.7]), np.array(flags)))
    sensitivity, specificity = rates_at(np.array([0.2, 0.7]), np.array([False, False]), 0.5)
    assert (math.isnan(sensitivity), specificity) == (True, 0.5)


def test_errors_by_hand():
    """Errors 0, 0, 0 and -2; the targets' squared distances from 2.5 add up to 5."""
    truth, predicted = np.array([1.0, 2, 3, 4]), np.array([1.0, 2, 3, 6])
    assert mean_absolute_error(truth, predicted) == 0.5
    assert root_mean_squared_error(truth, predicted) == 1.0
    assert explained_variance(truth, predicted) == pytest.approx(1 - 4 / 5)
    assert math.isnan(explained_variance(np.array([3.0, 3.0]), np.array([3.0, 4.0])))


def test_rmse_is_of_all_examples_together():
    """Errors 3 and 0 at one hospital, 1 at another: sqrt(10 / 3), and not the mean of sqrt(9 / 2) and 1."""
    truth, predicted = np.array([[3.0], [0.0], [1.0]]), np.zeros((3, 1))
    assert root_mean_squared_error(truth, predicted) == pytest.approx(math.sqrt(10 / 3))


@pytest.mark.parametrize("seed", range(20))
def test_metrics_are_those_of_scikit_learn(seed):
    """With ties; and no threshold has a greater J than the one that is chosen."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 8, 40) / 8
    positive = rng.random(40) < 0.3
    positive[:2] = True, False
    assert area_under_roc(scores, positive) == pytest.approx(sklearn.roc_auc_score(positive, scores))
    assert average_precision(scores, positive) == pytest.approx(sklearn.average_precision_score(positive, scores))
    j = [sum(rates_at(scores, positive, threshold)) for threshold in (*np.linspace(-0.1, 1.1, 200), 0.5)]
    assert sum(rates_at(scores, positive, best_threshold(scores, positive))) == pytest.approx(max(j))
    truth, predicted = rng.normal(size=(2, 40))
    assert explained_variance(truth, predicted) == pytest.approx(sklearn.r2_score(truth, predicted))
    # Ranks do not change with an increasing function, and a turned score turns the area.
    assert area_under_roc(np.exp(3 * scores), positive) == area_under_roc(scores, positive)
    assert area_under_roc(-scores, positive) == pytest.approx(1 - area_under_roc(scores, positive))


def test_two_classes_are_trained_as_a_classification():
    logits, labels = torch.tensor([[0.0, 1.0], [2.0, -1.0]]), torch.tensor([1, 1])
    assert Binary().loss(logits, labels) == Classification().loss(logits, labels)
    assert Binary((1.0, 2.0), 2.0).loss(logits, labels) == Classification((1.0, 2.0), 2.0).loss(logits, labels)


def test_two_classes_are_measured_by_ranks_and_a_threshold():
    """Logits whose softmax is SCORES; two batches give what one gives."""
    logits = torch.tensor(np.log(np.stack([1 - SCORES, SCORES], axis=1)), dtype=torch.float32)
    labels = torch.from_numpy(POSITIVE.astype(np.int64))
    result = Binary().examine(lambda x: x, [(logits[:1], labels[:1]), (logits[1:], labels[1:])])
    assert (result.value, result.count) == (3.5 / 4, 4)
    assert result.further["threshold"] == pytest.approx(0.6, abs=1e-6)
    expected = -np.log(np.where(POSITIVE, SCORES, 1 - SCORES)).mean()
    assert result.loss == pytest.approx(expected, rel=1e-6)
    one = Binary().examine(lambda x: x, [(logits[:1], labels[:1])])
    assert math.isnan(one.value)
    assert math.isnan(one.further["threshold"])
    assert one.loss == pytest.approx(-math.log(0.9))


def test_several_labels_by_hand():
    """Label 0: 3.5 of 4 pairs; label 1: every example has it, so that the mean is over the other one."""
    logits = torch.tensor(np.stack([SCORES, SCORES], axis=1))
    truth = torch.tensor([[0.0, 1], [1, 1], [0, 1], [1, 1]])
    value, loss, count = MultiLabel().measure(lambda x: x, [(logits, truth)])
    assert (value, count) == (3.5 / 4, 4)
    positive = truth.numpy() == 1
    expected = np.log1p(np.exp(np.where(positive, -1, 1) * SCORES[:, None])).mean()
    assert loss == pytest.approx(expected)
    assert float(MultiLabel().loss(logits, truth)) == pytest.approx(expected, rel=1e-6)
    reason = MultiLabel().undefined(truth, ("flu", "cold"))
    assert "AUROC is not defined there for cold" in reason
    assert "over 1 of 2 labels" in reason
    assert math.isnan(MultiLabel().measure(lambda x: x, [(logits, torch.ones(4, 2))])[0])


def test_regression_by_hand():
    """Targets 11 and 16 with mean 10 and deviation 2 are 1/2 and 3; the network says 0.

    Squared: (1/4 + 9) / 2. Huber with delta 1: (1/8 + 3 - 1/2) / 2. Errors in the user's unit: 1 and 6.
    """
    rules, logits, truth = Regression(), torch.zeros(2, 1), torch.tensor([[11.0], [16.0]])
    assert float(rules.loss(logits, truth)) == (121 + 256) / 2  # as they are, before the scale is known
    rules.use_units(10.0, 2.0)
    assert float(rules.loss(logits, truth)) == (1 / 4 + 9) / 2
    huber = Regression(huber=1.0)
    huber.use_units(10.0, 2.0)
    assert float(huber.loss(logits, truth)) == (1 / 8 + 5 / 2) / 2
    assert rules.keep(logits).tolist() == [[10.0], [10.0]]
    for batches in ([(logits, truth)], [(logits[:1], truth[:1]), (logits[1:], truth[1:])]):
        assert rules.measure(lambda x: x, batches) == (3.5, (1 / 4 + 9) / 2, 2)
    assert Regression.of(DataSettings(), TrainSettings(huber=0.5)).huber == 0.5


def test_a_structure_that_a_domain_lacks_is_left_out_of_dice():
    """One of two pixels is missed: 2/3. The second structure has no pixel, and what is predicted of it counts not."""
    truth = torch.zeros(1, 2, 1, 2, dtype=torch.uint8)
    truth[0, 0] = 1
    logits = torch.tensor([[[[9.0, -9.0]], [[-9.0, 9.0]]]])
    rules = Segmentation()
    assert rules.measure(lambda x: x, [(logits, truth)])[0] == pytest.approx((2 / 3 + 0) / 2)
    assert rules.for_truth(truth).measure(lambda x: x, [(logits, truth)])[0] == pytest.approx(2 / 3)
    assert rules.undefined(truth, ("disc", "cup")) == "no image has a pixel of cup, so that Dice is taken without it"
    nothing = torch.zeros_like(truth)
    assert math.isnan(rules.for_truth(nothing).measure(lambda x: x, [(logits, nothing)])[0])
    everything = torch.ones_like(truth)
    assert rules.for_truth(everything) is rules
    assert rules.undefined(everything, ("disc", "cup")) == ""


def test_a_task_says_how_its_metric_is_shown():
    assert [TASKS["binary"].text(0.845), REGRESSION.text(3.21987)] == ["84.5 %", "3.22"]
    assert {task.text(float("nan")) for task in TASKS.values()} == {"undefined"}
    assert REGRESSION.upwards(np.array([2.0, 1.0])).argmax() == 1
    assert [task.name for task in TASKS.values() if task.less_is_better] == ["regression"]
    assert len({task.metric for task in TASKS.values()}) == len(TASKS)
