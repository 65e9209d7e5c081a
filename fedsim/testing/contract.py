"""The properties that every method must have, checked on a small federation: `fedsim check-method mymethods:moon`.

The federation has four rotations of real digits of 16 pixels, the small CNN with batch norm, and three rounds. All
properties are checked on six runs. One is unbroken, one is killed and finished in another process, and one has its
first round in a process for each client. One has failures and malformed replies, and one is on another device. From the
last one, which is FedAvg's, the method must differ.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tomli_w
from safetensors.numpy import load_file

from fedsim.common.errors import UserError
from fedsim.common.user_code import place_of_error
from fedsim.methods.assembly import assemble
from fedsim.records.callbacks import RunCallback
from fedsim.runs.plan import Plan, resolve
from fedsim.runs.serve import serve
from fedsim.runs.traffic import reply_heads
from fedsim.runs.workspace import close_workspaces, open_workspace
from fedsim.runtime.watched import WatchedGrid, lonely_grid, replies, trouble
from fedsim.settings.experiment import parse_experiment
from fedsim.settings.plugins import is_outside
from fedsim.tensors.arrays import record_to_arrays
from fedsim.tensors.records import arrays_of, config_of, metrics_of
from fedsim.testing.other_device import other_device

SMALL = {
    "name": "contract",
    "data": {
        "dataset": "digits",
        "domains": ["rot0", "rot15", "rot30", "rot45"],
        "fraction": 0.08,
        "split": "stratified",
        "holdout": 0.2,
        "image_size": 16,
        "normalize": "mnist",
    },
    "train": {"rounds": 3, "batch_size": 16, "lr": 0.05, "momentum": 0.5},
    # Parts that would take minutes here, because their work does not depend on [train], or that need larger images.
    "parts": {
        "balanced_budget": {"budget": 64},
        "semantic_calibration": {"acquire_iterations": 3},
        "adversarial_reference": {"d_noise": 16, "width": 32, "r": 16, "hidden": 16},
        "jigsaw": {"border": "keep"},  # images of 15 pixels are too small for the network
    },
    "run": {"target": "rot45", "threads": 1, "device": "cpu"},
}
FAILED_ROUND = 2
VARIABLES = ("FEDSIM_PLUGINS", "FEDSIM_CACHE", "FEDSIM_DATA")


@dataclass(frozen=True)
class Evidence:
    """A finished run: its records without times, its last tensors, and the messages with their replies."""

    plan: Plan
    rounds: pd.DataFrame
    clients: pd.DataFrame
    last: dict[str, np.ndarray]
    messages: list[tuple[Any, Any]]
    overrides: tuple[str, ...] = ()

    def training(self) -> Iterator[tuple[Any, Any, Any]]:
        """Yields (config, sent records, returned records) of every reply to a message that asked for training."""
        for message, reply in self.messages:
            config = config_of(message.content)
            is_training = message.metadata.message_type == "train" and config["phase"] == "train"
            if is_training and not reply.has_error():
                yield config, message.content, reply.content

    @functools.cached_property
    def interrupted(self) -> tuple[Plan, list[tuple[Any, Any]]]:
        """(plan, messages) of the same run with a process for each client, killed after its first round."""
        output = f"{self.plan.experiment.run.output}/interrupted"
        experiment = self.plan.experiment.replace(run={"output": output})
        plan = resolve(experiment)
        with contextlib.closing(lonely_grid(plan)) as grid, contextlib.suppress(KeyboardInterrupt):
            serve(grid, plan, [_Killed(), grid])
        close_workspaces()
        return plan, grid.seen


def run_watched(
    plan: Plan,
    *callbacks: RunCallback,
    tamper: Callable | None = None,
    overrides: tuple[str, ...] = (),
) -> Evidence:
    """Runs a plan inline to its end, and returns its records, its last tensors and its messages."""
    grid = WatchedGrid(len(plan.clients), tamper)
    folder = serve(grid, plan, callbacks)
    return Evidence(
        plan=plan,
        rounds=_without_times(folder / "rounds.csv"),
        clients=_without_times(folder / "clients.csv"),
        last=load_file(folder / "last.safetensors"),
        messages=grid.seen,
        overrides=overrides,
    )


def small_plan(method: str, output: Path | str, overrides: Sequence[str] = ()) -> Plan:
    """The plan of a method on the small federation; UserError for a method that does not fit."""
    table = tomli_w.dumps({**SMALL, "method": {"name": method}})
    settings = [
        *assemble({"name": method}, {}).tried_with,
        *overrides,
        f"run.output={json.dumps(str(output))}",
    ]
    return resolve(parse_experiment(table, settings))


def _without_times(file: Path) -> pd.DataFrame:
    """The records of a CSV file without its columns of seconds."""
    table = pd.read_csv(file)
    return table[[column for column in table if "seconds" not in column]]


# --- properties: each function returns why the property does not hold, or an empty string -------------------------


def trains(evidence: Evidence) -> str:
    """Losses are finite in every round, and more than half of the tensors change"""
    recorded = list(evidence.rounds["round"])
    rounds = evidence.plan.experiment.train.rounds
    if recorded != list(range(rounds + 1)):
        return f"rounds.csv has the rounds {recorded}"
    losses = evidence.rounds["train_loss"].iloc[1:]
    if not np.isfinite(losses).all():
        return f"the training loss is {list(losses)}"
    net = evidence.plan.build_net()
    initial = net.state_dict()
    # Frozen parameters are not among the last tensors.
    learned = [name for name, _ in net.named_parameters() if name in evidence.last]
    moved = [name for name in learned if not np.array_equal(evidence.last[name], initial[name].numpy())]
    if len(moved) > len(learned) / 2:
        return ""
    return f"{len(moved)} of {len(learned)} tensors moved: {moved[:3]}"


def differs_from_fedavg(evidence: Evidence) -> str:
    """It differs from FedAvg in a tensor, in a message, in its predictions or in its records"""
    settings = (*evidence.plan.recipe.tried_with, *evidence.overrides)
    plain = _fedavg(settings)
    if evidence.last.keys() != plain.last.keys():
        return ""
    for name, array in evidence.last.items():
        if not np.array_equal(array, plain.last[name]):
            return ""
    is_equal = evidence.rounds.equals(plain.rounds) and evidence.clients.equals(plain.clients)
    if is_equal and _exchanges(evidence) == _exchanges(plain):
        return "all tensors, messages and records are FedAvg's: the method does nothing here"
    recipe = evidence.plan.recipe
    terms = [name for name, part in recipe.named.items() if part in recipe.terms]
    if not terms:
        return ""
    return (
        f"{', '.join(terms)} adds a value without a gradient: all tensors are FedAvg's, and only the reported loss can "
        "differ; look for `.detach()`, `.item()`, `float(...)` and `torch.no_grad()`"
    )


def shares_what_it_says(evidence: Evidence) -> str:
    """Clients get and return the tensors of the share rule, and none learns the name of the unseen domain"""
    space = open_workspace(evidence.plan)
    down = {name for name, place in space.places.items() if place == "shared"}
    up = set(reply_heads(space))
    experiment = evidence.plan.experiment
    count = 0
    for config, message, reply in evidence.training():
        count += 1
        sent = set(arrays_of(message)["arrays"])
        if sent != down:
            return f"sent {sorted(sent ^ down)[:3]} against the share rule"
        returned = set(record_to_arrays(arrays_of(reply)["arrays"]))
        if returned != up:
            return f"returned {sorted(returned ^ up)[:3]} against the share rule"
        if config["client"] == experiment.run.target:
            return "the unseen domain was asked to train"
    expected = experiment.train.rounds * len(evidence.plan.clients)
    if count != expected:
        return f"{count} replies to train messages, expected {expected}"
    return ""


def resumes_elsewhere(evidence: Evidence) -> str:
    """When it is killed after the first round and finished by another process, records and model are the same"""
    plan, _ = evidence.interrupted
    _finish_elsewhere(plan)
    for name, table in {"rounds": evidence.rounds, "clients": evidence.clients}.items():
        resumed = _without_times(plan.folder / f"{name}.csv")
        if not resumed.equals(table):
            return f"{name}.csv of the two processes differs from that of one"
    last = load_file(plan.folder / "last.safetensors")
    different = []
    for name, array in evidence.last.items():
        if not np.array_equal(last[name], array, equal_nan=True):
            different.append(name)
    if different:
        return f"tensors of the two processes differ from those of one: {different[:3]}"
    return ""


def replies_alone(evidence: Evidence) -> str:
    """A client's reply depends on its message and its store alone: a process of its own gives the same one"""
    replies_of_run = replies(evidence.messages)
    _, messages = evidence.interrupted
    for key, alone in replies(messages).items():
        together = replies_of_run[key]
        for name in sorted(alone.keys() | together.keys()):
            if alone.get(name) != together.get(name):
                return f"{key}: {name} is another in a process of its own; is something kept in a variable?"
    return ""


def survives(evidence: Evidence) -> str:
    """With four of six clients per round, one that fails and a malformed record for each bank, the model is finite"""
    changes = [
        *evidence.overrides,
        "data.clients_per_domain=2",
        "train.clients_per_round=4",
        "run.on_client_failure=continue",
    ]
    banks = list(evidence.plan.recipe.contributors())
    with tempfile.TemporaryDirectory() as output:
        plan = small_plan(evidence.plan.experiment.method_name, output, changes)
        rough = run_watched(plan, tamper=trouble(set(banks), FAILED_ROUND))
    failed = rough.clients[rough.clients["status"] != "ok"]
    if not (failed["round"] == FAILED_ROUND).any():
        return f"the client that failed in round {FAILED_ROUND} is not recorded"
    for bank in banks:
        if not failed["status"].str.contains(bank, regex=False).any():
            return f"a malformed record of the bank {bank!r} was accepted"
    for array in rough.last.values():
        if not np.isfinite(array).all():
            return "the last model is not finite"
    if len(rough.rounds) != plan.experiment.train.rounds + 1:
        return f"it stopped after round {rough.rounds['round'].max()}"
    return ""


def stays_on_one_device(evidence: Evidence) -> str:
    """On another device than the CPU it trains, too: every tensor of a step is there"""
    with tempfile.TemporaryDirectory() as output, other_device():
        experiment = evidence.plan.experiment.replace(run={"output": output}, train={"rounds": 1})
        run_watched(resolve(experiment))
    return ""


def reads_like_a_row(evidence: Evidence) -> str:
    """Its parts are equal to a copy of themselves and print their settings; it says what its clients disclose"""
    recipe = evidence.plan.recipe
    copy = resolve(evidence.plan.experiment).recipe
    if "object at" in repr(recipe) or recipe != copy:
        return "a part is not a frozen dataclass of plain fields"
    if not recipe.disclosure():
        return "Recipe(discloses=...) is empty"
    if recipe.paper or is_outside(evidence.plan.experiment.method_name):
        return ""
    return "a row of fedsim names its paper: Recipe(paper=...)"


PROPERTIES = (
    trains,
    differs_from_fedavg,
    shares_what_it_says,
    resumes_elsewhere,
    replies_alone,
    survives,
    stays_on_one_device,
    reads_like_a_row,
)


def findings(method: str, overrides: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Yields (text of a property, why it does not hold or an empty string) for one property after the other.

    overrides: `key=value` settings that the method needs, such as "train.momentum=0"
    The difference from FedAvg is left out where FedAvg is refused (`without_fedavg`).

    Raises UserError for a method that does not exist. When the method's own code raises an exception, the exception is
    the reason why the property does not hold. Where the method's run does not end, the first property is the only one.
    """
    with tempfile.TemporaryDirectory() as output:
        plan = small_plan(method, output, overrides)
        try:
            evidence = run_watched(plan, overrides=tuple(overrides))
        except Exception as error:
            if not (plan.folder / "rounds.csv").is_file():  # it is refused before it begins
                raise
            yield str(trains.__doc__), f"{_reason(error)}; the other properties need a run that ends"
            return
        for check in PROPERTIES:
            if check is differs_from_fedavg and not _is_compared(method, overrides):
                continue
            try:
                reason = check(evidence)
            except Exception as error:
                reason = _reason(error)
            yield str(check.__doc__), reason


def _reason(error: Exception) -> str:
    """An error in one line: the text of one that a user understands; else its class, its last line and its place."""
    if isinstance(error, UserError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    place = place_of_error(error)
    return f"{type(error).__name__}: {lines[-1]}{f' ({place})' if place else ''}"


def _is_compared(method: str, overrides: Sequence[str]) -> bool:
    """Whether there is a run of FedAvg from which the method can differ."""
    return method != "fedavg" and not without_fedavg(method, overrides)


def without_fedavg(method: str, overrides: Sequence[str] = ()) -> str:
    """Says why FedAvg is refused with the settings of the method, which then cannot be compared with it.

    The text is empty where FedAvg is not refused.
    """
    settings = (*assemble({"name": method}, {}).tried_with, *overrides)
    try:
        small_plan("fedavg", "unused", _common(settings)).build_net()
    except UserError as error:
        return str(error)
    return ""


# --- what the properties use --------------------------------------------------------------------------------------


@functools.cache
def _fedavg(overrides: tuple[str, ...]) -> Evidence:
    """The run of FedAvg with the same settings, except those of the method's own parts."""
    with tempfile.TemporaryDirectory() as output:
        plan = small_plan("fedavg", output, _common(overrides))
        return run_watched(plan)


def _common(overrides: Sequence[str]) -> list[str]:
    """The settings that are not those of the method's own parts."""
    return [text for text in overrides if not text.startswith("method.")]


def _exchanges(evidence: Evidence) -> list[tuple]:
    """(client, records of the message, records of the reply, names of its metrics) of every training exchange."""
    exchanges = []
    for config, sent, returned in evidence.training():
        metrics = sorted(metrics_of(returned)["metrics"])
        exchanges.append((config["client"], _records(sent), _records(returned), metrics))
    return exchanges


def _records(content: Any) -> list[tuple[str, ...]]:
    """The name of each record of a message, followed by those of its tensors, in alphabetical order."""
    return sorted((name, *record) for name, record in arrays_of(content).items())


class _Killed(RunCallback):
    """Callback that ends a run after its first round, as if it was killed."""

    def on_round(self, row: dict, clients: list[dict]) -> None:
        """Raises KeyboardInterrupt after round 1."""
        if row["round"] == 1:
            raise KeyboardInterrupt


def _finish_elsewhere(plan: Plan) -> None:
    """Finishes a run in a new process; RuntimeError when that process fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # so that new processes need not import everything again
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    arguments = (plan.experiment.toml(), variables, sys.path, str(Path.cwd()))
    process = context.Process(target=_finish, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the second process ended with exit code {process.exitcode}")


def _finish(settings: str, variables: dict[str, str], path: list[str], folder: str) -> None:
    """Finishes the run of these settings, with the variables, the import path and the working folder of the caller."""
    os.chdir(folder)
    os.environ.update(variables)
    sys.path[:] = path
    run_watched(resolve(parse_experiment(settings)))
