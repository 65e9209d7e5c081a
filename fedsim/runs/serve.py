"""One run with the clients of a grid: settings -> strategy -> rounds -> records."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from fedsim.common.errors import UserError
from fedsim.data.findings import Finding, lines_of, refuse_grave
from fedsim.data.scaling import Moments, feature_notes, scale_of
from fedsim.data.tensor_records import scale_record
from fedsim.methods.registry import packages_of
from fedsim.parts.part import Part
from fedsim.records.callbacks import RunCallback, tell_failure, trackers
from fedsim.records.cases import STRUCTURE_QUANTITIES
from fedsim.records.doubt import KEY
from fedsim.records.environment import own_versions
from fedsim.runs import admission
from fedsim.runs.attacked_data import liar_notes
from fedsim.runs.checkpoint import run_token
from fedsim.runs.claim import claim
from fedsim.runs.conflicts import data_of_server
from fedsim.runs.doubt import fit_doubt
from fedsim.runs.leftovers import nothing_left, remove_empty
from fedsim.runs.local_models import LocalModels, keep_alphas
from fedsim.runs.no_effect import data_facts, infer_notes, no_effect_notes, run_facts, share_notes
from fedsim.runs.notes import code_notes, comparison_notes, data_notes, undefined_on_target, version_notes, weight_notes
from fedsim.runs.plan import Plan
from fedsim.runs.session import Session
from fedsim.runs.target import SharedTarget, TargetEvaluator
from fedsim.runs.work import budget_notes, orders
from fedsim.runs.workspace import Workspace, open_workspace, set_threads
from fedsim.settings.experiment import Experiment
from fedsim.settings.paths import with_own_folders
from fedsim.settings.plugins import outside_versions
from fedsim.settings.run import NO_TARGET
from fedsim.tensors.arrays import record_to_arrays
from fedsim.tensors.records import Config
from strategies.base import FedDG, Sink
from strategies.server import Server
from strategies.wire.fused_check import model_probe
from strategies.wire.grids import PatientGrid, QuickGrid
from strategies.wire.handshake import Roster
from strategies.wire.pulling import expected_bytes
from strategies.wire.reply_checks import OPTIONAL
from strategies.wire.scales import scale_config
from strategies.wire.sites import Identify, Site, missing_classes
from strategies.wire.target_site import Asked, DetailForm, TargetScore, TargetSite

SAID_CLIENTS = 20  # the log names the missing classes of at most so many clients; the records name those of all

logger = logging.getLogger("fedsim")


def serve(
    grid: Grid,
    plan: Plan,
    callbacks: Sequence[RunCallback] = (),
    identify: Identify | None = None,
    sinks: Sequence[Sink] = (),
) -> Path:
    """Carries out (or resumes) one run with the clients of a grid; returns the run's folder.

    sinks: are told of each round, besides the run's records
    identify: gives the registered site to which a node's key belongs; the node may act only as that site. Without it,
    nodes are believed.
    """
    folder, run = plan.folder, plan.experiment.run
    if admission.is_already_finished(plan, data_of_server):
        return folder
    set_threads(run.threads)
    admission.check_server(plan)
    with recorded(plan, callbacks) as (everyone, check):
        if not admission.is_already_finished(plan, data_of_server):
            space = open_workspace(plan)
            play_rounds(grid, space, Session(space, everyone, check), identify, sinks)
    return folder


@contextmanager
def recorded(plan: Plan, callbacks: Sequence[RunCallback]) -> Iterator[tuple[list[RunCallback], Callable[[], None]]]:
    """Within this block the run's folder is this process's alone. Yields the callbacks, those of the settings too, and
    a function that raises an error when the folder is no longer ours.

    An attempt that fails before its first record leaves nothing behind, and the callbacks are told of each failure.
    """
    everyone = [*callbacks, *trackers(plan.experiment.run)]
    try:
        with claim(plan.folder) as held, nothing_left(plan.folder, held.stands):
            yield everyone, held.check
    except BaseException as error:
        remove_empty(plan.folder, Path(plan.experiment.run.output))
        tell_failure(everyone, error)
        raise


def play_rounds(
    grid: Grid, space: Workspace, session: Session, identify: Identify | None, sinks: Sequence[Sink]
) -> None:
    """Meets the clients of a grid, plays the rounds that are left, and finishes the run's folder."""
    run = session.experiment.run
    run_config = sent_settings(session.experiment, session.folder / "state", run_token(session.checkpoint_folder))
    strategy = make_strategy(space, session, run_config)
    server = strategy.server
    elsewhere = run.evaluate_target == "site" or run.target == NO_TARGET
    space.target = evaluator = None if elsewhere else TargetEvaluator(space)
    session.attach(strategy, held_out_evaluator(space, server))
    if "local_models" in run.record:
        server.watch = session.local_models = LocalModels(space, server, evaluator)
    strategy.sinks += sinks
    if isinstance(grid, QuickGrid):
        grid.expect(largest_reply(space))
    roster = make_roster(grid, space, run_config, identify)
    meet(server, roster, space)
    agree_on_scale(space, session, roster, run_config)
    server.target = asked_for_target(space, server, evaluator, roster)
    tested = tested_images(evaluator, roster)
    session.note("undefined", undefined_on_target(space, evaluator, tested))
    record_sites(space, session, roster, tested)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    with closing(server.storage):
        play_left(strategy, PatientGrid(grid, server.exchange, run.patience), session)
    if "alpha" in run.record and evaluator:
        keep_alphas(space, evaluator)
    session.finish()


def play_left(strategy: FedDG, grid: Grid, session: Session) -> None:
    """Plays the rounds that are left, and lets the sources fit the doubt of the best model where it is asked for."""
    run, rounds = session.experiment.run, session.experiment.train.rounds
    left = rounds - max(strategy.finished_rounds, 0)
    try:
        strategy.start(grid, session.initial_arrays(), num_rounds=left, timeout=run.timeout)
    finally:
        session.write_rows()
    if run.doubt:
        session.note(KEY, fit_doubt(strategy.server, grid, session.folder, strategy.finished_rounds))


def meet(server: Server, roster: Roster, space: Workspace) -> None:
    """Waits for the clients, and notes how much work a round orders of each."""
    server.exchange.join(roster)
    examples = {name: site.examples for name, site in roster.sites.items()}
    server.exchange.orders = orders(space.plan, examples)


def make_strategy(space: Workspace, session: Session, run_config: Config) -> FedDG:
    """The strategy of a run, which knows no clients yet."""
    experiment = session.experiment
    strategy = FedDG(space.recipe, experiment, space.places, run_config, space.task.metric)
    shape = space.plan.data.example_shape(experiment.data.image_size)
    exchange = strategy.server.exchange
    exchange.columns = columns_of(space)
    strategy.server.probe = model_probe(space.net, *shape)
    return strategy


def columns_of(space: Workspace) -> set[str]:
    """The metrics that a reply of our own client to a train message may have, besides those that every reply has."""
    columns = set(OPTIONAL)
    for part in space.recipe.of(Part):
        columns.update(part.columns)
        columns.update(part.needs)
    if space.experiment.run.select_on == "local":
        names = (space.task.metric, space.experiment.run.select_by)
        columns.update(f"local_validation_{name}" for name in names)
    return columns


def asked_for_target(
    space: Workspace, server: Server, evaluator: TargetEvaluator | None, roster: Roster
) -> Asked | None:
    """Who evaluates the unseen domain: this process and those of the grid, or its site; None where there is none."""
    if evaluator:
        return SharedTarget(evaluator, roster.grid, roster.run_config)
    return TargetSite(server.exchange, roster, detail_form(space)) if roster.target else None


def detail_form(space: Workspace) -> DetailForm:
    """The details that the site of the unseen domain may send: those of the inference rule and of the task."""
    quantities = set(space.recipe.infer.quantities)
    names = {path for path, _ in space.net.named_modules()}
    if space.task.maps:
        quantities.update(STRUCTURE_QUANTITIES)
        names.update(space.plan.data.outputs)
    return DetailForm(quantities, names)


def agree_on_scale(space: Workspace, session: Session, roster: Roster, run_config: Config) -> None:
    """Makes the scale of the features of the clients' sums, where there is one, and sends it with every message.

    A resumed run keeps its own, whichever sites are there now.
    """
    features, targets = space.summed
    if not features and not targets:
        return
    sums = []
    for site in roster.sites.values():
        if site.moments is None:
            continue
        if len(site.moments.counts) != features + targets:
            given = len(site.moments.counts) - targets
            raise UserError(
                f"client {site.client!r} sends sums of {given} features, and the experiment has {features}; give all "
                "sites the same data.columns"
            )
        sums.append(site.moments)
    scale = session.scale or scale_of(sums)
    space.use_scale(scale)
    run_config.update(scale_config(scale))
    for name, value in scale_record(scale).items():
        session.note(name, value)


def tested_images(evaluator: TargetEvaluator | None, roster: Roster) -> Sequence[int]:
    """The tested images of the unseen domain by class, which the server or the target's site has; empty for neither."""
    if evaluator:
        return evaluator.class_counts()
    return roster.target.class_counts if roster.target else ()


def held_out_evaluator(space: Workspace, server: Server) -> Callable[[ArrayRecord], TargetScore] | None:
    """A function that evaluates a model on `run.validation_domain`; None where no domain is held out."""
    if not space.experiment.run.validation_domain:
        return None
    evaluator = TargetEvaluator(space, held_out=True)
    return lambda model: evaluator(record_to_arrays(model), server.wanted_entries())


def make_roster(grid: Grid, space: Workspace, run_config: Config, identify: Identify | None) -> Roster:
    """The roster of the run's clients, and of the target's site where a site evaluates the unseen domain."""
    plan, run = space.plan, space.experiment.run
    target = run.target if run.evaluate_target == "site" else ""
    return Roster(
        grid,
        plan.clients,
        len(plan.data.classes),
        run_config,
        target,
        identify,
        space.frozen_content,
        space.hashes_of_names(),
    )


def record_sites(space: Workspace, session: Session, roster: Roster, tested: Sequence[int]) -> None:
    """Checks, records and logs what the sites, or the files of a simulation, hold. tested: images by class.

    A site that comes later is checked and recorded when it comes.
    """
    plan, sites = space.plan, roster.sites
    session.target_images = sum(tested)
    session.note_data(roster.fingerprints())
    session.note_versions(separate_versions(roster))

    def check_late(site: Site) -> None:
        session.note_data({site.client: site.data})
        session.note_versions(separate_versions(roster))
        note_findings(session, site.findings)

    roster.check_late = check_late
    record_classes(session, plan.data.classes, sites)
    if session.shared:
        session.note("shared_images", session.shared.record())
    for site in every_site(roster):
        note_findings(session, site.findings)
    session.note("findings", [finding.record() for finding in session.findings])
    notes = notes_before_rounds(space, session, roster, tested)
    session.note("data_remarks", notes)
    undefined = [f"{domain}: {reason}" for domain, reason in session.environment.get("undefined", {}).items()]
    for text in notes + undefined:
        logger.warning(text)


def record_classes(session: Session, classes: Sequence[str], sites: Mapping[str, Site]) -> None:
    """Records and logs the classes that sites lack, and with `run.record` the training images of each by class."""
    counts = {name: list(site.class_counts) for name, site in sites.items()}
    if "classes" in session.experiment.run.record:
        session.note("class_counts", counts)
    missing = missing_classes(classes, counts)
    session.note("missing_classes", missing)
    for client, names in list(missing.items())[:SAID_CLIENTS]:
        logger.info("client %r has no training images of %s", client, ", ".join(names))


def note_findings(session: Session, findings: Sequence[Finding]) -> None:
    """Record what the files of a site show; raises UserError for a grave finding that `data.accept` does not name."""
    if findings:
        refuse_grave(findings, session.experiment.data.accept)
        session.findings = [*session.findings, *findings]
        session.note("findings", [finding.record() for finding in session.findings])


def every_site(roster: Roster) -> list[Site]:
    """The sites of the clients, and that of the unseen domain where it has one."""
    return [*roster.sites.values(), *([roster.target] if roster.target else [])]


def notes_before_rounds(space: Workspace, session: Session, roster: Roster, tested: Sequence[int]) -> list[str]:
    """What a run says of its data, settings and sites before the first round."""
    plan = space.plan
    experiment = plan.experiment
    sites = roster.sites
    images = {name: int(fingerprint["images"]) for name, fingerprint in session.data.items()}
    counts = [site.class_counts for site in sites.values()]
    notes = data_notes(plan.data, images, counts, experiment.run.target, tested)
    if session.shared:  # the images are here
        notes += session.shared.notes() if session.shared.record() else []
    notes += lines_of(session.findings, experiment.data.accept)
    examples = [site.examples for site in sites.values()]
    facts = run_facts(space.net, examples, sum(tested), experiment.data.adapt_share)
    facts |= data_facts(experiment, plan.data)
    notes += no_effect_notes(experiment, plan.recipe, plan.row, facts)
    notes += share_notes(space.net, plan.recipe.share)
    notes += infer_notes(experiment, plan.recipe.infer)
    notes += feature_notes(experiment.data, plan.data, sums_of(sites.values()))
    notes += budget_notes(plan, examples)
    notes += comparison_notes(plan)
    notes += weight_notes(experiment, plan.data)
    notes += liar_notes(experiment)
    notes += remarks_of(plan)
    return notes + notes_on_versions(experiment, roster)


def notes_on_versions(experiment: Experiment, roster: Roster) -> list[str]:
    """Sites whose packages, or whose code from outside of fedsim, are not those of the server."""
    versions = versions_of(roster)
    notes = version_notes(own_versions(), versions)
    return notes + code_notes(outside_versions(packages_of(experiment)), versions)


def remarks_of(plan: Plan) -> list[str]:
    """What the parts of a recipe have to say before a run."""
    return [part.remark for _, part in plan.recipe.pairs if part.remark]


def versions_of(roster: Roster) -> dict[str, dict[str, str]]:
    """The versions of packages at each site, and at that of the unseen domain."""
    versions = {name: site.versions for name, site in roster.sites.items()}
    if roster.target:
        versions[roster.target.client] = roster.target.versions
    return versions


def separate_versions(roster: Roster) -> dict[str, dict[str, str]]:
    """The versions of packages at those sites that are machines of their own; empty in a simulation."""
    return {site.client: site.versions for site in every_site(roster) if site.data and site.versions}


def sums_of(sites: Iterable[Site]) -> dict[str, Moments]:
    """The sums of features of each client that sends some."""
    sums = {}
    for site in sites:
        if site.moments:
            sums[site.client] = site.moments
    return sums


def sent_settings(experiment: Experiment, state: Path, token: str) -> Config:
    """What every message to a client contains: settings, folder of its state, the run's token and time limit.

    The sites of a deployment have their own folders, so that the messages to them name no folder of the server.
    """
    state_dir = str(state.resolve())
    if experiment.run.runtime == "deployment":
        experiment, state_dir = with_own_folders(experiment, ""), ""
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
