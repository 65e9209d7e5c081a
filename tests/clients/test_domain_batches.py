"""Batches with the same number of examples of every domain."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_round import colour_images, small_data, small_round
from support import numbers, run_small, small_experiment

from clients.batches.equal_domains import EqualDomains
from clients.batches.shuffled import Shuffled
from clients.budget import Amount, fedavg_amount, local_plan
from clients.local_data import LocalData
from fedsim.common.errors import UserError
from fedsim.data import ClientData
from fedsim.data.augment import Normalization, Transforms
from fedsim.methods.assembly import build_recipe
from fedsim.methods.recipe import Recipe
from fedsim.settings import TrainSettings

SIZES = (4, 17, 9)


def pooled_data(sizes=SIZES, held_out=3):
    """The images of so many domains of such sizes on one client, mixed; the last ones are held out."""
    count = sum(sizes) + held_out
    order = np.random.default_rng(0).permutation(count)
    domain_index = np.repeat(np.arange(len(sizes) + 1), (*sizes, held_out))  # the held-out ones are another domain's
    data = ClientData(
        "pooled",
        colour_images(count),
        np.arange(count) % 3,
        order[order < sum(sizes)],
        order[order >= sum(sizes)],
        ("x", "y", "z"),
        ("a",),
        domain_index,
        pooled=True,
        held=sizes,
    )
    return LocalData(data, Transforms(lambda x: x, Normalization()), torch.device("cpu"))


def plan_of(data, per_domain=3, clients=3, augment=None, **train):
    """The batches of a round of deepall."""
    recipe = Recipe(batches=EqualDomains(per_domain), augment=augment, pooled=True)
    round = small_round(data, train=TrainSettings(batch_size=8, **train))
    return local_plan(recipe, round, (data.examples,), clients)[1]


@pytest.mark.parametrize("train", [{"epochs": 3}, {"iterations": 5}])
@pytest.mark.parametrize("budget", ["paper", "images", "steps"])
def test_every_batch_has_the_same_number_of_each_domain(budget, train):
    """30 images of 3 domains in batches of 9; a small domain is repeated."""
    data = pooled_data()
    plan = plan_of(data, budget=budget, **train)
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
        assert Amount.of(plan_of(data, per_domain=50, epochs=1, budget=budget)) == (150, 1)
    copies = plan_of(data, augment=SimpleNamespace(copies=lambda round: 2), epochs=1)
    assert all(np.bincount(data.domains[batch % 30]).tolist() == [3, 3, 3] for batch in copies)
    assert max(np.concatenate(copies)) >= 30


@pytest.mark.parametrize("data", [pooled_data((20,)), small_data(colour_images(20))])
@pytest.mark.parametrize("train", [{"epochs": 2}, {"iterations": 7}])
def test_one_domain_is_shuffled(data, train):
    settings = TrainSettings(batch_size=8, **train)
    plans = [list(part.indices(20, small_round(data), settings)) for part in (EqualDomains(), Shuffled())]
    assert [batch.tolist() for batch in plans[0]] == [batch.tolist() for batch in plans[1]]


def test_deepall_trains_on_them(tmp_path):
    """Three domains of 80 training images each: two batches of 96. Clients of a federation have one domain each."""
    folder, _ = run_small(
        small_experiment(tmp_path, {"name": "deepall", "batches": "equal_domains"}, train={"rounds": 1})
    )
    row = numbers(folder / "clients.csv").iloc[-1]
    assert (row["steps"], row["client"]) == (2, "pooled")
    assert "equal_domains" in numbers(folder / "summary.csv")["label"][0]
    with pytest.raises(UserError, match="use deepall"):
        build_recipe(small_experiment(tmp_path, {"name": "fedavg", "batches": "equal_domains"}))
