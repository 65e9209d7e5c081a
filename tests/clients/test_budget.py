"""Budgets: images and steps of a client's round; batches with as many examples of every domain."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_round import colour_images, small_data, small_round
from support import small_experiment

from clients.batches.balanced_budget import BalancedBudget
from clients.batches.equal_domains import EqualDomains
from clients.batches.shuffled import Shuffled
from clients.budget import Amount, fedavg_amount, local_plan
from clients.local_data import LocalData
from clients.step.calibration import SemanticCalibration
from fedsim.common.errors import UserError
from fedsim.data import ClientData
from fedsim.data.augment import Normalization, Transforms
from fedsim.methods.recipe import Recipe
from fedsim.runs.plan import resolve
from fedsim.runs.work import planned_of
from fedsim.runs.workspace import Workspace
from fedsim.settings import TrainSettings
from fedsim.settings.experiment import Experiment

DATA = small_data(colour_images(20))
BUDGETS = pytest.mark.parametrize("budget", ["paper", "images", "steps"])


class Copies:
    """An augmentation that makes three versions of every image."""

    def copies(self, round):
        return 3


def plan_of(budget="paper", round=1, phase="train", counts=(20, 40), clients=2, train=None, **parts):
    train = TrainSettings(batch_size=8, budget=budget, **(train or {}))
    seen = small_round(DATA, train=train, round=round, rounds=4, phase=phase)
    return local_plan(Recipe(**parts), seen, counts, clients)[1]


def as_lists(plan):
    return [batch.tolist() for batch in plan]


@pytest.mark.parametrize(("examples", "train", "amount"), [
    (20, {"epochs": 3}, (60, 9)),  # 8 + 8 + 4, three times
    (17, {"epochs": 1}, (16, 2)),  # the last image alone is left out
    (20, {"iterations": 5}, (36, 5)),  # 8 + 8 + 4 + 8 + 8
])  # fmt: skip
def test_fedavg_by_hand(examples, train, amount):
    settings = TrainSettings(batch_size=8, **train)
    assert fedavg_amount(examples, settings) == amount
    assert Amount.of(Shuffled().indices(examples, small_round(DATA), settings)) == amount


@BUDGETS
@pytest.mark.parametrize("train", [{"epochs": 2}, {"iterations": 7}])
def test_every_budget_leaves_fedavg_as_it_is(budget, train):
    plain = list(Shuffled().indices(20, small_round(DATA), TrainSettings(batch_size=8, **train)))
    assert as_lists(plan_of(budget, train=train)) == as_lists(plain)
    assert "iterations" in train or sorted(np.concatenate(plain)) == sorted([*range(20)] * 2)


@pytest.mark.parametrize(("train", "budget", "amount"), [
    ({"iterations": 5}, "paper", (100, 15)),  # 8 8 4, five times
    ({"iterations": 5}, "steps", (100, 15)),
    ({"iterations": 5}, "images", (78, 12)),  # FedAvg: 5 x 6 images, 8 2 8 2 8, and 5 x 4
    ({"epochs": 2}, "paper", (40, 6)),
    ({"epochs": 2}, "steps", (56, 8)),  # FedAvg: twice one step, two and one
    ({"epochs": 2}, "images", (40, 6)),
])  # fmt: skip
def test_the_pooled_client_has_the_budget_of_all_clients(monkeypatch, train, budget, amount):
    """It holds the 20 images of three clients with 6, 10 and 4."""
    monkeypatch.setattr(DATA, "held", (6, 10, 4))
    assert Amount.of(plan_of(budget, train=train, counts=(20,), clients=3, pooled=True)) == amount


@pytest.mark.parametrize(("budget", "amount"), [("paper", (100, 13)), ("images", (30, 4)), ("steps", (32, 4))])
def test_balanced_clients_share_what_fedavg_spends_together(budget, amount):
    """FedAvg: 20 images in 3 steps and 40 in 5: on average 30 images, 4 steps; FedSB here asks for 100 images."""
    assert Amount.of(plan_of(budget, batches=BalancedBudget(100))) == amount


@pytest.mark.parametrize("budget", ["images", "steps"])
def test_copies_are_part_of_the_budget_and_change_from_round_to_round(budget):
    first, second = (plan_of(budget, round=number, augment=Copies()) for number in (1, 2))
    assert getattr(Amount.of(first), budget) == getattr(fedavg_amount(20, TrainSettings(batch_size=8)), budget)
    items = [{int(item) for batch in plan for item in batch} for plan in (first, second)]
    assert max(items[0] | items[1]) >= 20  # other versions than the first
    assert items[0] != items[1]
    assert Amount.of(plan_of(augment=Copies())).images == 60


@pytest.mark.parametrize(("budget", "run"), [("images", 4 * 20), ("steps", 4 * 3)])
@pytest.mark.parametrize("epochs", [1, 3, 40])
def test_a_prelude_is_paid_from_the_same_budget(budget, run, epochs):
    step = SemanticCalibration(acquire_iterations=0, acquire_epochs=epochs)
    phases = [(0, "acquire"), (1, "train"), (2, "train"), (3, "train"), (4, "train")]
    amounts = [getattr(Amount.of(plan_of(budget, *phase, step=step)), budget) for phase in phases]
    assert run - 5 <= sum(amounts) <= run + 5  # a last batch of one image is left out
    if epochs == 3 and budget == "steps":
        assert amounts == [5, 1, 2, 2, 1]  # 9 and 12 steps, both times 12/21: 5.1, then 1.7, 3.4, 5.1, 6.9 in all
    assert Amount.of(plan_of("paper", 0, "acquire", step=step)) == (20 * epochs, 3 * epochs)


@pytest.mark.parametrize("budget", ["images", "steps"])
def test_a_plan_without_a_batch_cannot_be_made_longer(budget):
    """One image is no batch; in the paper's budget this means a round without training."""
    assert plan_of(batches=BalancedBudget(1)) == []
    BalancedBudget(1).check(Experiment())
    BalancedBudget(2).check(Experiment(train={"budget": budget}))
    with pytest.raises(UserError, match="budget = 1 has no batch"):
        BalancedBudget(1).check(Experiment(train={"budget": budget}))


SIZES = (4, 17, 9)


def pooled_data(sizes=SIZES, held_out=3):
    """The images of so many domains of such sizes on one client, mixed; the last ones are held out."""
    count = sum(sizes) + held_out
    order = np.random.default_rng(0).permutation(count)
    domains = np.repeat(np.arange(len(sizes) + 1), (*sizes, held_out))  # the held-out ones are another domain's
    parts = order[order < sum(sizes)], order[order >= sum(sizes)]
    labels, images = np.arange(count) % 3, colour_images(count)
    data = ClientData("pooled", images, labels, *parts, tuple("xyz"), ("a",), domains, held=sizes)
    return LocalData(data, Transforms(lambda x: x, Normalization()), torch.device("cpu"))


def pooled_plan_of(data, per_domain=3, augment=None, **train):
    """The batches of a round of deepall, which stands for three clients."""
    recipe = Recipe(batches=EqualDomains(per_domain), augment=augment, pooled=True)
    round = small_round(data, train=TrainSettings(batch_size=8, **train))
    return local_plan(recipe, round, (data.examples,), 3)[1]


@pytest.mark.parametrize("train", [{"epochs": 3}, {"iterations": 5}])
@pytest.mark.parametrize("budget", ["paper", "images", "steps"])
def test_every_batch_has_the_same_number_of_each_domain(budget, train):
    """30 images of 3 domains in batches of 9; a small domain is repeated."""
    data = pooled_data()
    plan = pooled_plan_of(data, budget=budget, **train)
    assert all(np.bincount(data.domains[batch]).tolist() == [3, 3, 3] for batch in plan)
    paper = 15 if "iterations" in train else 90 // 9  # the pooled client takes the steps of three clients
    fedavg = [fedavg_amount(size, TrainSettings(batch_size=8, **train)) for size in SIZES]
    images, steps = map(sum, zip(*fedavg))
    assert len(plan) == {"paper": paper, "images": images // 9, "steps": steps}[budget]
    if budget == "paper":
        seen = np.bincount(np.concatenate(plan), minlength=30)
        for domain, size in enumerate(SIZES):
            own = seen[data.domains == domain]
            assert own.sum() == 3 * paper
            assert own.max() - own.min() <= 1, size


def test_a_batch_is_never_cut():
    """A budget below one batch has one, and a plan has at least one."""
    data = pooled_data()
    for budget in ("paper", "images"):
        assert Amount.of(pooled_plan_of(data, per_domain=50, epochs=1, budget=budget)) == (150, 1)
    copies = pooled_plan_of(data, augment=SimpleNamespace(copies=lambda round: 2), epochs=1)
    assert all(np.bincount(data.domains[batch % 30]).tolist() == [3, 3, 3] for batch in copies)
    assert max(np.concatenate(copies)) >= 30


@pytest.mark.parametrize("data", [pooled_data((20,)), small_data(colour_images(20))])
@pytest.mark.parametrize("train", [{"epochs": 2}, {"iterations": 7}])
def test_one_domain_is_shuffled(data, train):
    train = TrainSettings(batch_size=8, **train)
    plans = [list(part.indices(20, small_round(data), train)) for part in (EqualDomains(), Shuffled())]
    assert [batch.tolist() for batch in plans[0]] == [batch.tolist() for batch in plans[1]]


@pytest.mark.parametrize(("mix", "domains"), [(0.0, 1), (0.5, 3)])
def test_orders_of_clients_with_several_domains_are_what_they_plan(tmp_path, mix, domains):
    """The server plans without the data: with each of 3 sources on every client, batches of 2 for each."""
    parts = {"equal_domains": {"per_domain": 2}}
    method = {"name": "fedavg", "batches": "equal_domains"}
    plan = resolve(small_experiment(tmp_path, method, data={"mix": mix}, parts=parts))
    space = Workspace(plan)
    clients = [space.client(name, "") for name in plan.clients]
    counts = [client.data.examples for client in clients]
    for place, client in enumerate(clients):
        round = small_round(client.data, train=plan.experiment.train, client=plan.clients[place])
        batches = local_plan(plan.recipe, round, counts, plan.sources)[1]
        assert Amount.of(batches) == planned_of(plan, counts, place, "train")
        assert len(np.unique(client.data.domains)) == domains
        assert (len(batches[0]) == 2 * domains) == (domains > 1)


def test_fedsbs_budget():
    """2,880 images a round wherever they are; CSAC's prelude keeps its own amount; budget 0 gives standard batches."""

    def batches(part, examples, iterations=0, **changes):
        train = TrainSettings(batch_size=64, iterations=iterations)
        return [batch.tolist() for batch in part.indices(examples, small_round(**changes), train)]

    part = BalancedBudget(2880)
    for own, examples in ((part, 1000), (part, 100), (part, 5000), (BalancedBudget(45, "batches"), 100)):
        assert [len(batch) for batch in batches(own, examples, 300)] == [64] * 45
    assert len(batches(part, 1500, 300, phase="acquire")) == 300
    assert batches(BalancedBudget(0), 100) == batches(Shuffled(), 100)
    counts = np.bincount(BalancedBudget.draw(1000, 2880, np.random.default_rng(0)))
    assert np.bincount(counts).tolist() == [0, 0, 120, 880]  # every index 2 or 3 times
    rounds = [set(np.concatenate(batches(part, 5000, round=number))) for number in (1, 2)]
    assert len(rounds[0]) == len(rounds[1]) == 2880  # a large client sees new images each round
    assert rounds[0] != rounds[1]
