"""The guarantee of a run with differential privacy after all its rounds together.

T rounds of the Gaussian mechanism with noise multiplier z are together one Gaussian mechanism with mu = sqrt(T) / z,
where z is the noise's standard deviation over the sensitivity. For every epsilon exactly

    delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)

(Balle and Wang, ICML 2018, Theorem 8; Dong, Roth and Su 2022, Corollary 2.13). `total_epsilon` inverts it. Clients that
are drawn at random in each round are protected better. The optional package dp-accounting (`pip install
"feddg-sim[privacy]"`) computes this (sampling without replacement). Without it the result is that of a client that
takes part in every round, which is an upper bound.

A run that was killed repeats the rounds after its checkpoint, with new noise: these are further releases. The run
therefore counts the rounds that it has begun in a file next to its token.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from fedsim.common.errors import UserError
from fedsim.common.files import atomic_write
from fedsim.methods.recipe import Recipe
from fedsim.parts.part import part_name
from fedsim.settings.experiment import Experiment
from strategies.fuse.private_mean import PrivateMean

HUGE = 1e4
DELTA = 1e-5  # of the central mechanism, where no setting says it
BEGUN = "begun"  # file in a run's checkpoint folder


def begun_rounds(folder: Path) -> int:
    """Returns how often a round has begun in the run with this checkpoint folder, with prelude and repeated rounds."""
    file = folder / BEGUN
    return int(file.read_text()) if file.is_file() else 0


def count_round(folder: Path) -> None:
    """Counts a round, before anything is asked of the clients."""
    count = begun_rounds(folder) + 1
    atomic_write(folder / BEGUN, str(count), durable=True)


def repeated_rounds(folder: Path, recipe: Recipe, done: int) -> int:
    """Returns the number of begun rounds that no checkpoint holds, and that the run therefore repeats.

    done: the round of the checkpoint; -1 without any
    """
    checkpointed = done + bool(recipe.prelude) if done >= 0 else 0
    return max(begun_rounds(folder) - checkpointed, 0)


def delta_of(epsilon: float, mu: float) -> float:
    """Returns delta(epsilon) of the Gaussian mechanism with that mu."""
    from scipy.special import log_ndtr, ndtr  # this import is slow, and most runs are not private

    second = min(epsilon + log_ndtr(-mu / 2 - epsilon / mu), 0.0)  # at most 0; with a huge mu rounding says otherwise
    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(second))


def total_epsilon(noise: float, rounds: int, delta: float) -> float:
    """Returns epsilon after `rounds` rounds with noise multiplier `noise`, at `delta`; infinite without noise.

    Raises UserError for a delta that is no probability.
    """
    from scipy.optimize import brentq

    if rounds <= 0:
        return 0.0
    if noise <= 0:
        return math.inf
    if not 0 < delta < 1:
        raise UserError(f"delta is {delta}, it must be between 0 and 1")
    mu = math.sqrt(rounds) / noise
    if delta_of(0.0, mu) <= delta:
        return 0.0
    most = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))  # zero-concentrated privacy: always enough
    if mu > HUGE:  # no protection at all; the exact difference of the two terms is lost in rounding
        return most

    def excess(epsilon: float) -> float:
        """Returns how far delta(epsilon) is above the delta that is asked for."""
        return delta_of(epsilon, mu) - delta

    return float(brentq(excess, 0.0, most + 1.0, xtol=1e-9))


def sampled_epsilon(noise: float, rounds: int, delta: float, drawn: int, clients: int, whole: int = 0) -> float | None:
    """Returns epsilon when `drawn` of `clients` take part in each round, and all of them in `whole` further ones.

    It is None without dp-accounting, or when all take part in all rounds.
    """
    if drawn >= clients or noise <= 0:
        return None
    try:
        from dp_accounting import dp_event
        from dp_accounting.privacy_accountant import NeighboringRelation
        from dp_accounting.rdp import RdpAccountant
    except ImportError:
        return None
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    release = dp_event.GaussianDpEvent(noise / 2)  # two clients differ by 2C, one from nothing by C
    sampled = dp_event.SampledWithoutReplacementDpEvent(clients, drawn, release)
    accountant.compose(sampled, rounds)
    if whole:
        accountant.compose(release, whole)
    unsampled = total_epsilon(noise / 2, rounds + whole, delta)
    return float(min(accountant.get_epsilon(delta), unsampled))


def most_drawn(experiment: Experiment, clients: int) -> int:
    """Returns how many clients are drawn in a round.

    These are all where some may be away, because the others are drawn more often.
    """
    train = experiment.train
    if train.availability:
        return clients
    return train.clients_per_round or clients


@dataclass(frozen=True)
class Spent:
    """The cost of some rounds of a private run: epsilon at delta, and whether clients count as drawn by lot."""

    epsilon: float
    delta: float
    by_lot: bool = False


def spent(experiment: Experiment, recipe: Recipe, clients: int, rounds: int, repeated: int = 0) -> Spent | None:
    """Returns the cost of so many rounds, with the prelude and the repeated ones; None without differential privacy.

    A step's prelude is one more release of every client's model, and so is each of the `repeated` rounds. A round that
    is repeated draws the same clients, so that it counts as one with all of them, as the prelude is.
    """
    train, fuse = experiment.train, recipe.fuse
    full_rounds = bool(recipe.prelude) + repeated
    if train.dp_clip:
        noise = math.sqrt(2 * math.log(1.25 / train.dp_delta)) / train.dp_epsilon
        return Spent(total_epsilon(noise, rounds + full_rounds, train.dp_delta), train.dp_delta)
    if not isinstance(fuse, PrivateMean):
        return None
    sampled = sampled_epsilon(fuse.noise, rounds, DELTA, most_drawn(experiment, clients), clients, full_rounds)
    if sampled is None:
        return Spent(total_epsilon(fuse.noise, rounds + full_rounds, DELTA), DELTA)
    return Spent(sampled, DELTA, by_lot=True)


def last_round(experiment: Experiment, recipe: Recipe, clients: int, repeated: int = 0) -> int:
    """Returns the last round that a run plays: `train.rounds`, or one before the privacy budget would be exceeded.

    It is a round that is validated, so that the last model can be selected. 0 when the budget allows no round.
    """
    train = experiment.train
    if not train.dp_max_epsilon:
        return train.rounds

    def epsilon(rounds: int) -> float:
        cost = spent(experiment, recipe, clients, rounds, repeated)
        return cost.epsilon if cost else 0.0

    allowed = bisect_right(range(1, train.rounds + 1), train.dp_max_epsilon, key=epsilon)
    return allowed if allowed == train.rounds else allowed - allowed % train.evaluate_every


def refuse_budget(experiment: Experiment, recipe: Recipe, clients: int, repeated: int = 0) -> None:
    """Raises UserError for a privacy budget of a run that is not private, and for one that allows no round."""
    train = experiment.train
    budget, first = train.dp_max_epsilon, train.evaluate_every
    if not budget:
        return
    cost = spent(experiment, recipe, clients, min(first, train.rounds), repeated)
    if cost is None:
        raise UserError("train.dp_max_epsilon ends a run with differential privacy, and this one has none; set "
                        "train.dp_clip or method.fuse = 'private_mean', or leave it out")  # fmt: skip
    if not last_round(experiment, recipe, clients, repeated):
        rounds = "the first round" if first == 1 else f"the rounds until the first validation ({first})"
        again = f" and {repeated} interrupted ones" if repeated else ""
        raise UserError(f"train.dp_max_epsilon = {budget:g} allows no round: {rounds}{again} would spend epsilon "
                        f"{cost.epsilon:.4g} at delta {cost.delta:g}; raise the budget, or add noise")  # fmt: skip


def statement(
    experiment: Experiment,
    recipe: Recipe,
    clients: int,
    repeated: int = 0,
    played: int | None = None,
) -> str:
    """Returns the guarantee of a run in one line, by the server's settings; empty without differential privacy.

    played: the rounds that were played; None: those that will be, until `last_round`

    It names what the noise does not cover.
    """
    if played is None:
        played = last_round(experiment, recipe, clients, repeated)
    cost = spent(experiment, recipe, clients, played, repeated)
    if cost is None:
        return ""
    rounds = played + bool(recipe.prelude) + repeated
    all_rounds = f"{rounds} rounds"
    if repeated:
        all_rounds += f", of which {repeated} were repeated after an interruption"
    banks = [bank for bank in recipe.banks if bank.contributed and bank.shared]
    uncovered = [part_name(part) for part in (*banks, *recipe.visits, *recipe.reports)]
    sends = f", nor is what {', '.join(uncovered)} sends" if uncovered else ""
    rest = f"(metrics and counts are not covered{sends})"
    epsilon = f"epsilon {cost.epsilon:.4g} at delta {cost.delta:g}"
    if experiment.train.dp_clip:
        return f"local differential privacy: {epsilon} for a client's models of all {all_rounds} {rest}"
    what = f"a client's presence in all {all_rounds}"
    if cost.by_lot:
        what = f"one client in another's place, after {all_rounds}"
    return f"central differential privacy: {epsilon} for {what} {rest}"
