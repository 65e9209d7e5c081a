"""The local optimizer and its schedules, what a client reports of its steps, and which of its iterates counts."""

import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from small_round import CONFIG, client_of, colour_images, fit, small_data, small_round
from support import run_small, tiny_experiment
from torch import nn

from clients.optimizers import (
    eager,
    gradient_count,
    learning_rate,
    make_optimizer,
    optimizer_tensors,
    restore_optimizer,
)
from clients.parts import Report
from clients.reports.generalization_gap import GeneralizationGap
from clients.reports.gradient_count import GradientCount
from clients.reports.received_loss import ReceivedLoss
from clients.step.supervised import SupervisedStep
from clients.terms.drift_correction import DriftCorrection
from clients.terms.moon import ModelContrast
from fedsim.common.errors import UserError
from fedsim.methods.recipe import Recipe
from fedsim.methods.table import METHODS
from fedsim.settings import TrainSettings


@pytest.mark.parametrize(("steps", "momentum", "pull", "count"), [
    (4, 0.0, 0.0, 4.0), (2, 0.9, 0.0, 2.9), (3, 0.9, 0.0, 5.61), (3, 0.0, 0.1, 2.71),
])  # fmt: skip
def test_counts_by_hand(steps, momentum, pull, count):
    """pull = eta mu."""
    assert gradient_count(steps, momentum, pull) == pytest.approx(count)
    assert gradient_count(steps, momentum, pull + 1e-12) == pytest.approx(count)


def test_fednova_with_a_proximal_term_counts_it(tmp_path):
    _, grid = run_small(tiny_experiment(tmp_path, "fednova+fedprox", 1, train={"momentum": 0.0, "iterations": 3}))
    metrics = [r.content.metric_records["metrics"] for m, r in grid.seen if m.metadata.message_type == "train"]
    assert [record["gradient_count"] for record in metrics] == pytest.approx([gradient_count(3, 0.0, 0.05 * 0.1)] * 3)


@pytest.mark.parametrize(("method", "train", "words"), [
    ({"name": "fednova", "normalized_average": {"tau_eff": "steps"}}, {"local_checks": 1}, "local_checks = 0"),
    ("fednova", {"optimizer": "adam"}, "sgd"), ("fednova", {"persist_optimizer": True}, "fresh"),
    ("scaffold", {"optimizer": "adam", "momentum": 0.0}, "optimizer = 'sgd'"),
    ("scaffold", {"persist_optimizer": True}, "persist_optimizer"),
])  # fmt: skip
def test_what_breaks_the_count_is_refused(method, train, words, tmp_path):
    with pytest.raises(UserError, match=words):
        run_small(tiny_experiment(tmp_path, method, train=train))


def test_subset_for_the_gap_and_received_loss():
    """The same one in every round; clients with equally many images do not take the same positions. Labels 0, 1, 2
    and probabilities (1/4, 1/4, 1/2): (2 log 4 + log 2) / 3. Validation images are not used."""
    report, images = GeneralizationGap(max_samples=10), colour_images(40)
    rounds = [small_round(small_data(images, client=client), round=t) for client, t in (("a", 1), ("a", 2), ("b", 1))]
    one, again, other = (report._training_subset(round).tolist() for round in rounds)
    assert one == again != other
    assert len(set(one)) == len(set(other)) == 10
    round = small_round(small_data(colour_images(7), validation=1), net=Constant())
    expected = (2 * np.log(4) + np.log(2)) / 3
    assert ReceivedLoss().before(round)["received_loss"] == pytest.approx(expected)


class Constant(nn.Module):
    """Logits that are always (0, 0, log 2)."""

    def forward(self, x):
        return torch.tensor([0.0, 0.0, np.log(2.0)]).expand(len(x), 3)


@pytest.mark.parametrize("pooled", [False, True])
def test_epochs_of_a_round_by_iterations(tmp_path, pooled):
    """Planned images (in batches of two sizes) over the client's own; a pooled client takes the steps of all."""
    client = client_of(tmp_path, Recipe(pooled=pooled), train={"iterations": 7, "batch_size": 32})
    client.source_clients = 3
    steps = client.begin_steps(client._open(CONFIG))
    sizes = [len(batch) for batch in steps.plan]
    assert (len(sizes), len(set(sizes))) == (21 if pooled else 7, 2)
    assert steps.round.epochs == sum(sizes) / client.data.examples
    assert small_round(client.data, steps=7, images=99, train=TrainSettings(epochs=3)).epochs == 3


def test_what_parts_keep_when_an_earlier_iterate_is_sent(tmp_path, monkeypatch):
    """The second of three local checks is the best: MOON keeps the last iterate, FedNova and SCAFFOLD count the steps
    up to the model that is sent."""
    recipe = Recipe(terms=(ModelContrast(), DriftCorrection()), reports=(GradientCount(),))
    client = client_of(tmp_path, recipe, train={"iterations": 6, "local_checks": 3, "momentum": 0.5})
    client.records = {"control": {}}
    before = client.state["head.weight"].clone()
    scores, states = iter([0.2, 0.6, 0.5]), []

    def validate(predict=None):
        states.append({name: value.clone() for name, value in client.state.items()})
        return next(scores), 0.0

    monkeypatch.setattr(client, "validate", validate)
    sent, _, metrics = fit(client)
    assert all(states[1][name].equal(torch.from_numpy(array)) for name, array in sent.items())
    client.store.open_round(2)
    kept = client.store.get("previous-model")
    assert all(kept[name].equal(value) for name, value in states[2].items())
    assert not kept["head.weight"].equal(states[1]["head.weight"])
    assert (metrics["steps"], metrics["gradient_count"]) == (6, gradient_count(4, 0.5))
    moved = (before - states[1]["head.weight"]) / (gradient_count(4, 0.5) * metrics["learning_rate"])
    assert np.allclose(client.outbox["control"]["head.weight"], moved, atol=1e-6)


@pytest.mark.parametrize(("kind", "words"), [
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}), (torch.optim.Adam, {"weight_decay": 0.01}),
    (torch.optim.AdamW, {}),
])  # fmt: skip
def test_steps_are_pytorchs(kind, words):
    torch.manual_seed(0)
    nets = [torch.nn.Linear(5, 3) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    kinds = (kind, eager(kind))
    optimizers = [kind_(net.parameters(), 0.1, fused=True, **words) for kind_, net in zip(kinds, nets)]
    for _ in range(3):
        images = torch.randn(4, 5)
        for net, optimizer in zip(nets, optimizers):
            optimizer.zero_grad(set_to_none=True)
            net(images).square().sum().backward()
            optimizer.step()
        assert all((a == b).all() for a, b in zip(*(net.parameters() for net in nets)))
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_stored_buffers_fit_weights_in_another_memory_layout(optimizer):
    """The store keeps contiguous copies, whose elements must be assigned correctly to a channels-last weight."""
    torch.manual_seed(0)
    train = TrainSettings(optimizer=optimizer, momentum=0.9)
    start = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    nets = [copy.deepcopy(start) for _ in range(2)]
    optimizers = [make_optimizer(net, train, 0.1) for net in nets]
    for number in range(3):
        gradient = torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last)
        if number == 2:  # the second one goes on from what a client's store gives back
            stored = {k: v.contiguous() for k, v in optimizer_tensors(optimizers[1], nets[1]).items()}
            optimizers[1] = make_optimizer(nets[1], train, 0.1)
            restore_optimizer(optimizers[1], stored)
        for net, one in zip(nets, optimizers):
            net.weight.grad = gradient.clone()
            one.step()
    assert torch.equal(nets[0].weight, nets[1].weight)


@dataclass(frozen=True)
class Halving(SupervisedStep):
    def work(self, round):
        return round.train.model_copy(update={"lr": round.train.lr * 0.5 ** (round.round - 1)})


@dataclass(frozen=True)
class Rate(Report):
    def after(self, round):
        return {"rate": round.lr, "of_optimizer": round.optimizer.param_groups[0]["lr"]}


def test_a_method_brings_a_schedule_of_its_own(tmp_path):
    client = client_of(tmp_path, Recipe(step=Halving(), reports=(Rate(),)))
    for number, rate in ((1, 0.05), (2, 0.025), (3, 0.0125)):
        metrics = fit(client, {**CONFIG, "round": number})[2]
        assert metrics["rate"] == metrics["of_optimizer"] == pytest.approx(rate)


@pytest.mark.parametrize(("schedule", "lr", "rounds", "rates"), [
    ("cosine-official", 0.002, 100, {1: 0.00199951, 50: 0.001, 100: 0.0}),
    ("cosine", 0.002, 100, {1: 0.002, 100: 4.93e-7}), ("step", 0.1, 10, {8: 0.1, 9: 0.01}),
    ("constant", 0.3, 10, {7: 0.3}),
])  # fmt: skip
def test_schedules(schedule, lr, rounds, rates):
    settings = TrainSettings(lr=lr, schedule=schedule)
    found = [learning_rate(settings, number, rounds) for number in rates]
    assert found == pytest.approx(list(rates.values()), abs=1e-8)


@pytest.mark.parametrize(("settings", "rates"), [
    # by hand: .001 + .009/2 (1 + cos(pi (t-1)/4)) for t = 1..4
    ({"schedule": "cosine", "lr_min": 0.001}, [0.01, 0.008681981, 0.0055, 0.002318019]),
    ({"schedule": "cosine-official", "lr_min": 0.001}, [0.008681981, 0.0055, 0.002318019, 0.001]),
    # two rounds up, then the cosine of two rounds
    ({"schedule": "cosine", "warmup_rounds": 2}, [0.005, 0.01, 0.01, 0.005]),
    ({"warmup_rounds": 3}, [0.01 / 3, 0.02 / 3, 0.01, 0.01]),
])  # fmt: skip
def test_warmup_and_the_least_rate(settings, rates):
    train = TrainSettings(lr=0.01, rounds=4, **settings)
    assert [learning_rate(train, number, 4) for number in (1, 2, 3, 4)] == pytest.approx(rates)


@pytest.mark.parametrize(("settings", "message"), [
    ({"lr": 0.01, "lr_min": 0.02, "schedule": "cosine"}, "lr_min is 0.02, and lr is 0.01"),
    ({"rounds": 3, "warmup_rounds": 3}, "a round must follow"),
])  # fmt: skip
def test_rates_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainSettings(**settings)


@pytest.mark.parametrize("limit", [0.0, 1e-3, 1e9])
def test_the_gradient_of_a_step_is_no_longer_than_clip_norm(limit, tmp_path):
    """One step of SGD moves all trained tensors together by lr times the limit; a large one changes nothing."""
    moves = []
    for clip_norm in (0.0, limit):
        train = {"lr": 0.1, "momentum": 0.0, "iterations": 1, "clip_norm": clip_norm}
        client = client_of(tmp_path / str(len(moves)), Recipe(), train=train)
        before = {name: parameter.detach().clone() for name, parameter in client.net.named_parameters()}
        fit(client)
        move = [client.net.get_parameter(name).detach() - value for name, value in before.items()]
        moves.append(torch.cat([each.flatten() for each in move]))
    if limit == 1e-3:
        assert float(moves[1].norm()) == pytest.approx(0.1 * limit, rel=1e-3)
        assert torch.allclose(moves[1] / moves[1].norm(), moves[0] / moves[0].norm(), atol=1e-3)
    else:
        assert torch.equal(*moves)


def test_what_comes_before_the_first_round_is_not_warmed_up(tmp_path):
    """CSAC's acquisition is no round: it has the whole rate, and the rounds after it begin with a part of it."""
    parts = {"semantic_calibration": {"acquire_iterations": 2}}
    train = {"lr": 0.1, "warmup_rounds": 4, "momentum": 0.0, "iterations": 1}
    seen = []

    class Noted(Report):
        def after(self, round):
            seen.append((round.phase, round.lr))
            return {}

    recipe = METHODS["csac"]
    client = client_of(tmp_path, replace(recipe, reports=(Noted(),)), train={**train, "rounds": 8}, parts=parts)
    fit(client, {**CONFIG, "phase": recipe.step.prelude, "round": 0})
    fit(client, {**CONFIG, "round": 1})
    assert seen == [("acquire", 0.1), ("train", pytest.approx(0.025))]
