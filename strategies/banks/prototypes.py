"""FPL's bank: the clients' class means, clustered class by class."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.parts import SERVER, Arrays, Entries, OneForAll, ServerRound, When
from strategies.tools.finch import FEWEST, cluster_means, finch

ALONE = (
    "no class has prototypes of four or more clients, and fewer never make two clusters: every class has one "
    "prototype, the plain mean of its clients; for clusters set data.clients_per_domain"
)


@dataclass(frozen=True)
class Prototypes(OneForAll):
    """P^c = the means of FINCH's clusters of this round's prototypes of class c, in the order of the domains.

    Source: FPL (Huang et al., CVPR 2023). A contribution has `protos` float32 [n, d] and their `classes` int64 [n],
    ascending. Clients receive the cluster means in the same form, as `cluster_protos` and `classes`, and nothing in the
    first round. All clusters count equally, whatever their size, so that clients do too. A client that did not reply in
    this round has no part in the result. J_c, the number of clusters, is recorded for every class. Three clients with
    one domain each never form two clusters (the log says so), and the method is then prototype contrast with plain
    class means. A reply of which one prototype is not finite is refused whole, with its model.

    cluster: false gives every class one prototype, the plain mean over its clients (FedProto, Tan et al., AAAI 2022)
    """

    cluster: bool = True

    name: ClassVar[str] = "prototypes"
    when: ClassVar[When] = "round"

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """Refuses records other than one vector for each of some classes. A client may have none to send."""
        if arrays.keys() != {"protos", "classes"}:
            return f"it holds {sorted(arrays)}, expected ['classes', 'protos']"
        protos, classes = arrays["protos"], arrays["classes"]
        if protos.dtype != np.float32 or protos.ndim != 2:
            return f"protos are {protos.dtype}{list(protos.shape)}, expected float32 with 2 dimensions"
        if classes.dtype != np.int64 or classes.shape != protos.shape[:1]:
            return f"classes are {classes.dtype}{list(classes.shape)}, expected int64[{len(protos)}]"
        if len(classes) and (classes.min() < 0 or classes.max() >= (server.classes or np.inf)):
            return f"it names a class beyond the {server.classes} classes"
        if (np.diff(classes) <= 0).any():
            return "its classes are not in ascending order"
        return ""

    def merge(self, bank: Entries, entries: Entries, server: ServerRound) -> dict[str, Arrays]:
        """The cluster means of every class that a client sent, in place of those of the last round."""
        rows: dict[int, list[np.ndarray]] = {}
        for arrays in entries.values():
            for label, vector in zip(arrays["classes"], arrays["protos"], strict=True):
                rows.setdefault(int(label), []).append(vector.astype(np.float64))
        means, classes = [], []
        for label in sorted(rows):
            points = np.stack(rows[label])
            clusters = cluster_means(points, finch(points)) if self.cluster else points.mean(axis=0, keepdims=True)
            server.detail("", "prototype_clusters", f"class {label}", len(clusters))
            means.append(clusters.astype(np.float32))
            classes += [label] * len(clusters)
        if self.cluster and max(map(len, rows.values()), default=0) < FEWEST and not server.state.get("told"):
            server.state["told"] = True
            server.note(ALONE)
        if not means:
            return {}
        return {SERVER: {"cluster_protos": np.concatenate(means), "classes": np.array(classes, np.int64)}}
