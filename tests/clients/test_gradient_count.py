"""What a client reports about its steps and about the received model (FedNova, AFL)."""

import numpy as np
import pytest
import torch
from small_round import colour_images, small_data, small_round
from support import run_small, small_experiment
from torch import nn

from clients.optimizers import gradient_count
from clients.reports.generalization_gap import GeneralizationGap
from clients.reports.gradient_count import GradientCount
from clients.reports.received_loss import ReceivedLoss
from fedsim.common.errors import UserError
from fedsim.settings import TrainSettings


def test_counts_by_hand():
    """a(.9, 2) = 2.9, a(.9, 3) = 5.61; eta mu = .1 and three steps: 2.71."""
    assert gradient_count(4, 0.0) == 4.0
    assert gradient_count(2, 0.9) == pytest.approx(2.9)
    assert gradient_count(3, 0.9) == pytest.approx(5.61)
    assert gradient_count(3, 0.0, 0.1) == pytest.approx(2.71)
    assert gradient_count(5, 0.9, 1e-12) == pytest.approx(gradient_count(5, 0.9))


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 2.0), (0.9, 2.0)])
def test_a_constant_gradient_is_recovered(momentum, mu):
    """SGD on 3 w + mu/2 w^2 from 0 changes w by -eta a 3."""
    w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([w], 0.1, momentum=momentum)
    for _ in range(4):
        optimizer.zero_grad()
        (3 * w + mu / 2 * w.square()).sum().backward()
        optimizer.step()
    assert -w.item() / (0.1 * 3) == pytest.approx(gradient_count(4, momentum, 0.1 * mu))


def test_reported_with_the_round():
    train = TrainSettings(momentum=0.9)
    round = small_round(small_data(colour_images(3)), train=train, steps=3, lr=0.1, pull=0.5)
    assert GradientCount().after(round) == {
        "gradient_count": gradient_count(3, 0.9, 0.05),
        "learning_rate": 0.1,
    }


def test_fednova_with_a_proximal_term_counts_it(tmp_path):
    """`fednova+fedprox`: the reported counts contain the proximal term; Adam is refused."""
    _, grid = run_small(small_experiment(tmp_path, "fednova+fedprox", train={"rounds": 1, "momentum": 0.0}))
    metrics = [r.content.metric_records["metrics"] for m, r in grid.seen if m.metadata.message_type == "train"]
    for record in metrics:
        assert record["gradient_count"] == pytest.approx(gradient_count(record["steps"], 0.0, 0.05 * 0.1))
    by_steps = {"name": "fednova", "normalized_average": {"tau_eff": "steps"}}
    with pytest.raises(UserError, match="local_checks = 0"):
        run_small(small_experiment(tmp_path / "x", by_steps, train={"local_checks": 1}))
    for train, words in (({"optimizer": "adam"}, "sgd"), ({"persist_optimizer": True}, "fresh")):
        with pytest.raises(UserError, match=words):
            run_small(small_experiment(tmp_path / "x", "fednova", train=train))


def test_each_client_draws_its_own_subset_for_the_gap():
    """The same one in every round; clients with equally many images do not take the same positions."""
    report, images = GeneralizationGap(max_samples=10), colour_images(40)
    rounds = [small_round(small_data(images, client=client), round=t) for client, t in (("a", 1), ("a", 2), ("b", 1))]
    one, again, other = (report._training_subset(round).tolist() for round in rounds)
    assert one == again != other
    assert len(set(one)) == len(set(other)) == 10


class Constant(nn.Module):
    """Logits that are always (0, 0, log 2)."""

    def forward(self, x):
        return torch.tensor([0.0, 0.0, np.log(2.0)]).expand(len(x), 3)


def test_received_loss_by_hand():
    """With labels 0, 1, 2 and probabilities (1/4, 1/4, 1/2) the mean loss is (2 log 4 + log 2) / 3.

    Validation images are not used.
    """
    round = small_round(small_data(colour_images(7), validation=1), net=Constant())
    expected = (2 * np.log(4) + np.log(2)) / 3
    assert ReceivedLoss().before(round)["received_loss"] == pytest.approx(expected)
