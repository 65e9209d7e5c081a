"""The properties that every method must have, checked on a small federation: `fedsim check-method mymethods:moon`.

The federation has four rotations of real digits of 16 pixels, the small CNN with batch norm, and three
rounds. All properties are checked on six runs. One is whole, one is killed and finished in another process, and one has
its first round in a process for each client. One has failures and malformed replies, and one is on another device. From
the last one, which is FedAvg's, the method must differ.
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
        "dataset": "digits", "domains": ["rot0", "rot15", "rot30", "rot45"], "fraction": 0.08, "split": "stratified",
        "holdout": 0.2, "image_size": 16, "normalize": "mnist",
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
}  # fmt: skip
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
        """(config, sent records, returned records) of every reply to a message that asked for training in a round."""
        for message, reply in self.messages:
            config = config_of(message.content)
            if message.metadata.message_type == "train" and config["phase"] == "train" and not reply.has_error():
                yield config, message.content, reply.content

    @functools.cached_property
    def interrupted(self) -> tuple[Plan, list[tuple[Any, Any]]]:
        """(plan, messages) of the same run with a process for each client, killed after its first round."""
        output = f"{self.plan.experiment.run.output}/interrupted"
        plan = resolve(self.plan.experiment.replace(run={"output": output}))
        with contextlib.closing(lonely_grid(plan)) as grid, contextlib.suppress(KeyboardInterrupt):
            serve(grid, plan, [_Killed(), grid])
        close_workspaces()
        return plan, grid.seen


def run_watched(
    plan: Plan, *callbacks: RunCallback, tamper: Callable | None = None, overrides: tuple[str, ...] = ()
) -> Evidence:
    """Runs a plan inline to its end."""
    grid = WatchedGrid(len(plan.clients), tamper)
    folder = serve(grid, plan, callbacks)
    rounds, clients = (_numbers(folder / f"{name}.csv") for name in ("rounds", "clients"))
    return Evidence(plan, rounds, clients, load_file(folder / "last.safetensors"), grid.seen, overrides)


def small_plan(method: str, output: Path | str, overrides: Sequence[str] = ()) -> Plan:
    """The plan of a method on the small federation; UserError for a method that does not fit."""
    table = tomli_w.dumps({**SMALL, "method": {"name": method}})
    settings = assemble({"name": method}, {}).tried_with
    return resolve(parse_experiment(table, [*settings, *overrides, f"run.output={json.dumps(str(output))}"]))


def _numbers(file: Path) -> pd.DataFrame:
    table = pd.read_csv(file)
    return table[[column for column in table if "seconds" not in column]]


# --- properties: each function returns why the property does not hold, or an empty string -------------------------


def trains(whole: Evidence) -> str:
    """Losses are finite in every round, and more than half of the tensors change"""
    if list(whole.rounds["round"]) != list(range(whole.plan.experiment.train.rounds + 1)):
        return f"rounds.csv has the rounds {list(whole.rounds['round'])}"
    if not np.isfinite(whole.rounds["train_loss"].iloc[1:]).all():
        return f"the training loss is {list(whole.rounds['train_loss'].iloc[1:])}"
    initial = whole.plan.build_net().state_dict()
    # Frozen parameters are not among the last tensors.
    learned = {name for name, _ in whole.plan.build_net().named_parameters()} & whole.last.keys()
    moved = [name for name in learned if not np.array_equal(whole.last[name], initial[name].numpy())]
    return "" if len(moved) > len(learned) / 2 else f"{len(moved)} of {len(learned)} tensors moved: {moved[:3]}"


def differs_from_fedavg(whole: Evidence) -> str:
    """It differs from FedAvg in a tensor, in a message, in its predictions or in its records"""
    plain = _fedavg((*whole.plan.recipe.tried_with, *whole.overrides))
    if whole.last.keys() != plain.last.keys():
        return ""
    if any(not np.array_equal(array, plain.last[name]) for name, array in whole.last.items()):
        return ""
    if _wire(whole) != _wire(plain):
        return ""
    same = whole.rounds.equals(plain.rounds) and whole.clients.equals(plain.clients)
    return "all tensors, messages and records are FedAvg's: the method does nothing here" if same else ""


def shares_what_it_says(whole: Evidence) -> str:
    """Clients get and return the tensors of the share rule, and none learns the name of the unseen domain"""
    space = open_workspace(whole.plan)
    down = {name for name, place in space.places.items() if place == "shared"}
    up = set(reply_heads(space))
    count = 0
    for config, sent, returned in whole.training():
        count += 1
        if set(arrays_of(sent)["arrays"]) != down:
            return f"sent {sorted(set(arrays_of(sent)['arrays']) ^ down)[:3]} beside the share rule"
        if set(record_to_arrays(arrays_of(returned)["arrays"])) != up:
            return f"returned {sorted(set(arrays_of(returned)['arrays']) ^ up)[:3]} beside the share rule"
        if config["client"] == whole.plan.experiment.run.target:
            return "the unseen domain was asked to train"
    expected = whole.plan.experiment.train.rounds * len(whole.plan.clients)
    return "" if count == expected else f"{count} replies to train messages, expected {expected}"


def resumes_elsewhere(whole: Evidence) -> str:
    """When it is killed after the first round and finished by another process, records and model are the same"""
    plan, _ = whole.interrupted
    _finish_elsewhere(plan)
    for name, table in (("rounds", whole.rounds), ("clients", whole.clients)):
        if not _numbers(plan.folder / f"{name}.csv").equals(table):
            return f"{name}.csv of the two processes differs from that of one"
    last = load_file(plan.folder / "last.safetensors")
    different = [name for name in whole.last if not np.array_equal(last[name], whole.last[name], equal_nan=True)]
    return f"tensors of the two processes differ from those of one: {different[:3]}" if different else ""


def replies_alone(whole: Evidence) -> str:
    """A client's reply depends on its message and its store alone: a process of its own gives the same one"""
    replies_of_run = replies(whole.messages)
    for key, reply in replies(whole.interrupted[1]).items():
        different = sorted(
            name
            for name in reply.keys() | replies_of_run[key].keys()
            if reply.get(name) != replies_of_run[key].get(name)
        )
        if different:
            return f"{key}: {different[0]} is another in a process of its own; is something kept in a variable?"
    return ""


def survives(whole: Evidence) -> str:
    """With four of six clients per round, one that fails and a malformed record for each bank, the model is finite"""
    changes = ["data.clients_per_domain=2", "train.clients_per_round=4", "run.on_client_failure=continue"]
    changes = [*whole.overrides, *changes]
    banks = list(whole.plan.recipe.contributors())
    with tempfile.TemporaryDirectory() as output:
        plan = small_plan(whole.plan.experiment.method_name, output, changes)
        rough = run_watched(plan, tamper=trouble(set(banks), FAILED_ROUND))
    failed = rough.clients[rough.clients["status"] != "ok"]
    if not (failed["round"] == FAILED_ROUND).any():
        return f"the client that failed in round {FAILED_ROUND} is not recorded"
    for bank in banks:
        if not failed["status"].str.contains(bank, regex=False).any():
            return f"a malformed record of the bank {bank!r} was accepted"
    if not all(np.isfinite(array).all() for array in rough.last.values()):
        return "the last model is not finite"
    whole_run = len(rough.rounds) == plan.experiment.train.rounds + 1
    return "" if whole_run else f"it stopped after round {rough.rounds['round'].max()}"


def stays_on_one_device(whole: Evidence) -> str:
    """On another device than the CPU it trains, too: every tensor of a step is there"""
    with tempfile.TemporaryDirectory() as output, other_device():
        run_watched(resolve(whole.plan.experiment.replace(run={"output": output}, train={"rounds": 1})))
    return ""


def reads_like_a_row(whole: Evidence) -> str:
    """Its parts are equal to a copy of themselves and print their settings; it says what its clients disclose"""
    recipe = whole.plan.recipe
    if "object at" in repr(recipe) or recipe != resolve(whole.plan.experiment).recipe:
        return "a part is not a frozen dataclass of plain fields"
    if not recipe.disclosure():
        return "Recipe(discloses=...) is empty"
    is_own = is_outside(whole.plan.experiment.method_name)
    return "" if recipe.paper or is_own else "a row of fedsim names its paper: Recipe(paper=...)"


PROPERTIES = (
    trains, differs_from_fedavg, shares_what_it_says, resumes_elsewhere, replies_alone, survives, stays_on_one_device,
    reads_like_a_row,
)  # fmt: skip


def findings(method: str, overrides: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """(text of a property, why it does not hold or an empty string) for one property after the other.

    overrides: `key=value` settings that the method needs, such as "train.momentum=0"
    The difference from FedAvg is left out where FedAvg is refused (`without_fedavg`).

    Raises UserError for a method that does not exist. When the method's own code raises an exception, the exception is
    the reason why the property does not hold.
    """
    with tempfile.TemporaryDirectory() as output:
        watched = run_watched(small_plan(method, output, overrides), overrides=tuple(overrides))
        for check in PROPERTIES:
            if check is differs_from_fedavg and (method == "fedavg" or without_fedavg(method, overrides)):
                continue
            try:
                yield str(check.__doc__), check(watched)
            except Exception as error:
                lines = str(error).strip().splitlines()
                yield str(check.__doc__), f"{type(error).__name__}: {lines[-1] if lines else ''}"


def without_fedavg(method: str, overrides: Sequence[str] = ()) -> str:
    """Why FedAvg is refused with the settings of the method, which then cannot be compared with it; empty where it
    is not refused."""
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
        return run_watched(small_plan("fedavg", output, _common(overrides)))


def _common(overrides: Sequence[str]) -> list[str]:
    return [text for text in overrides if not text.startswith("method.")]


def _wire(evidence: Evidence) -> list[tuple]:
    """Record names, tensors and metrics of every training exchange."""
    return [
        (config["client"], *(sorted((name, *record) for name, record in arrays_of(content).items())
                             for content in (sent, returned)), sorted(metrics_of(returned)["metrics"]))
        for config, sent, returned in evidence.training()
    ]  # fmt: skip


class _Killed(RunCallback):
    """Callback that ends a run after its first round, as if it was killed."""

    def on_round(self, row: dict, clients: list[dict]) -> None:
        """Raise after round 1."""
        if row["round"] == 1:
            raise KeyboardInterrupt


def _finish_elsewhere(plan: Plan) -> None:
    """Finish a run in a new process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # so that new processes need not import everything again
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    process = context.Process(target=_finish, args=(plan.experiment.toml(), variables, sys.path, str(Path.cwd())))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the second process ended with exit code {process.exitcode}")


def _finish(settings: str, variables: dict[str, str], path: list[str], folder: str) -> None:
    os.chdir(folder)
    os.environ.update(variables)
    sys.path[:] = path
    run_watched(resolve(parse_experiment(settings)))
