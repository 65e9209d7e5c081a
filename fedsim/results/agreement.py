"""How far tables agree on the order of methods: those of the papers with each other, and ours with each of them."""

import itertools
import math
from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from fedsim.data.benchmarks import AVERAGE
from fedsim.results.published import METHODS, federated, setting
from fedsim.settings.experiment import Experiment

FEWEST = 3  # methods that two tables have in common
TAIL = 0.025
LARGEST = 6.0  # of |log q|, where the order is certain


def order_notes(methods: pd.DataFrame, experiment: Experiment) -> list[str]:
    """One note with Kendall's tau of every two tables, by the averages of the methods that both have.

    methods: the rows of a comparison (`Comparison.methods`); those of one row each and of no variant are compared
    """
    own = methods[(methods["label"] == methods["method"]) & methods["average"].notna()]
    tables = {"this table": own.set_index("method")["average"], **printed_orders(experiment)}
    texts = []
    for (one, x), (other, y) in itertools.combinations(tables.items(), 2):
        both = [method for method in x.index if method in y.index]
        if len(both) >= FEWEST and one.split(" Table")[0] != other.split(" Table")[0]:
            tau, low, high = agreement(x[both].to_numpy(), y[both].to_numpy())
            texts.append(f"{one} and {other} {tau:.2f} ({low:.2f} to {high:.2f}; {', '.join(both)})")
    said = "Agreement on the order of methods, Kendall's tau with its 95 % interval (1: the same order, 0: none)"
    return [f"{said}: {'; '.join(texts)}."] if texts else []


def printed_orders(experiment: Experiment) -> Mapping[str, pd.Series]:
    """{paper and table: average by method, with our names} in an experiment's setting."""
    frame = federated()
    chosen = (frame[["dataset", "backbone"]] == (setting(experiment) or ("", ""))).all(axis=1)
    frame = frame[chosen & (frame["target_domain"] == AVERAGE)]
    frame = frame.assign(ours=frame["method"].map(lambda name: METHODS.get(name, name.lower())))
    tables = frame.drop_duplicates(["paper", "ours"]).groupby("paper", sort=False)
    return {str(table): own.set_index("ours")["accuracy_percent"] for table, own in tables}


def agreement(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """(tau, lower bound, upper bound): tau = 1 - 2 D / (n (n - 1) / 2) with D discordant pairs; a tie counts half.

    The bounds are the expected tau of the Mallows models, P(order) ~ q^D, in which D or fewer, or D or more, pairs are
    discordant with a probability of 2.5 %. They hold for few methods, too, where normal approximations do not.
    """
    i, j = np.triu_indices(len(x), 1)
    signs = np.sign(x[i] - x[j]) * np.sign(y[i] - y[j])
    discordant, pairs = float((1 - signs).sum() / 2), len(i)
    below = _root(len(x), lambda pmf: pmf[: math.ceil(discordant) + 1].sum(), LARGEST)
    above = _root(len(x), lambda pmf: pmf[math.floor(discordant) :].sum(), -LARGEST)
    low, high = (_expected(len(x), q) for q in (below, above))
    return 1 - 2 * discordant / pairs, low, high


def _root(n: int, tail: Callable[[np.ndarray], float], otherwise: float) -> float:
    """The log q at which a tail has 2.5 %, or the end of the range at which the tail holds every order."""
    from scipy.optimize import brentq

    def excess(log_q: float) -> float:
        return tail(_counts(n, log_q)) - TAIL

    if excess(otherwise) > 0:
        return otherwise
    return float(brentq(excess, -LARGEST, LARGEST))


def _counts(n: int, log_q: float) -> np.ndarray:
    """The probabilities of 0, 1, ... discordant pairs among n methods, from prod_i (1 + q + ... + q^(i-1))."""
    pmf = np.ones(1)
    for size in range(2, n + 1):
        weights = log_q * np.arange(size)
        weights = np.exp(weights - weights.max())
        pmf = np.convolve(pmf, weights / weights.sum())
    return pmf


def _expected(n: int, log_q: float) -> float:
    pmf = _counts(n, log_q)
    return float(1 - 2 * (pmf @ np.arange(len(pmf))) / (len(pmf) - 1))
