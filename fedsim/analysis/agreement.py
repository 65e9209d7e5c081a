"""How far tables agree on methods: ours with the papers' tables of the same data set, and these with each other."""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from fedsim.analysis.published import DATASETS, METHODS, domain_key, federated
from fedsim.settings.experiment import Experiment

BASELINE = "fedavg"
OURS, MEAN = "here", "the papers' mean"
FEWEST = 3  # methods that two tables have in common, FedAvg included
TAIL = 0.025
LARGEST = 6.0  # of |log q|, where the order is certain


def order_notes(table: pd.DataFrame, experiment: Experiment, targets: Sequence[str]) -> list[str]:
    """One note with Kendall's tau of every two tables, by the methods that both have (`beside_fedavg`)."""
    frame = beside_fedavg(table, experiment, targets)
    texts = []
    for one, other in itertools.combinations(frame, 2):
        both = frame[[one, other]].dropna()
        is_of_papers = MEAN in (one, other) and OURS not in (one, other)
        if len(both) >= FEWEST and not is_of_papers:
            texts.append(f"{one} and {other} {in_words(both)}")
    if not any(text.startswith(OURS) for text in texts):
        return []
    heading = "Agreement on the order of methods, Kendall's tau with its 95 % interval (1: the same order, 0: none)"
    return [f"{heading}: {'; '.join(texts)}. The papers' networks and images can be others than ours."]


def in_words(both: pd.DataFrame) -> str:
    """`0.67 (-0.44 to 0.99; 4 methods)` of two columns without gaps."""
    tau, low, high = agreement(*both.to_numpy().T)
    return f"{tau:.2f} ({low:.2f} to {high:.2f}; {len(both)} methods)"


def beside_fedavg(table: pd.DataFrame, experiment: Experiment, targets: Sequence[str]) -> pd.DataFrame:
    """Differences to FedAvg in the same table, in fractions: here, in the papers' mean, and in each paper.

    table: the runs of a comparison (`Comparison.table`), of which variants are left out. Ours are means over the seeds
    that a method and FedAvg both have, then over these targets, all of which both need. The index holds our names of
    the papers' methods. Each paper gives its fullest table of this data set that has FedAvg and all targets, with any
    network; the frame is empty where there is none.
    """
    no_variants = table[table["label"] == table["method"]]
    cells = no_variants.pivot_table("accuracy", ["target", "seed"], "method")
    papers = _printed(experiment.data.dataset, {domain_key(name) for name in targets})
    if BASELINE not in cells or papers.empty:
        return pd.DataFrame()
    differences = cells.sub(cells[BASELINE], axis="index")
    by_target = differences.groupby("target").mean().reindex(targets)
    columns = {OURS: by_target.mean(skipna=False), MEAN: papers.mean(axis="columns")}
    return pd.concat([pd.DataFrame(columns, index=papers.index), papers], axis="columns")


def _printed(dataset: str, domains: set[str]) -> pd.DataFrame:
    """Differences to FedAvg by our name of a method, one column for each paper."""
    frame = federated()
    frame = frame[frame["dataset"] == DATASETS.get(dataset)]
    frame = frame.assign(domain=frame["target_domain"].map(domain_key)).query("domain in @domains")
    frame["ours"] = frame["method"].map(lambda name: METHODS.get(name, name.lower()))
    columns: dict[str, pd.Series] = {}
    for (table, network), rows in frame.groupby(["paper", "backbone"], sort=False):
        cells = rows.pivot_table("accuracy_percent", "ours", "domain", aggfunc="first").dropna()
        if BASELINE not in cells.index or len(cells.columns) != len(domains):
            continue
        paper = table.split(" Table")[0]
        earlier = next((name for name in columns if name.startswith(f"{paper} Table")), "")
        if earlier and len(cells) <= len(columns[earlier]):
            continue
        columns.pop(earlier, None)
        columns[f"{table} ({network})"] = (cells - cells.loc[BASELINE]).mean(axis="columns") / 100
    return pd.DataFrame(columns)


def agreement(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """(tau, lower bound, upper bound): tau = 1 - 2 D / (n (n - 1) / 2) with D discordant pairs; a tie counts half.

    The bounds are the expected tau of the Mallows models, P(order) ~ q^D, in which D or fewer, or D or more, pairs are
    discordant with a probability of 2.5 %. They hold for few methods, too, where normal approximations do not.
    """
    i, j = np.triu_indices(len(x), 1)
    signs = np.sign(x[i] - x[j]) * np.sign(y[i] - y[j])
    discordant = float((1 - signs).sum() / 2)
    least, most = math.floor(discordant), math.ceil(discordant)
    below = _root(len(x), lambda pmf: pmf[: most + 1].sum(), LARGEST)
    above = _root(len(x), lambda pmf: pmf[least:].sum(), -LARGEST)
    tau = 1 - 2 * discordant / len(i)
    return tau, _expected(len(x), below), _expected(len(x), above)


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
    """The expected tau."""
    pmf = _counts(n, log_q)
    discordant = pmf @ np.arange(len(pmf))
    return float(1 - 2 * discordant / (len(pmf) - 1))
