"""The loss of classes: cross-entropy, perhaps with weights of classes and focal; numbers by hand."""

import math

import pytest
import torch
from torch.nn import functional as F

from fedsim.common.errors import UserError
from fedsim.models.tasks import Classification
from fedsim.runs.plan import resolve
from fedsim.settings.experiment import read_experiment

LOGITS = torch.tensor([[math.log(3), 0.0], [0.0, math.log(4)]])  # p = (3/4, 1/4), (1/5, 4/5)


@pytest.mark.parametrize(("labels", "weights", "focal", "expected"), [
    ((0, 1), (), 0.0, (math.log(4 / 3) + math.log(5 / 4)) / 2),
    ((0, 1), (1.0, 3.0), 0.0, (math.log(4 / 3) + 3 * math.log(5 / 4)) / 2),
    ((0, 1), (), 2.0, (math.log(4 / 3) / 16 + math.log(5 / 4) / 25) / 2),
    ((1, 0), (2.0, 0.5), 1.0, (0.5 * 0.75 * math.log(4) + 2 * 0.8 * math.log(5)) / 2),
])  # fmt: skip
def test_weighted_and_focal_by_hand(labels, weights, focal, expected):
    task = Classification(weights, focal)
    assert float(task.loss(LOGITS, torch.tensor(labels))) == pytest.approx(expected, rel=1e-6)
    # a validation's loss is the cross-entropy
    plain = F.cross_entropy(LOGITS, torch.tensor(labels), reduction="sum")
    assert float(task.sums(LOGITS, torch.tensor(labels))[1]) == pytest.approx(float(plain))


def test_shares_of_classes_are_labels_too():
    """CutMix and MixUp train on shares: the loss is linear in them."""
    task = Classification((1.0, 3.0), 2.0)
    first, second = (task.loss(LOGITS, torch.tensor([label, label])) for label in (0, 1))
    mixed = task.loss(LOGITS, torch.tensor([[0.3, 0.7], [0.3, 0.7]]))
    assert float(mixed) == pytest.approx(float(0.3 * first + 0.7 * second), rel=1e-6)


def test_gamma_0_and_weights_1_are_the_cross_entropy():
    labels = torch.tensor([1, 1])
    assert float(Classification((1.0, 1.0)).loss(LOGITS, labels)) == pytest.approx(
        float(F.cross_entropy(LOGITS, labels))
    )


@pytest.mark.parametrize(("changes", "message"), [
    (["train.class_weights=[1, 2]"], "a number for each of the 10 classes"),
    (["train.class_weights=[0, 0, 0, 0, 0, 0, 0, 0, 0, 0]"], "not all of them 0"),
    (["train.focal=2", "method.name=fedadg"], "adversarial_reference computes a loss of its own"),
])  # fmt: skip
def test_a_loss_that_would_not_be_used_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        resolve(read_experiment("digits", changes))


def test_masks_have_no_classes():
    with pytest.raises(UserError, match="are for classes"):
        resolve(read_experiment("digit-masks", ["train.focal=2"]))
