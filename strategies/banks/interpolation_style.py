"""FISC's bank: the styles of all clients, condensed into one that every client gets."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from strategies.banks.style import style_fault
from strategies.parts import SERVER, Arrays, Entries, OneForAll, ServerRound
from strategies.tools.finch import FEWEST, cluster_means, partitions

ALONE = (
    "fewer than four clients sent a style, and fewer never make two clusters: the interpolation style is the plain "
    "mean of their styles; for clusters set data.clients_per_domain"
)


@dataclass(frozen=True)
class InterpolationStyle(OneForAll):
    """s = median_j mean_{k in cluster j} (mu_k, sigma_k), number by number; all clients get these 2 C_s numbers, once.

    Source: FISC / PARDON (Nguyen et al., ICDCS 2025). The clusters are those of FINCH's finest partition of the styles
    (mu_k, sigma_k) of the clients, by cosine. Every cluster counts the same, so that many clients of one domain do not
    decide. The median is of each of the 2 C_s numbers by itself, so that s need not be the style of any client. Two or
    three clients form one cluster, and s is then their plain mean (the log says so); of one client it is the style.
    details.csv has the number of clusters. A contribution has `mean` and `std`, float32 [1, C_s]. The server keeps s
    alone. A client that failed to contribute gets the s of the others, and s never changes.

    median: of an even number of clusters, the mean of the two in the middle, or the "lower" of them (released code)
    shared: false turns the bank off; `style_contrast` sets it where its weights are 0
    """

    median: Literal["middle", "lower"] = "middle"
    shared: bool = True
    name: ClassVar[str] = "interpolation"

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """Refuses anything but one style."""
        reason = style_fault(arrays)
        return reason or ("" if len(arrays["mean"]) == 1 else f"it holds {len(arrays['mean'])} styles, expected one")

    def merge(self, bank: Entries, entries: Entries, server: ServerRound) -> dict[str, Arrays]:
        """The style; nothing without contributions. Sums are made in the order of the domains, in float64."""
        if not entries:
            return {}
        styles = np.concatenate([np.concatenate([entry["mean"], entry["std"]], axis=1) for entry in entries.values()])
        styles = styles.astype(np.float64)
        clusters = cluster_means(styles, partitions(styles)[0])
        server.detail("", "style_clusters", "", len(clusters))
        if len(styles) < FEWEST:
            server.note(ALONE)
        ordered, count = np.sort(clusters, axis=0), len(clusters)
        lower, upper = ordered[[(count - 1) // 2]], ordered[[count // 2]]
        middle = lower if self.median == "lower" else (lower + upper) / 2
        mean, std = np.split(middle.astype(np.float32), 2, axis=1)
        return {SERVER: {"mean": mean, "std": std}}
