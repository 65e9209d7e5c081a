"""FPL's server: the clients' class means, clustered class by class."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.finch import cluster_means, finch
from strategies.parts import SERVER, Arrays, Bank, Entries, ServerRound

FEWEST = 4  # below so many points FINCH never makes two clusters
ALONE = (
    "no class has prototypes of four clients or more, and fewer never make two clusters: of every class there is one "
    "prototype, the plain mean of its clients; for clusters set data.clients_per_domain"
)


@dataclass(frozen=True)
class Prototypes(Bank):
    """P^c = means of the clusters that FINCH finds among this round's prototypes of class c, in domain order.

    FPL (Huang et al., CVPR 2023), banks 6.2. A contribution has `protos` float32 [n, d] and their `classes` int64 [n],
    ascending; down go the cluster means in the same form, `cluster_protos` and `classes`, nothing in the first round.
    Clusters count alike, whatever their size, so that the clients do too; a client that did not deliver in this round
    has no part in it. J_c, the number of clusters, is recorded for every class. With three single-domain clients
    nothing clusters (the log says so), and the method is prototype contrast with plain class means.
    """

    name: ClassVar[str] = "prototypes"
    when: ClassVar[str] = "round"

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """Refuses what is not one vector for each of some classes; a client may have none to send."""
        if arrays.keys() != {"protos", "classes"}:
            return f"it holds {sorted(arrays)}, expected ['classes', 'protos']"
        protos, classes = arrays["protos"], arrays["classes"]
        if protos.dtype != np.float32 or protos.ndim != 2:
            return f"protos are {protos.dtype}{list(protos.shape)}, expected float32 with 2 dimensions"
        if classes.dtype != np.int64 or classes.shape != protos.shape[:1]:
            return f"classes are {classes.dtype}{list(classes.shape)}, expected int64[{len(protos)}]"
        if (np.diff(classes) <= 0).any():
            return "its classes do not ascend"
        if len(classes) and (classes[0] < 0 or classes[-1] >= (server.classes or classes[-1] + 1)):
            return f"it names a class beyond the {server.classes} classes"
        return ""

    def merge(self, bank: Entries, entries: Entries, server: ServerRound) -> dict[str, Arrays]:
        """The cluster means of every class that somebody sent, in place of the last round's."""
        found: dict[int, list[np.ndarray]] = {}
        for arrays in entries.values():
            for label, vector in zip(arrays["classes"], arrays["protos"], strict=True):
                found.setdefault(int(label), []).append(vector.astype(np.float64))
        means, classes = [], []
        for label in sorted(found):
            points = np.stack(found[label])
            clusters = cluster_means(points, finch(points))
            server.detail("", "prototype_clusters", f"class {label}", len(clusters))
            means.append(clusters.astype(np.float32))
            classes += [label] * len(clusters)
        if max(map(len, found.values()), default=0) < FEWEST and not server.state.get("told"):
            server.state["told"] = True
            server.note(ALONE)
        if not means:
            return {}
        return {SERVER: {"cluster_protos": np.concatenate(means), "classes": np.array(classes, np.int64)}}

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays:
        """All cluster prototypes, the same for all clients."""
        return bank.get(SERVER, {})
