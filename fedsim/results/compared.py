"""What a comparison holds: all that its cells, its remarks and its writers read."""

from dataclasses import dataclass, field

import pandas as pd

from fedsim.results.metrics import METRICS, Metric


@dataclass
class Compared:
    """The numbers of a comparison, and the remarks on them.

    cells: one row per method and target (`average` included): label, method, the keys of `by`, target, mean, std,
    seeds (their number), over (which they are).
    methods: one row per method: label, method, the keys of `by`, average, average_std, seeds (those with all targets),
    seeds_begun, rank, difference, p_value, p_holm, pairs, differing, images, steps, bytes_down_per_round,
    bytes_up_per_round, seconds_per_round, transductive, uses_target_unlabelled, group.
    `difference` (a fraction of accuracy) and `p_value` rest on the same `pairs`: the cells (target, seed) that the
    method and the baseline both have. With a baseline the rank follows the difference (the baseline's is 0), so that
    rank, difference and p never contradict each other; a method without a pair on every target has no rank. Without a
    baseline the rank is that of the average over the seeds that all ranked methods have (`ranked_seeds`).
    `group` says how a method uses images of the target; it is empty for a method that uses none. Each group is ranked
    separately.
    published: numbers from papers for the same setting (label, method, source, target, mean, std).
    metric: what the cells hold. With another metric than accuracy (a task's own, or one that is computed from the kept
    predictions), "accuracy" in this text means that metric. rule: `select` in words.
    table: one row per run, of which all the others are made: run, label, method, target, seed, accuracy, costs.
    """

    title: str
    select: str
    targets: list[str]
    cells: pd.DataFrame
    methods: pd.DataFrame
    published: pd.DataFrame
    baseline: str = ""
    ranked_seeds: dict[str, list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    metric: str = "accuracy"
    rule: str = ""
    table: pd.DataFrame = field(default_factory=pd.DataFrame)

    @property
    def measure(self) -> Metric:
        """The metric of the cells."""
        return METRICS[self.metric]

    @property
    def measured(self) -> str:
        """What the cells hold, in words."""
        return f"{self.measure.title} on the unseen domain"

    @property
    def labels(self) -> dict[str, str]:
        """{run: the label of its row}."""
        return dict(zip(self.table["run"], self.table["label"]))

    @property
    def most_seeds(self) -> int:
        """The largest number of seeds of one method; there is a deviation from two on."""
        return int(self.methods["seeds_begun"].max())
