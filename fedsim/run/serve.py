"""One run with the clients of a grid: settings -> strategy -> rounds -> records."""

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from fedsim.methods.registry import packages_of
from fedsim.results.callbacks import RunCallback, tell_failure, trackers
from fedsim.run import admission
from fedsim.run.checkpoint import run_token
from fedsim.run.claim import claim
from fedsim.run.leftovers import nothing_left, remove_empty
from fedsim.run.no_effect import data_facts, no_effect_remarks, run_facts, share_remarks
from fedsim.run.plan import Plan
from fedsim.run.remarks import code_remarks, data_remarks
from fedsim.run.session import Session
from fedsim.run.shared_target import SharedTarget
from fedsim.run.target import TargetEvaluator
from fedsim.run.work import budget_remarks
from fedsim.run.workspace import Workspace, open_workspace, set_threads
from fedsim.settings import RunSettings
from fedsim.settings.experiment import Experiment
from fedsim.settings.plugins import outside_versions
from fedsim.tensors.arrays import record_to_arrays
from fedsim.tensors.records import Config
from strategies.base import FedDG
from strategies.wire.fused_check import model_probe
from strategies.wire.handshake import Roster
from strategies.wire.membership import Identify, missing_classes
from strategies.wire.patience import PatientGrid
from strategies.wire.polling import QuickGrid
from strategies.wire.pulling import expected_bytes
from strategies.wire.target_site import TargetScore, TargetSite

SAID_CLIENTS = 20  # the log names the missing classes of at most so many clients; the records name those of all

logger = logging.getLogger("fedsim")


def serve(grid: Grid, plan: Plan, callbacks: Sequence[RunCallback] = (), identify: Identify | None = None) -> Path:
    """Carry out (or resume) one run with the clients of a grid; returns the run's folder.

    identify: gives the registered site to which a node's key belongs; the node may act only as that site. Without it,
    nodes are believed.
    """
    folder, run = plan.folder, plan.experiment.run
    if admission.finished(plan):
        return folder
    everyone = [*callbacks, *trackers(run)]
    set_threads(run.threads)
    admission.server(plan)
    try:
        with claim(folder) as held, nothing_left(folder, held.stands):
            if not admission.finished(plan):
                _carry_out(grid, Session(open_workspace(plan), everyone, held.check), identify)
    except BaseException as error:
        remove_empty(folder, Path(run.output))
        tell_failure(everyone, error)
        raise
    return folder


def _carry_out(grid: Grid, session: Session, identify: Identify | None) -> None:
    space, experiment, plan = session.space, session.experiment, session.space.plan
    on_site = experiment.run.evaluate_target == "site"
    space.target = evaluator = None if on_site else TargetEvaluator(space)
    held_out = TargetEvaluator(space, held_out=True) if experiment.run.validation_domain else None
    run_config = sent_settings(experiment, session.folder / "state", run_token(session.checkpoint_folder))
    strategy = FedDG(space.recipe, experiment, space.places, run_config, space.task.metric)
    server = strategy.server

    def evaluate_held_out(arrays: ArrayRecord) -> TargetScore:
        assert held_out is not None
        return held_out(record_to_arrays(arrays), server.wanted_entries())

    session.attach(strategy, evaluate_held_out if held_out else None)
    if isinstance(grid, QuickGrid):
        grid.expect(largest_reply(space))
    server.probe = model_probe(space.net, plan.data.channels, experiment.data.image_size)
    target = experiment.run.target if on_site else ""
    roster = Roster(grid, plan.clients, len(plan.data.classes), run_config, target, identify, space.frozen_content)
    server.exchange.join(roster)
    server.target = SharedTarget(evaluator, grid, run_config) if evaluator else TargetSite(server.exchange, roster)
    tested = evaluator.class_counts() if evaluator else roster.target.class_counts if roster.target else ()
    _meet(session, roster, tested)
    session.target_images = len(evaluator.labels) if evaluator else roster.target.examples if roster.target else 0
    logging.getLogger("flwr").setLevel(logging.WARNING)
    rounds = experiment.train.rounds - max(strategy.finished_rounds, 0)
    with closing(server.storage):
        patient = PatientGrid(grid, server.exchange, experiment.run.patience)
        strategy.start(patient, session.initial_arrays(), num_rounds=rounds, timeout=experiment.run.timeout)
    session.finish()


def _meet(session: Session, roster: Roster, tested: Sequence[int]) -> None:
    """Check, record and log what the sites, or the files of a simulation, hold. tested: images by class.

    A site that comes later is checked and recorded when it comes.
    """
    plan, sites, shared = session.space.plan, roster.sites, session.shared
    session.note_data(roster.fingerprints())
    roster.check_late = session.note_data
    missing = missing_classes(plan.data.classes, {name: site.class_counts for name, site in sites.items()})
    session.note("missing_classes", missing)
    for client, names in list(missing.items())[:SAID_CLIENTS]:
        logger.info("client %r has no training images of %s", client, ", ".join(names))
    images = {name: int(own["images"]) for name, own in session.data.items()}
    counts = [site.class_counts for site in sites.values()]
    remarks = data_remarks(plan.data, images, counts, plan.experiment.run.target, tested)
    if shared and shared.record():
        remarks += shared.remarks()
        session.note("shared_images", shared.record())
    examples = [site.examples for site in sites.values()]
    facts = run_facts(session.space.net, examples, sum(tested), plan.experiment.data.adapt_share)
    remarks += no_effect_remarks(plan.experiment, plan.recipe, data_facts(plan.experiment, plan.data) | facts)
    remarks += share_remarks(session.space.net, plan.recipe.share) + budget_remarks(plan, examples)
    known = {name: site.versions for name, site in sites.items()}
    known |= {roster.target.client: roster.target.versions} if roster.target else {}
    remarks += code_remarks(outside_versions(packages_of(plan.experiment)), known)
    session.note("data_remarks", remarks)
    for text in remarks:
        logger.warning(text)


def sent_settings(experiment: Experiment, state: Path, token: str) -> Config:
    """What every message to a client contains: settings, folder of its state, the run's token and time limit.

    The sites of a deployment have their own folders, so that the messages to them name no folder of the server.
    """
    own = experiment.run.runtime == "deployment"
    if own:
        blank = {"output": RunSettings().output, "federation": ""}
        experiment = experiment.replace(data={"root": "", "cache": ""}, run=blank)
    state_dir = "" if own else str(state.resolve())
    return {
        "experiment": experiment.toml(),
        "state-dir": state_dir,
        "token": token,
        "timeout": experiment.run.timeout,
    }


def largest_reply(space: Workspace) -> int:
    """Bytes of the largest reply that is possible with the recipe's model and banks."""
    sizes = [tensor.nbytes for name, tensor in space.net.state_dict().items() if space.places[name] != "local"]
    return expected_bytes(sizes, bool(space.recipe.banks or space.recipe.visits))
