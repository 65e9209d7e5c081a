"""How much the clients of a run will train: the local steps and images that its parts plan, beside FedAvg's."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import cast

import torch

from clients.batch import LATE
from clients.budget import Amount, fedavg_amount, local_plan
from clients.local_data import LocalData
from clients.parts import Augment, LocalRound
from clients.store import ClientStore
from fedsim.results.notes import BUDGET_TOLERANCE, times
from fedsim.run.plan import Plan


def planned_work(plan: Plan, counts: Sequence[int]) -> tuple[Amount, Amount] | None:
    """(before the first round, in one round) over all clients; None where it depends on what other clients will send.

    counts: the training images of every client. Where some clients are drawn, a round has their average share.
    """
    augment = plan.recipe.augment
    if augment and type(augment).copies is not Augment.copies:
        return None
    everyone, prelude = range(len(counts)), plan.recipe.prelude
    before = _sum(_planned(plan, counts, client, prelude) for client in everyone if prelude)
    each = _sum(_planned(plan, counts, client, "train") for client in everyone)
    share = _drawn(plan, counts)
    return before, Amount(each.images * share, each.steps * share)


def budget_notes(plan: Plan, counts: Sequence[int]) -> list[str]:
    """One line where a run trains on more or fewer images than FedAvg would, or takes more or fewer steps."""
    train, name = plan.experiment.train, plan.experiment.method_name
    work = None if plan.recipe.pooled or train.budget != "paper" or not all(counts) else planned_work(plan, counts)
    if work is None:
        return []
    before, each = work
    plain = _sum(fedavg_amount(count, train) for count in counts)
    share = _drawn(plan, counts) * train.rounds
    ratios = [(a + train.rounds * b) / (share * c) for a, b, c in zip(before, each, plain, strict=True)]
    if all(1 <= (1 + BUDGET_TOLERANCE) * ratio <= (1 + BUDGET_TOLERANCE) ** 2 for ratio in ratios):
        return []
    first = f", {before.steps:,.0f} of its {before.steps + train.rounds * each.steps:,.0f} steps before round 1"
    return [
        f"{name} trains on {times(ratios[0])} times the images of FedAvg and takes {times(ratios[1])} times its steps"
        f"{first if before.steps else ''}; train.budget = 'images' gives every method FedAvg's number of images"
    ]


def _drawn(plan: Plan, counts: Sequence[int]) -> float:
    return min(plan.experiment.train.clients_per_round or len(counts), len(counts)) / len(counts)


def _sum(amounts: Iterable[Amount]) -> Amount:
    spent = list(amounts)
    return Amount(sum(each.images for each in spent), sum(each.steps for each in spent))


def _planned(plan: Plan, counts: Sequence[int], client: int, phase: str) -> Amount:
    """What one client's parts plan for a round."""
    train = plan.experiment.train
    round_ = LocalRound(
        client=plan.clients[client],
        net=LATE,  # no plan looks at the network, or at what is stored
        train=train,
        classes=len(plan.data.classes),
        round=1,
        rounds=train.rounds,
        phase=phase,
        seed=0,
        device=torch.device("cpu"),
        store=ClientStore(None),
        data=cast(LocalData, SimpleNamespace(examples=counts[client])),
        clients=plan.clients,
    )
    return Amount.of(local_plan(plan.recipe, round_, counts, plan.sources)[1])
