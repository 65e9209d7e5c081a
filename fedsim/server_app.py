"""Flower's ServerApp: settings -> strategy -> rounds -> records. It is the same in simulation and deployment."""

import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedsim.common.cores import free_cores
from fedsim.common.errors import USER_ERROR, UserError
from fedsim.common.tasks import scores, task_in
from fedsim.data.fingerprint import Fingerprints, refuse_equal_domains
from fedsim.methods.recipe import parts_of
from fedsim.methods.registry import packages_of
from fedsim.results.callbacks import RunCallback, tell_failure, trackers
from fedsim.results.selection import DEFAULT_RULE, rule_title
from fedsim.run.checkpoint import run_token
from fedsim.run.claim import claim
from fedsim.run.conflicts import refuse_other_settings
from fedsim.run.fresh import nothing_left, remove_empty
from fedsim.run.no_effect import data_facts, no_effect_remarks, run_facts
from fedsim.run.plan import Plan, resolve
from fedsim.run.privacy_account import statement
from fedsim.run.remarks import code_remarks, data_remarks
from fedsim.run.session import Session, is_finished
from fedsim.run.shared_target import SharedTarget
from fedsim.run.target import TargetEvaluator
from fedsim.run.work import budget_remarks
from fedsim.run.workspace import Workspace, open_workspace, set_threads
from fedsim.settings import RunSettings
from fedsim.settings.experiment import Experiment, parse_experiment, read_experiment
from fedsim.settings.plugins import outside_versions
from fedsim.tensors.arrays import record_to_arrays
from strategies.base import FedDG
from strategies.wire.fused_check import model_probe
from strategies.wire.handshake import Roster
from strategies.wire.membership import Identify, missing_classes
from strategies.wire.patience import PatientGrid
from strategies.wire.polling import QuickGrid
from strategies.wire.pulling import expected_bytes
from strategies.wire.target_site import TargetScore

LOG = "run.log"
SAID_CLIENTS = 20  # the log names the missing classes of at most so many clients; the records name those of all

app = ServerApp()
logger = logging.getLogger("fedsim")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Entry point of `flwr run`."""
    with marked():
        serve(QuickGrid(grid), resolve(experiment_of(dict(context.run_config))), [LogLines()])


@contextmanager
def marked() -> Iterator[None]:
    """Mark a UserError by a prefix of its text, because Flower keeps only the text of an error."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{USER_ERROR}{error}") from None


def experiment_of(run_config: dict) -> Experiment:
    """The experiment of Flower's flat run config.

    Its keys are `experiment` (path, name or TOML text), `method`, `target`, `seed`, `output` and `overrides` (one
    string of key=value words).
    """
    text = str(run_config.get("experiment") or "digits")
    if "\n" in text:
        return parse_experiment(text)
    overrides = shlex.split(str(run_config.get("overrides", "")))
    for key, name in (("method", "method.name"), ("target", "run.target"), ("output", "run.output")):
        if run_config.get(key):
            overrides.append(f"{name}={run_config[key]}")
    if int(run_config.get("seed", -1)) >= 0:
        overrides.append(f"run.seed={run_config['seed']}")
    return read_experiment(text, overrides)


def serve(grid: Grid, plan: Plan, callbacks: Sequence[RunCallback] = (), identify: Identify | None = None) -> Path:
    """Carry out (or resume) one run with the clients of a grid; returns the run's folder.

    identify: gives the registered site to which a node's key belongs; the node may act only as that site. Without it,
    nodes are believed.
    """
    folder, run = plan.folder, plan.experiment.run
    if is_finished(folder):
        return _finished(plan)
    everyone = [*callbacks, *trackers(run)]
    set_threads(run.threads)
    check_server(plan)
    space = open_workspace(plan)
    try:
        with claim(folder), nothing_left(folder):
            return _finished(plan) if is_finished(folder) else _serve(grid, space, everyone, identify)
    except BaseException as error:
        remove_empty(folder, Path(run.output))
        tell_failure(everyone, error)
        raise


def _finished(plan: Plan) -> Path:
    """The folder of a finished run; UserError when it is not the run that was asked for."""
    refuse_other_settings(plan.folder, plan.experiment, plan.recipe)
    logger.info("already finished: %s", plan.folder)
    return plan.folder


def _serve(grid: Grid, space: Workspace, callbacks: Sequence[RunCallback], identify: Identify | None) -> Path:
    plan, experiment = space.plan, space.experiment
    on_site = experiment.run.evaluate_target == "site"
    space.target = evaluator = None if on_site else TargetEvaluator(space)
    held_out = TargetEvaluator(space, held_out=True) if experiment.run.validation_domain else None
    session = Session(space, callbacks)
    run_config = sent_settings(experiment, session.folder / "state", run_token(session.checkpoint_folder))
    strategy = FedDG(space.recipe, experiment, space.places, run_config, space.task.metric)

    shared = SharedTarget(evaluator, grid, run_config) if evaluator else None

    def evaluate(arrays: ArrayRecord) -> TargetScore:
        if shared is not None:
            return shared(strategy.log.round, arrays, strategy.wanted_entries())
        return strategy.target_site.score if strategy.log.round else strategy.target_site.ask(grid, arrays)

    def evaluate_held_out(arrays: ArrayRecord) -> TargetScore:
        return held_out(record_to_arrays(arrays), strategy.wanted_entries())

    strategy.storage.folder = session.folder
    session.attach(strategy, evaluate, evaluate_held_out if held_out else None)
    if said := statement(experiment, space.recipe, len(plan.clients), session.repeated):
        logger.info(said)
        session.counts_rounds = True
    session.note("privacy", said)
    target = experiment.run.target if on_site else ""
    if isinstance(grid, QuickGrid):
        grid.largest_reply = largest_reply(space)
    strategy.guard.probe = model_probe(space.net, plan.data.channels, experiment.data.image_size)
    roster = Roster(grid, plan.clients, len(plan.data.classes), run_config, target, identify, space.frozen_content)
    strategy.join(roster)
    _note_data(session, roster, evaluator.class_counts() if evaluator else roster.target.class_counts)
    session.target_images = len(evaluator.labels) if evaluator else roster.target.examples
    grid = PatientGrid(grid, strategy.exchange, experiment.run.patience)
    arrays = session.initial_arrays()
    if not session.checkpoint:
        session.begin(0)
        arrays = strategy.before_rounds(grid, arrays)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    rounds = experiment.train.rounds - strategy.finished_rounds
    if rounds:
        with closing(strategy.storage):
            strategy.start(
                grid, arrays, num_rounds=rounds, timeout=experiment.run.timeout, evaluate_fn=session.end_of_round
            )
    return session.finish()


def _note_data(session: Session, roster: Roster, tested: Sequence[int]) -> None:
    """Check, record and log what the sites, or the files of a simulation, hold. tested: images by class.

    A site that comes later is checked and recorded when it comes.
    """
    plan, sites = session.space.plan, roster.sites

    def check_data(own: Fingerprints) -> None:
        refuse_equal_domains(plan.data, session.data | own)
        check_server(plan, own)
        session.note_data(own)

    check_data(roster.fingerprints())
    roster.check_late = check_data
    missing = missing_classes(plan.data.classes, {name: site.class_counts for name, site in sites.items()})
    session.note("missing_classes", missing)
    for client, names in list(missing.items())[:SAID_CLIENTS]:
        logger.info("client %r has no training images of %s", client, ", ".join(names))
    images = {name: int(own["images"]) for name, own in session.data.items()}
    counts = [site.class_counts for site in sites.values()]
    remarks = data_remarks(plan.data, images, counts, plan.experiment.run.target, tested)
    if session.shared and session.shared.shared:
        remarks.append(f"{session.shared.text()}; the accuracy on these says nothing about an unseen domain")
        session.note("shared_images", session.shared.record())
    examples = [site.examples for site in sites.values()]
    facts = run_facts(session.space.net, examples, sum(tested), plan.experiment.data.adapt_share)
    remarks += no_effect_remarks(plan.experiment, plan.recipe, data_facts(plan.experiment, plan.data) | facts)
    remarks += budget_remarks(plan, examples)
    known = {name: site.versions for name, site in sites.items()}
    known |= {roster.target.client: roster.target.versions} if roster.target else {}
    remarks += code_remarks(outside_versions(packages_of(plan.experiment)), known)
    session.note("data_remarks", remarks)
    for text in remarks:
        logger.warning(text)


def sent_settings(experiment: Experiment, state: Path, token: str) -> dict[str, str | float]:
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


def check_server(plan: Plan, known: Fingerprints | None = None) -> None:
    """Check that this machine has what the recipe's parts need; known: fingerprints of the sites' data."""
    for _, part in parts_of(plan.recipe):
        part.check_server(plan.experiment, known or {})


def largest_reply(space: Workspace) -> int:
    """Bytes of the largest reply that is possible with the recipe's model and banks."""
    sizes = [tensor.nbytes for name, tensor in space.net.state_dict().items() if space.places[name] != "local"]
    return expected_bytes(sizes, bool(space.recipe.banks or space.recipe.visits))


class LogLines:
    """One log line per round and per problem, to the standard output and into the run's `run.log`."""

    def on_start(self, experiment: Experiment, folder: Path) -> None:
        """Log where the records are written."""
        self.basis = rule_title(DEFAULT_RULE, [experiment])
        logger.setLevel(logging.INFO)
        for handler in (logging.StreamHandler(sys.stdout), logging.FileHandler(folder / LOG, encoding="utf-8")):
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            logger.addHandler(handler)
        logger.info(
            "%s on %s, target %s, seed %d: records in %s",
            *(experiment.method_name, experiment.data.dataset, experiment.run.target, experiment.run.seed, folder),
        )
        threads = experiment.run.threads or "as many as there are cores"
        logger.info("CPU threads of each process: %s; cores free to this one: %d", threads, free_cores())

    def on_round(self, row: dict, clients: list[dict]) -> None:
        """Log the round, and the primary metric in validation and on the target."""
        shown = scores(row)
        logger.info("round %d: %s", row["round"], "  ".join(f"{name} {100 * value:.1f} %" for name, value in shown))

    def on_end(self, summary: dict) -> None:
        """Logs the result of the run."""
        metric = task_in(summary, "best_validation_target_").metric
        value, round = summary[f"best_validation_target_{metric}"], summary["best_validation_round"]
        if round is None:  # the validation is NaN in every round
            logger.info("done: no round has a validation (%s)", self.basis)
        else:
            logger.info("done: %.1f %% on %s (round %d, %s)", 100 * value, summary["target"], round, self.basis)

    def on_failure(self, error: BaseException) -> None:
        """Log why the run stopped."""
        logger.error("stopped: %s", error if isinstance(error, Exception) else "from outside")  # a signal
