"""Flower ServerApp: settings -> strategy -> rounds -> records. The same in simulation and deployment."""

import hashlib
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedsim.claim import claim
from fedsim.data import benchmark, resolve_domain
from fedsim.errors import UserError
from fedsim.experiment import Experiment, parse_experiment, read_experiment
from fedsim.results.callbacks import RunCallback, tell_failure, trackers
from fedsim.session import Session, is_finished, run_folder
from fedsim.workspace import Workspace, set_threads, source_clients
from strategies.base import FedDG
from strategies.handshake import handshake

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Entry point of `flwr run` and of a SuperLink."""
    serve(grid, experiment_of(dict(context.run_config)), [LogLines()])


def experiment_of(run_config: dict) -> Experiment:
    """The experiment of Flower's flat run config: `experiment` (path, name or TOML text), `method`, `target`, `seed`,
    `output`, `overrides` (one string of key=value words)."""
    text = str(run_config.get("experiment") or "digits")
    if "\n" in text:
        return complete(parse_experiment(text))
    overrides = shlex.split(str(run_config.get("overrides", "")))
    for key, name in (("method", "method.name"), ("target", "run.target"), ("output", "run.output")):
        if run_config.get(key):
            overrides.append(f"{name}={run_config[key]}")
    if int(run_config.get("seed", -1)) >= 0:
        overrides.append(f"run.seed={run_config['seed']}")
    return complete(read_experiment(text, overrides))


def complete(experiment: Experiment) -> Experiment:
    """The experiment with its target filled in (the last domain by default) and checked."""
    found = benchmark(experiment.data)
    domains = found.domains
    target = resolve_domain(found, experiment.run.target) if experiment.run.target else domains[-1]
    if len(domains) < 2:
        raise UserError(f"{experiment.data.dataset} has one domain only ({domains[0]}); leave-one-domain-out needs two")
    return experiment if experiment.run.target == target else experiment.replace(run={"target": target})


def serve(grid: Grid, experiment: Experiment, callbacks: Sequence[RunCallback] = ()) -> Path:
    """Run (or resume) one experiment over a grid of clients; returns the run's folder."""
    folder = run_folder(experiment)
    if is_finished(folder):
        return folder
    everyone = [*callbacks, *trackers(experiment.run)]
    set_threads(experiment.run.threads)
    space = Workspace(experiment)
    try:
        with claim(folder):
            return folder if is_finished(folder) else _serve(grid, experiment, space, everyone)
    except BaseException as error:
        tell_failure(everyone, error)
        raise


def _serve(grid: Grid, experiment: Experiment, space: Workspace, callbacks: Sequence[RunCallback]) -> Path:
    session = Session(experiment, space, callbacks)
    settings, folder = experiment.toml(), session.folder
    run_config = {
        "experiment": settings,
        "state-dir": str((folder / "state").resolve()),
        "token": hashlib.sha256(f"{settings}{folder.resolve()}".encode()).hexdigest()[:16],
    }
    strategy = FedDG(space.recipe, experiment, space.places, run_config)
    session.attach(strategy)
    classes = len(benchmark(experiment.data).classes)
    strategy.sites = handshake(grid, source_clients(experiment), classes, run_config, experiment.run.timeout)
    arrays = session.initial_arrays()
    if not session.checkpoint:
        arrays = strategy.before_rounds(grid, arrays)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    rounds = experiment.train.rounds - strategy.finished_rounds
    if rounds:
        strategy.start(
            grid, arrays, num_rounds=rounds, timeout=experiment.run.timeout, evaluate_fn=session.end_of_round
        )
    return session.finish()


class LogLines:
    """One log line per round, for runs without a terminal of their own."""

    def on_start(self, experiment: Experiment, folder: Path) -> None:
        """Says where the records go."""
        print(
            f"{experiment.method_name} on {experiment.data.dataset}, target {experiment.run.target}, "
            f"seed {experiment.run.seed}: records in {folder}",
            flush=True,
        )

    def on_round(self, row: dict, clients: list[dict]) -> None:
        """Round, validation and target accuracy."""
        validation = row["mean_validation_accuracy"]
        text = "" if validation is None else f"  validation {100 * validation:.1f} %"
        print(f"round {row['round']}:{text}  target {100 * row['target_accuracy']:.1f} %", flush=True)

    def on_end(self, summary: dict) -> None:
        """The headline."""
        print(
            f"done: {100 * summary['best_validation_target_accuracy']:.1f} % on {summary['target']} "
            f"(round {summary['best_validation_round']}, best source validation)",
            flush=True,
        )
