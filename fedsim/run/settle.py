"""The plan of a run on a federation's machines."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from fedsim.common.errors import UserError
from fedsim.data.names import matching
from fedsim.run.plan import Plan
from fedsim.settings.model import weights_file
from fedsim.settings.paths import with_absolute_paths


def settle(plan: Plan, sites: Callable[[str], Sequence[str]]) -> Plan:
    """The plan with absolute paths, and with the machine that evaluates the target.

    sites: the domains of the sites with a role. Raises UserError when no site holds one of the plan's.
    """
    experiment, clients = with_absolute_paths(plan.experiment), plan.clients
    run = experiment.run
    if plan.recipe.pooled:
        raise UserError(f"{experiment.method_name} pools all source data on one machine; it cannot be deployed")
    weights = weights_file(experiment.model.weights)
    if weights and not weights.is_absolute():
        raise UserError(
            f"model.weights = {experiment.model.weights!r}: every machine of a deployment reads its own file, from "
            "another working folder than this; name it by an absolute path that exists on the server and on every site"
        )
    missing = [client for client in clients if matching(client, sites("source")) is None]
    if missing:
        raise UserError(
            f"{run.federation}: no site holds {', '.join(missing)}; add a [[sites]] table with domain = {missing[0]!r}"
        )
    there = matching(run.target, sites("target")) is not None
    if run.evaluate_target == "site" and not there:
        raise UserError(
            f"{run.federation}: no site has role = 'target' and domain = {run.target!r}; add one, or set "
            "run.evaluate_target = 'server'"
        )
    place = ("site" if there else "server") if run.evaluate_target == "auto" else run.evaluate_target
    run_settings = {"evaluate_target": place, "federation": str(Path(run.federation).resolve())}
    return dataclasses.replace(plan, experiment=experiment.replace(run=run_settings))
