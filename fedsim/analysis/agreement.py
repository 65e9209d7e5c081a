"""How far tables agree on methods: ours with the papers' tables of the same data set, and these with each other."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from fedsim.analysis.published import DATASETS, METHODS, domain_key, federated
from fedsim.records.selection import comparable
from fedsim.settings.experiment import Experiment

BASELINE = "fedavg"
OURS, MEAN = "here", "the papers' mean"
FEWEST = 3  # methods that two tables have in common, FedAvg included
TAIL = 0.025
LARGEST = 6.0  # of |log q|, where the order is certain


def order_notes(table: pd.DataFrame, experiment: Experiment, targets: Sequence[str]) -> list[str]:
    """One note with Kendall's tau of every two tables, by the methods that both have (`against_fedavg`)."""
    frame = against_fedavg(table, experiment, targets)
    texts = []
    for one, other in itertools.combinations(frame, 2):
        both = frame[[one, other]].dropna()
        names = {one, other}
        is_of_papers = MEAN in names and OURS not in names
        if len(both) >= FEWEST and not is_of_papers:
            tau = in_words(both)
            texts.append(f"{one} and {other} {tau}")
    if not any(text.startswith(OURS) for text in texts):
        return []
    heading = "Agreement on the order of methods, Kendall's tau with its 95 % interval (1: the same order, 0: none)"
    return [f"{heading}: {'; '.join(texts)}. The papers' networks and images can be others than ours."]


def in_words(both: pd.DataFrame) -> str:
    """`0.67 (-0.44 to 0.99; 4 methods)` of two columns without gaps."""
    x, y = both.to_numpy().T
    tau, low, high = agreement(x, y)
    interval = f"{low:.2f} to {high:.2f}"
    return f"{tau:.2f} ({interval}; {len(both)} methods)"


def against_fedavg(table: pd.DataFrame, experiment: Experiment, targets: Sequence[str]) -> pd.DataFrame:
    """Differences to FedAvg in the same table, in fractions: here, in the papers' mean, and in each paper.

    table: the runs of a comparison (`Comparison.table`), of which variants are left out. Ours are means over the seeds
    that a method and FedAvg both have, then over these targets, all of which both need. The index holds our names of
    the papers' methods. Each paper gives its fullest table of this data set that has FedAvg and all targets, with any
    network; the frame is empty where there is none.
    """
    is_variant = table["label"] != table["method"]
    no_variants = table[~is_variant]
    cells = no_variants.pivot_table("accuracy", ["target", "seed"], "method")
    domains = {domain_key(name) for name in targets}
    papers = _printed(experiment.data.dataset, domains)
    if BASELINE not in cells or papers.empty:
        return pd.DataFrame()
    differences = cells.sub(cells[BASELINE], axis="index")
    by_target = differences.groupby("target").mean()
    by_target = by_target.reindex(targets)
    columns = {
        OURS: by_target.mean(skipna=False),
        MEAN: papers.mean(axis="columns"),
    }
    means = pd.DataFrame(columns, index=papers.index)
    return pd.concat([means, papers], axis="columns")


def _printed(dataset: str, domains: set[str]) -> pd.DataFrame:
    """Differences to FedAvg by our name of a method, one column for each paper."""
    frame = federated()
    name = DATASETS.get(dataset)
    frame = frame[frame["dataset"] == name]
    frame = frame.assign(
        domain=frame["target_domain"].map(domain_key),
        ours=frame["method"].map(_our_name),
    )
    frame = frame[frame["domain"].isin(domains)]
    columns: dict[str, pd.Series] = {}
    for (table, network), rows in frame.groupby(["paper", "backbone"], sort=False):
        cells = rows.pivot_table("accuracy_percent", "ours", "domain", aggfunc="first")
        cells = cells.dropna()
        has_all_domains = len(cells.columns) == len(domains)
        if BASELINE not in cells.index or not has_all_domains:
            continue
        paper = table.split(" Table")[0]
        start = f"{paper} Table"
        others = [name for name in columns if name.startswith(start)]
        if others and len(cells) <= len(columns[others[0]]):
            continue
        for other in others:
            del columns[other]
        differences = cells - cells.loc[BASELINE]
        points = differences.mean(axis="columns")
        columns[f"{table} ({network})"] = points / 100
    return pd.DataFrame(columns)


def _our_name(method: str) -> str:
    return METHODS.get(method, method.lower())


def agreement(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """(tau, lower bound, upper bound): tau = 1 - 2 D / (n (n - 1) / 2) with D discordant pairs; a tie counts half.

    Numbers that are equal to nine digits are a tie. The bounds are the expected tau of the Mallows models,
    P(order) ~ q^D, in which D or fewer, or D or more, pairs are discordant with a probability of 2.5 %. They hold for
    few methods, too, where normal approximations do not.
    """
    n = len(x)
    i, j = np.triu_indices(n, 1)
    x, y = comparable(x), comparable(y)
    differences_of_x = x[i] - x[j]
    differences_of_y = y[i] - y[j]
    signs = np.sign(differences_of_x) * np.sign(differences_of_y)
    twice = float((1 - signs).sum())
    discordant = twice / 2
    least = math.floor(discordant)
    end = math.ceil(discordant) + 1
    below = _root(n, slice(None, end), LARGEST)
    above = _root(n, slice(least, None), -LARGEST)
    tau = 1 - 2 * discordant / len(i)
    return tau, _expected(n, below), _expected(n, above)


def _root(n: int, tail: slice, otherwise: float) -> float:
    """The log q at which a tail has 2.5 %, or the end of the range at which the tail holds every order.

    tail: the numbers of discordant pairs in it
    """
    from scipy.optimize import brentq

    def excess(log_q: float) -> float:
        pmf = _counts(n, log_q)
        return pmf[tail].sum() - TAIL

    if excess(otherwise) > 0:
        return otherwise
    return float(brentq(excess, -LARGEST, LARGEST))


def _counts(n: int, log_q: float) -> np.ndarray:
    """The probabilities of 0, 1, ... discordant pairs among n methods, from prod_i (1 + q + ... + q^(i-1))."""
    pmf = np.ones(1)
    for size in range(2, n + 1):
        exponents = log_q * np.arange(size)
        weights = np.exp(exponents - exponents.max())
        weights /= weights.sum()
        pmf = np.convolve(pmf, weights)
    return pmf


def _expected(n: int, log_q: float) -> float:
    """The expected tau."""
    pmf = _counts(n, log_q)
    counts = np.arange(len(pmf))
    discordant = pmf @ counts
    pairs = counts[-1]
    return float(1 - 2 * discordant / pairs)
