"""How much work a round orders of each client, by which the server bounds what clients say that they did."""

from collections.abc import Mapping

from clients.budget import Amount, fedavg_amount
from clients.parts import Augment
from fedsim.runs.notes import planned_of
from fedsim.runs.plan import Plan


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
