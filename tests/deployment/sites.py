"""Sites in this process: an inline grid whose nodes are configured like the SuperNodes of separate machines."""

from collections.abc import Collection, Mapping
from pathlib import Path

from flwr.app import Context, RecordDict
from support import SpyGrid

from fedsim.runs.plan import resolve
from fedsim.runs.serve import serve
from fedsim.settings.experiment import Experiment


def run_on_sites(
    experiment: Experiment,
    state: Path,
    *callbacks: object,
    tamper=None,
    spare=(),
    away: Collection[str] = (),
    data: Mapping[str, Path] | None = None,
    **more,
) -> tuple[Path, SpyGrid]:
    """Run an experiment with a node per source client, one for the target, and nodes of `spare` source domains.

    Nodes of the domains `away`, which may change, are not online; `data` has the data folder of each domain's node, and
    `more` is part of every node's config. Returns the run's folder and the grid with all messages.
    """
    sources = [*resolve(experiment).clients, *spare]
    roles = [(name, "source") for name in sources] + [(experiment.run.target, "target")]
    grid = SpyGrid(len(roles), tamper)
    for node, (domain, role) in zip(grid.node_ids, roles, strict=True):
        folder = state / f"{role}-{domain.replace('/', '-')}"
        config = {"site": f"site-{domain}", "domain": domain, "role": role, "state-dir": str(folder), **more}
        if data:
            config["data-dir"] = str(data[domain])
        grid.contexts[node] = Context(1, node, config, RecordDict(), {})
    domains = {node: grid.contexts[node].node_config["domain"] for node in grid.node_ids}
    grid.get_node_ids = lambda: [node for node in grid.node_ids if domains[node] not in away]
    return serve(grid, resolve(experiment), callbacks), grid
