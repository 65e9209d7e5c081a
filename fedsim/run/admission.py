"""All that can refuse a run, in the order in which its user meets it. Each check stands with its own subject.

Whatever starts runs (`run`, `sweep`, `search`, `launch`, `flwr run`, a deployment) calls these functions:

    resolve    the settings and the method (fedsim/run/plan.py makes the plan that is passed on)
    earlier    another run that is in the folder already
    machine    what `run.runtime` lacks: processes, a federation's file
    images     the data set is here, and each client has enough of it
    sites      of a deployment: which domains they hold
    server     what parts need on the server's machine; then what the network cannot have (Plan.build_net)
    resumed    with the folder's lock: personal models, another run, shared images, checkpoint, weights
    sent       what sites say of their data, in the handshake (strategies/wire/handshake.py) or later
"""

import logging
from collections.abc import Callable, Mapping, Sequence

from fedsim.common.errors import UserError
from fedsim.data import check_partitions, find_data
from fedsim.data.fingerprint import Fingerprints, refuse_equal_domains
from fedsim.data.shared_images import SharedImages, shared_images
from fedsim.run.checkpoint import FOLDER, Checkpoint, load_checkpoint
from fedsim.run.conflicts import DataOf, data_here, refuse_other_data, refuse_other_settings, refuse_seen
from fedsim.run.frozen import refuse_other_frozen
from fedsim.run.leftovers import is_finished
from fedsim.run.personal import check_personal
from fedsim.run.plan import Plan
from fedsim.run.processes import check_processes
from fedsim.run.settle import settle
from fedsim.run.workspace import Workspace

logger = logging.getLogger("fedsim")


def earlier(plan: Plan, data_of: DataOf = data_here) -> bool:
    """Whether the plan's folder holds this run, finished; UserError when it holds another one, finished or not."""
    refuse_other_settings(plan.folder, plan.experiment, plan.recipe, data_of)
    return is_finished(plan.folder)


def finished(plan: Plan) -> bool:
    """The same before the folder is locked, which leaves an unfinished run to `resumed`."""
    done = is_finished(plan.folder) and earlier(plan)
    if done:
        logger.info("already finished: %s", plan.folder)
    return done


def machine(plan: Plan) -> None:
    """Before a worker or an engine starts."""
    run = plan.experiment.run
    check_processes(plan.experiment)
    if run.runtime == "deployment" and not run.federation:
        raise UserError("run.runtime 'deployment' needs the federation's file: --federation federation.toml")
    if run.runtime != "deployment" and run.evaluate_target == "site":
        raise UserError("run.evaluate_target = 'site' is a setting of run.runtime = 'deployment', which has sites")


def images(plan: Plan) -> None:
    """Before the network is built, whose weights may be a download. In a deployment the sites have the images."""
    data, run = plan.experiment.data, plan.experiment.run
    if run.runtime != "deployment":
        find_data(data, plan.data)
        check_partitions(data, run.target, plan.data)


def sites(plan: Plan, domains: Callable[[str], Sequence[str]]) -> Plan:
    """The plan for a federation's machines; `domains`: those of the sites with a role."""
    plan = settle(plan, domains)
    earlier(plan)
    return plan


def server(plan: Plan, known: Mapping[str, Mapping] | None = None) -> None:
    """Before the folder is made, and when fingerprints of sites' data are `known`."""
    for _, part in plan.recipe.pairs:
        part.check_server(plan.experiment, known or {})


def resumed(space: Workspace) -> tuple[Fingerprints, Fingerprints, SharedImages | None, Checkpoint | None]:
    """Before anything is written into the folder; what is known of the data, of those on the server, and of the run."""
    plan, experiment, shared = space.plan, space.experiment, None
    check_personal(experiment, plan.recipe, space.places)
    data, server_data = data_here(experiment, plan.recipe)
    earlier(plan, lambda *_: (data, server_data))
    refuse_seen(experiment, data)
    if experiment.run.runtime != "deployment":
        shared = shared_images(experiment.data, experiment.run.target, plan.data)
        shared.refuse()
    checkpoint = load_checkpoint(plan.folder / FOLDER)
    if checkpoint:  # a site that is not online now is compared when it comes
        refuse_other_data(plan.folder, checkpoint.data, data | server_data)
        refuse_other_frozen(plan.folder, space.net, experiment.model.weights)
        data = {name: own for name, own in (checkpoint.data | data).items() if name not in server_data}
    return data, server_data, shared, checkpoint


def sent(plan: Plan, checkpoint: Checkpoint | None, known: Fingerprints) -> None:
    """When sites have sent the fingerprints of their data; all that are `known` now."""
    refuse_equal_domains(plan.data, known)
    server(plan, known)
    refuse_other_data(plan.folder, checkpoint.data if checkpoint else {}, known)
