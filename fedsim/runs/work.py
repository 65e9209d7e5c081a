"""How much work a run plans for its clients: what a round orders of each, and whether it is more than FedAvg's.

By its orders the server bounds what clients say that they did.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch

from clients.batch import LATE
from clients.budget import Amount, fedavg_amount, local_plan
from clients.local_data import LocalData
from clients.parts import Augment, LocalRound
from clients.store import ClientStore
from fedsim.common.lists import times
from fedsim.records.selection import BUDGET_TOLERANCE
from fedsim.runs.notes import domains_of_client
from fedsim.runs.plan import Plan


def planned_of(plan: Plan, counts: Sequence[int], client: int, phase: str) -> Amount:
    """Returns what one client's parts plan for a round."""
    train = plan.experiment.train
    domains = np.resize(np.arange(domains_of_client(plan)), counts[client])  # a plan looks at their number
    data = SimpleNamespace(examples=counts[client], held=[counts[client]], domains=domains)
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
        data=cast(LocalData, data),
        clients=plan.clients,
    )
    _, batches = local_plan(plan.recipe, round_, counts, plan.sources)
    return Amount.of(batches)


def orders(plan: Plan, examples: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """The images and steps of a round by client, with those of a prelude, which a client trains that joins late.

    examples: the training images of every client. Returns nothing where the data of other clients decide how much a
    client trains, and where one client holds the images of all.
    """
    augment = plan.recipe.augment
    grows = augment is not None and type(augment).copies is not Augment.copies
    if grows or plan.recipe.pooled or not all(examples.values()):
        return {}
    counts = list(examples.values())
    # Under a budget of FedAvg's amount, rounds differ by the fractions that they hand over.
    least = fedavg_amount(max(counts), plan.experiment.train)
    amounts = {}
    for place, client in enumerate(examples):
        amount = order_of(plan, counts, place, least)
        amounts[client] = amount._asdict()
    return amounts


def order_of(plan: Plan, counts: list[int], place: int, least: Amount) -> Amount:
    """What the parts plan for the client at this place, and at least what FedAvg plans for the largest client."""
    images = steps = 0.0
    for phase in (plan.recipe.prelude, "train"):
        if phase:
            planned = planned_of(plan, counts, place, phase)
            images += planned.images
            steps += planned.steps
    return Amount(max(images, least.images), max(steps, least.steps))


def planned_work(plan: Plan, counts: Sequence[int]) -> tuple[Amount, Amount] | None:
    """Returns the work (before the first round, in one round) of all clients together.

    It is None where the work depends on what other clients will send.

    counts: the training images of every client. Where some clients are drawn, a round has their average share.
    """
    augment = plan.recipe.augment
    if augment and type(augment).copies is not Augment.copies:
        return None
    everyone, prelude = range(len(counts)), plan.recipe.prelude
    before = _sum(planned_of(plan, counts, client, prelude) for client in everyone if prelude)
    each = _sum(planned_of(plan, counts, client, "train") for client in everyone)
    share = _drawn(plan, counts)
    return before, Amount(each.images * share, each.steps * share)


def budget_notes(plan: Plan, counts: Sequence[int]) -> list[str]:
    """Returns a line where a run trains on more or fewer images than FedAvg would, or takes more or fewer steps."""
    train, name = plan.experiment.train, plan.experiment.method_name
    if plan.recipe.pooled or train.budget != "paper" or not all(counts):
        return []
    work = planned_work(plan, counts)
    if work is None:
        return []
    before, each = work
    plain = _sum(fedavg_amount(count, train) for count in counts)
    share = _drawn(plan, counts) * train.rounds
    of_images = (before.images + train.rounds * each.images) / (share * plain.images)
    of_steps = (before.steps + train.rounds * each.steps) / (share * plain.steps)
    if _is_usual(of_images) and _is_usual(of_steps):
        return []
    first = ""
    if before.steps:
        steps = before.steps + train.rounds * each.steps
        first = f", {before.steps:,.0f} of its {steps:,.0f} steps before round 1"
    return [
        f"{name} trains on {times(of_images)} times the images of FedAvg and takes {times(of_steps)} times its steps"
        f"{first}; train.budget = 'images' gives every method FedAvg's number of images"
    ]


def _is_usual(ratio: float) -> bool:
    """Whether a run's work is that of FedAvg, by the ratio of the two."""
    return 1 <= (1 + BUDGET_TOLERANCE) * ratio <= (1 + BUDGET_TOLERANCE) ** 2


def _drawn(plan: Plan, counts: Sequence[int]) -> float:
    """Returns the share of the clients that train in a round."""
    clients = len(counts)
    drawn = plan.experiment.train.clients_per_round or clients
    return min(drawn, clients) / clients


def _sum(amounts: Iterable[Amount]) -> Amount:
    """Returns the images and the steps of several amounts together."""
    amounts = list(amounts)
    images = sum(amount.images for amount in amounts)
    steps = sum(amount.steps for amount in amounts)
    return Amount(images, steps)
