"""How much a client trains in a round: as much as the method plans, or as much as FedAvg would train.

`train.budget` chooses. E, I and B are `train.epochs`, `iterations` and `batch_size`, n_k is the number of training
images of client k, and T the number of rounds. FedAvg's own amount in a round is

    images  N_k = E n_k          steps  N_k = E ceil(n_k / B)          with I: I steps, and the images in them

A last batch of one image is left out. An image counts each time that it is in a training batch, copies in other styles
included. Validation, reports and further passes over the same batch within one step do not count.

- `paper`: the amount that the method's parts ask for: FedSB has its S examples (also where I is set), CCST trains on
  its copies, and CSAC has its acquisition in addition. Methods then differ in their budgets.
- `images`, `steps`: client k trains on N_k images, or takes N_k steps, per round, as with FedAvg. A longer plan is cut
  (of CCST's copies each round uses others). A shorter plan continues with its own images in a new order. Batches that
  must stay whole (`equal_domains`) are taken while they fit, at least one, and are repeated in a new order. Where the
  method gives every client the same amount (FedSB), each gets the mean of all N_k. A prelude (CSAC's acquisition, with
  the amount A_k) is part of the budget: the whole run has T N_k, and prelude and rounds are both multiplied by

      T N_k / (A_k + T N_k)          T becomes T m / K where m of K clients are drawn each round

The pooled client (DeepAll) represents all K clients, also where only m of them are drawn each round: DeepAll then
has K / m times the images of FedAvg. Under `paper` it takes K I steps with I, and E ceil(n / B) steps with E, where n
is the number of all images. These are fewer than those of K clients, each of which has an incomplete last batch.
Under `images` and `steps` it has the sum of all N_k.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from clients.batches.shuffled import chunks
from clients.parts import LocalRound
from clients.recipe import ClientRecipe
from fedsim.settings import TrainSettings


class Amount(NamedTuple):
    """An amount of work, in training images and in optimizer steps."""

    images: float
    steps: float

    @classmethod
    def of(cls, plan: Iterable[np.ndarray]) -> "Amount":
        """The amount of a plan of batches."""
        sizes = [len(batch) for batch in plan]
        return cls(sum(sizes), len(sizes))


def fedavg_amount(examples: int, train: TrainSettings) -> Amount:
    """The amount of one round of FedAvg on a client with so many training images."""
    full, rest = divmod(examples, train.batch_size)
    sizes = [train.batch_size] * full + [rest] * (rest > 1)
    if not train.iterations:
        return Amount(train.epochs * sum(sizes), train.epochs * len(sizes))
    passes, more = divmod(train.iterations, len(sizes))
    return Amount(passes * sum(sizes) + sum(sizes[:more]), train.iterations)


def local_plan(
    recipe: ClientRecipe, round: LocalRound, counts: Sequence[int], clients: int
) -> tuple[TrainSettings, list[np.ndarray]]:
    """The work that the step part asks for, and the batches of this round as positions of training items.

    counts: the training images of every client
    clients: how many clients hold source data, the pooled ones included
    """
    work = _work_of(recipe, round, clients)
    plan = _paper_plan(recipe, round, work)
    if work.budget == "paper":
        return work, list(plan)
    limit = _limit(recipe, round, counts, clients, work.budget)
    return work, list(_fitted(plan, limit, work, round.rng("budget"), recipe.batches.whole))


def _work_of(recipe: ClientRecipe, round: LocalRound, clients: int) -> TrainSettings:
    """What the step part asks for; the pooled client takes the steps of all clients."""
    work = recipe.step.work(round)
    return work.model_copy(update={"iterations": work.iterations * clients}) if recipe.pooled else work


def _paper_plan(recipe: ClientRecipe, round: LocalRound, work: TrainSettings) -> Iterator[np.ndarray]:
    items = round.data.examples * (recipe.augment.copies(round) if recipe.augment else 1)
    return recipe.batches.indices(items, round, work)


def _limit(recipe: ClientRecipe, round: LocalRound, counts: Sequence[int], clients: int, unit: str) -> int:
    """Images or steps of this round. Fractions go over to the next round, so that the sum over the run is exact."""
    train = round.train
    whose = counts if recipe.batches.balanced and not recipe.pooled else round.data.held
    amounts = [getattr(fedavg_amount(count, train), unit) for count in whose]
    each = float(sum(amounts) if recipe.pooled else np.mean(amounts))
    prelude, share = 0.0, 1.0
    if recipe.prelude:
        before = round.for_phase(recipe.prelude)
        prelude = getattr(Amount.of(_paper_plan(recipe, before, _work_of(recipe, before, clients))), unit)
        drawn = min(train.clients_per_round or clients, clients) / clients
        share = drawn * round.rounds * each / (prelude + drawn * round.rounds * each)
    if recipe.prelude and round.phase == recipe.prelude:
        return max(_floor(share * prelude), 1) if prelude else 0
    return max(_floor(share * each * round.round) - _floor(share * each * (round.round - 1)), 1)


def _floor(value: float) -> int:
    """The largest whole number up to the value, which may be slightly too small by floating-point error."""
    return math.floor(value + 1e-6)


def _fitted(
    plan: Iterable[np.ndarray], limit: int, work: TrainSettings, rng: np.random.Generator, whole: bool
) -> Iterator[np.ndarray]:
    """The beginning of the plan, or the plan and more passes over its items, up to `limit` images or steps."""
    if limit == 0:  # a prelude without work: its plan has no items that could be passed over
        return
    left = limit
    for batch in _endless(plan, work.batch_size, rng, whole):
        if work.budget == "images":
            if whole and len(batch) > left < limit:
                return
            batch = batch if whole else batch[:left]
        if len(batch) > 1:  # batch norm needs two images
            yield batch
        left -= len(batch) if work.budget == "images" else 1
        if left <= 0:
            return


def _endless(plan: Iterable[np.ndarray], size: int, rng: np.random.Generator, whole: bool) -> Iterator[np.ndarray]:
    passed = []
    for batch in plan:
        passed.append(batch)
        yield batch
    items = np.concatenate(passed)
    while True:
        if whole:
            yield from (passed[place] for place in rng.permutation(len(passed)))
        else:
            yield from chunks(rng.permutation(items), size)
