"""All that can refuse a run, in the order in which its user meets it. Each check stands with its own subject.

Whatever starts runs (`run`, `sweep`, `search`, `launch`, `flwr run`, a deployment) calls these functions:

    resolve          the settings and the method (fedsim/runs/plan.py makes the plan that is passed on)
    check_folder     another run that is in the folder already
    check_machine    what `run.runtime` lacks: processes, a federation's file
    check_images     the data set is here, and each client has enough of it
    plan_for_sites   of a deployment: which domains its sites hold
    check_server     what parts need on the server's machine; then what the network cannot have (Plan.build_net)
    check_run        with the folder's lock: personal models, another run, shared images, checkpoint, weights
    check_sent_data  what sites say of their data, in the handshake (strategies/wire/handshake.py) or later
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from flwr.app import ArrayRecord

from fedsim.common.errors import UserError
from fedsim.data import check_partitions, find_data
from fedsim.data.findings import Finding, refuse_grave
from fedsim.data.fingerprint import Fingerprints, refuse_equal_domains
from fedsim.data.names import matching
from fedsim.data.reader import reader
from fedsim.data.shared_images import SharedImages, shared_images
from fedsim.methods.recipe import Recipe
from fedsim.models.tasks import TaskRules
from fedsim.parts.part import part_name
from fedsim.records.record_files import is_finished
from fedsim.runs.checkpoint import FOLDER, Checkpoint, load_checkpoint
from fedsim.runs.conflicts import DataOf, data_here, refuse_other_data, refuse_other_settings
from fedsim.runs.frozen import refuse_other_frozen
from fedsim.runs.kept_tensors import check_personal
from fedsim.runs.longer import goes_on
from fedsim.runs.origin import refuse_seen
from fedsim.runs.plan import Plan
from fedsim.runs.processes import check_processes
from fedsim.settings.experiment import Experiment
from fedsim.settings.model import weights_file
from fedsim.settings.paths import with_absolute_paths
from fedsim.settings.run import NO_TARGET
from strategies.model import ServerModel
from strategies.parts import Place

logger = logging.getLogger("fedsim")


class Space(Protocol):
    """What the records of a run take from the process in which its server is: its plan, and facts of its network.

    places: the place of every tensor of the network (see Share.place)
    """

    plan: Plan
    experiment: Experiment
    recipe: Recipe
    task: TaskRules
    device: torch.device
    places: dict[str, Place]

    def initial_arrays(self) -> ArrayRecord:
        """The initial model, of the tensors that travel."""

    def server_model(self) -> ServerModel:
        """What the server's parts may know of the network."""

    def data_of(self, experiment: Experiment, recipe: Recipe) -> tuple[Fingerprints, Fingerprints]:
        """The fingerprints (of the data that this process can read, of the images that parts use on the server)."""

    def frozen_record(self) -> dict[str, str]:
        """What environment.json says about the frozen tensors of the initial network; empty without any."""


@dataclass(frozen=True)
class Admitted:
    """What is known of a run that may begin or go on.

    data, server_data: fingerprints of the data by domain or client, and of the images that parts use on the server
    shared: the images that several domains show; None in a deployment, whose images are on its sites
    checkpoint: where the run goes on; None for a new one
    findings: what the files of the used domains show; none in a deployment
    """

    data: Fingerprints
    server_data: Fingerprints
    shared: SharedImages | None
    checkpoint: Checkpoint | None
    findings: Sequence[Finding] = ()


def check_folder(plan: Plan, data_of: DataOf = data_here) -> bool:
    """Says whether the plan's folder holds this run, finished; UserError when it holds another one.

    A finished run that goes on for more rounds is not finished.
    """
    refuse_other_settings(plan.folder, plan.experiment, plan.recipe, data_of)
    return is_finished(plan.folder) and not goes_on(plan.folder, plan.experiment)


def is_already_finished(plan: Plan, data_of: DataOf = data_here) -> bool:
    """Whether this run is finished, which is logged; UserError when the folder holds another finished run.

    An unfinished one is left to `check_run`, which has the folder's lock.
    """
    finished = is_finished(plan.folder) and check_folder(plan, data_of)
    if finished:
        logger.info("already finished: %s", plan.folder)
    return finished


def check_machine(plan: Plan) -> None:
    """Raises UserError for what this machine lacks, before a worker or an engine starts."""
    run = plan.experiment.run
    check_processes(plan.experiment)
    if run.runtime == "deployment" and not run.federation:
        raise UserError("run.runtime 'deployment' needs the federation's file: --federation federation.toml")
    if run.runtime != "deployment" and run.evaluate_target == "site":
        raise UserError("run.evaluate_target = 'site' is a setting of run.runtime = 'deployment', which has sites")


def check_images(plan: Plan) -> None:
    """Raises UserError without the images, before the network is built, whose weights may be a download.

    In a deployment the sites have the images.
    """
    data, run = plan.experiment.data, plan.experiment.run
    if run.runtime != "deployment":
        find_data(data, plan.data)
        refuse_grave(reader(data, plan.data).findings(), data.accept)
        check_partitions(data, run.target, plan.data)


def plan_for_sites(plan: Plan, domains: Callable[[str], Sequence[str]]) -> Plan:
    """The plan of a run on a federation's machines, with absolute paths and the machine that evaluates the target.

    domains: those of the sites with a role. Raises UserError when no site holds one of the plan's, and when the folder
    holds another run.
    """
    plan = place_on_sites(plan, domains)
    check_folder(plan)
    return plan


def place_on_sites(plan: Plan, domains: Callable[[str], Sequence[str]]) -> Plan:
    """The plan with absolute paths, and with the machine that evaluates the target; see `plan_for_sites`."""
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
    missing = [client for client in clients if matching(client, domains("source")) is None]
    if missing:
        raise UserError(
            f"{run.federation}: no site holds {', '.join(missing)}; add a [[sites]] table with domain = {missing[0]!r}"
        )
    there = matching(run.target, domains("target")) is not None
    if run.evaluate_target == "site" and not there:
        raise UserError(
            f"{run.federation}: no site has role = 'target' and domain = {run.target!r}; add one, or set "
            "run.evaluate_target = 'server'"
        )
    place = ("site" if there else "server") if run.evaluate_target == "auto" else run.evaluate_target
    run_settings = {"evaluate_target": place, "federation": str(Path(run.federation).resolve())}
    return dataclasses.replace(plan, experiment=experiment.replace(run=run_settings))


def check_server(plan: Plan, data: Mapping[str, Mapping] | None = None) -> None:
    """Raises UserError for what parts and `run.record` need on the server's machine, before the folder is made.

    data: fingerprints of the sites' data, once they are known
    """
    refuse_records(plan)
    for _, part in plan.recipe.pairs:
        part.check_server(plan.experiment, data or {})


def check_run(space: Space) -> Admitted:
    """Says what is known of a run, before anything is written into its folder; UserError when it may not go on."""
    plan, experiment, shared = space.plan, space.experiment, None
    check_personal(experiment, plan.recipe, space.places)
    refuse_local_tensors(experiment, space.places)
    data, server_data = space.data_of(experiment, plan.recipe)
    check_folder(plan, lambda *_: (data, server_data))
    refuse_seen(experiment, plan.recipe, data)
    findings: list[Finding] = []
    if experiment.run.runtime != "deployment":
        read = reader(experiment.data, plan.data)
        findings = [*read.findings(), *read.value_findings(), *read.file_findings()]
        refuse_grave(findings, experiment.data.accept)
        shared = shared_images(experiment.data, experiment.run.target, plan.data)
        shared.refuse()
    checkpoint = load_checkpoint(plan.folder / FOLDER)
    if checkpoint:  # a site that is not online now is compared when it comes
        refuse_other_data(plan.folder, checkpoint.data, data | server_data)
        refuse_other_frozen(plan.folder, space.frozen_record(), experiment.model.weights)
        earlier = checkpoint.data | data
        data = {name: fingerprint for name, fingerprint in earlier.items() if name not in server_data}
    return Admitted(data, server_data, shared, checkpoint, findings)


def check_sent_data(plan: Plan, checkpoint: Checkpoint | None, data: Fingerprints) -> None:
    """Raises UserError when the data that sites hold do not fit the run; `data` are all fingerprints known now."""
    refuse_equal_domains(plan.data, data)
    check_server(plan, data)
    try:
        refuse_other_data(plan.folder, checkpoint.data if checkpoint else {}, data)
    except UserError as error:
        raise UserError(
            f"{error}; where the images are as before again, restart the site (stop.sh, start.sh)"
        ) from None


def refuse_records(plan: Plan) -> None:
    """Raises UserError where a run cannot record what `run.record` asks for."""
    run, recipe = plan.experiment.run, plan.recipe
    if "alpha" in run.record and run.target == NO_TARGET:
        raise UserError(f"run.record = 'alpha' is of images of the unseen domain, and with run.target = {NO_TARGET!r} "
                        "there is none; take 'alpha' out of run.record")  # fmt: skip
    if "alpha" in run.record and "alpha" not in recipe.infer.quantities:
        raise UserError(
            "run.record = 'alpha' needs an inference rule with an alpha for each image (zero_shot_adapter, that of "
            f"fedig-a); {plan.experiment.method_name} has {part_name(recipe.infer)}"
        )
    for name in ("alpha", "local_models"):
        if name in run.record and run.runtime == "deployment":
            raise UserError(f"run.record = {name!r} reads the images of domains on the server, which sites keep; it is "
                            "of simulations alone")  # fmt: skip
    if "local_models" in run.record and recipe.fuse.masked:
        raise UserError(f"run.record = 'local_models' looks at single clients' models, which {part_name(recipe.fuse)} "
                        "hides from the server")  # fmt: skip


def refuse_local_tensors(experiment: Experiment, places: Mapping[str, Place]) -> None:
    """Raises UserError where `run.record` asks for clients' models, of which they keep tensors to themselves."""
    local = [name for name, place in places.items() if place == "local"]
    if "local_models" in experiment.run.record and local:
        raise UserError(
            f"run.record = 'local_models' needs all tensors of a client's model, and clients of "
            f"{experiment.method_name} keep {len(local)} to themselves ({local[0]}, ...)"
        )
