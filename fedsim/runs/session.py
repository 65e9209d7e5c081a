"""One run's folder on the server: opens or resumes it, writes the records, selects the best round, saves checkpoints.

The round itself has evaluated the unseen domain; only a domain that is held out to select the round is evaluated here.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord
from safetensors.numpy import load_file

from fedsim.common.errors import ClaimedError
from fedsim.common.tasks import BY_METRIC
from fedsim.common.values import Json, Row
from fedsim.data import domain_of
from fedsim.data.fingerprint import Fingerprints
from fedsim.data.scaling import scale_rule
from fedsim.data.tensor_records import recorded_scale, scale_record, tensor_record
from fedsim.methods.registry import packages_of
from fedsim.methods.variants import recipe_record
from fedsim.records.callbacks import RunCallback
from fedsim.records.client_rows import client_rows, detail_rows
from fedsim.records.environment import earlier_environments, environment, read_environment, versions_so_far
from fedsim.records.predictions import forget_after, keep_selected, selected_rounds, too_many
from fedsim.records.record_files import read_columns, read_record
from fedsim.records.recorder import Recorder
from fedsim.records.selection import (
    DEFAULT_RULE,
    is_better,
    last_is_best,
    primary_column,
    rounds_since_best,
    summary_row,
    validation_column,
)
from fedsim.runs import admission
from fedsim.runs.checkpoint import FOLDER, Checkpoint, arrays_file, link_file, save_checkpoint, write_arrays
from fedsim.runs.doubt import doubt_columns
from fedsim.runs.frozen import weights_record
from fedsim.runs.kept_tensors import keep_entries, personal_entries, take_over_best, write_personal
from fedsim.runs.leftovers import end_run
from fedsim.runs.local_models import LocalModels
from fedsim.runs.longer import reopen
from fedsim.runs.notes import VALIDATIONS, undefined_validations
from fedsim.runs.origin import Origin, earlier_origins, metadata_of, own_origin
from fedsim.runs.privacy_account import count_round, last_round, refuse_budget, repeated_rounds, spent, statement
from fedsim.runs.round_rows import refuse_unmade, round_row, score_of
from fedsim.runs.workspace import device_record
from fedsim.settings.plugins import outside_versions
from fedsim.tensors.arrays import record_to_arrays, state_to_record
from strategies.base import FedDG
from strategies.parts import Arrays, Entries
from strategies.round import RoundResult
from strategies.state import ServerState
from strategies.wire.target_site import TargetScore

logger = logging.getLogger("fedsim")

WRITE_SECONDS = 1.0  # the records of rounds that take less wait so long in memory

Evaluate = Callable[[ArrayRecord], TargetScore]


@dataclass(frozen=True)
class BestModel:
    """The best model since the last checkpoint: its round, its tensors, and the entries that its inference needs."""

    round: int
    values: Arrays
    entries: Entries


@dataclass
class Unwritten:
    """What the rounds since the last writing have made: the best model, and the predictions by round.

    since: the time of that writing, by `time.monotonic`
    """

    since: float = -math.inf
    best: BestModel | None = None
    predictions: dict[int, Any] = field(default_factory=dict)


class Session:
    """Opens or resumes a run's folder. After each round it records and selects, and it saves checkpoints.

    What rounds of less than a second have made waits in memory. A kill loses only rounds after the last checkpoint,
    which the same command computes again.

    check: raises an error when the folder is no longer this process's, so that nothing more is written
    """

    def __init__(self, space: admission.Space, callbacks: Sequence[RunCallback], check: Callable[[], None]) -> None:
        self.space, self.experiment, self.callbacks, self._check = space, space.experiment, callbacks, check
        self.folder = space.plan.folder
        self.checkpoint_folder = self.folder / FOLDER
        self.validation = validation_column(space.experiment, space.task.metric)
        admitted = admission.check_run(space)
        self.data, self.server_data = admitted.data, admitted.server_data
        self.shared, self.checkpoint = admitted.shared, admitted.checkpoint
        self.origins_before = earlier_origins(space.experiment, space.recipe)
        self.findings = admitted.findings
        self.recorder = Recorder(self.folder, space.task.metric)
        done = self.checkpoint.round if self.checkpoint else -1
        self.scale = recorded_scale(read_environment(self.folder)) if self.checkpoint else None
        self.sites_before = read_environment(self.folder).get("sites", {}) if self.checkpoint else {}
        self._resume(done)
        self._record(done)
        self.evaluate_held_out: Evaluate | None = None
        self.local_models: LocalModels | None = None
        self._strategy: FedDG | None = None
        self.target_images: int | None = None  # that are tested
        self._round_ended = time.perf_counter()
        self._unwritten = Unwritten()

    @property
    def strategy(self) -> FedDG:
        """The strategy that was attached."""
        assert self._strategy is not None
        return self._strategy

    def _resume(self, done: int) -> None:
        """Take up the rounds until `done`, and remove what is recorded of later ones, which are computed again."""
        self.recorder.require(done)
        self.recorder.truncate(done)
        forget_after(self.folder, done)
        take_over_best(self.folder, self.checkpoint_folder, done)
        self.scores = self._scores_so_far()  # of the rounds from 1 on
        self._best_score = max((score for score in self.scores if not math.isnan(score)), default=math.nan)
        self.repeated = repeated_rounds(self.checkpoint_folder, self.space.recipe, done)
        account = self.experiment, self.space.recipe, len(self.space.plan.clients), self.repeated
        if not self.scores:
            refuse_budget(*account)
        self.last_round = last_round(*account)
        self.counts_rounds = False  # of a private run, whose guarantee is weaker with every round that is repeated

    def _record(self, done: int) -> None:
        """Write the settings, and the environment of the rounds after `done`."""
        space, experiment, server_data = self.space, self.experiment, self.server_data
        now = environment() | {"device": device_record(space.device), "threads": torch.get_num_threads()}
        now["packages"] = {**now["packages"], **outside_versions(packages_of(experiment))}
        for name in ("on_client_failure", "update_limit", "examples_limit"):  # they may be changed for later rounds
            now[name] = getattr(experiment.run, name)
        if experiment.run.attackers:
            now["attackers"] = dict(experiment.run.attackers)
        now |= earlier_environments(read_environment(self.folder), now, done)
        now |= {"domains": list(space.plan.data.domains), "classes": list(space.plan.data.classes)}
        now |= tensor_record(space.plan.data) | scale_record(self.scale)
        now |= recipe_record(experiment, space.recipe) | ({"server_data": server_data} if server_data else {})
        self.environment = now | space.frozen_record() | weights_record(experiment.model.weights)
        self._write_environment()
        reopen(self.folder)
        self.recorder.write_experiment(experiment.toml())  # last: a folder with settings is a run's, with its format

    def attach(self, strategy: FedDG, evaluate_held_out: Evaluate | None = None) -> None:
        """Connect this session with a strategy; a resumed strategy gets its banks, states and finished rounds back.

        `evaluate_held_out` measures the model on `run.validation_domain`, where there is one.
        """
        self._strategy, self.evaluate_held_out = strategy, evaluate_held_out
        space, server = self.space, strategy.server
        strategy.sinks.append(self)
        strategy.is_over = self.is_over
        server.storage.folder = self.folder
        server.parts.model = space.server_model()
        if self.checkpoint:
            strategy.resume(self.checkpoint.round, self.checkpoint.state)
        for callback in self.callbacks:
            callback.on_start(self.experiment, self.folder)
        if guarantee := statement(self.experiment, space.recipe, len(space.plan.clients), self.repeated):
            logger.info(guarantee)
            self.counts_rounds = True
            self.note("privacy", guarantee)

    def is_over(self) -> bool:
        """Whether the last round was played, or `train.stop_after` rounds have brought no better validation.

        The last round is that of `train.rounds`, or the last one within the budget `train.dp_max_epsilon`.
        """
        train, number = self.experiment.train, len(self.scores)
        if number >= self.last_round:
            return True
        is_validated = number % train.evaluate_every == 0
        return bool(train.stop_after) and is_validated and rounds_since_best(self.scores) >= train.stop_after

    def note_data(self, own: Fingerprints) -> None:
        """Check and record the fingerprints that sites sent, by client."""
        if own:
            admission.check_sent_data(self.space.plan, self.checkpoint, self.data | own)
            self.data |= own
            self._write_environment()

    def note_versions(self, sites: Mapping[str, Mapping[str, str]]) -> None:
        """Records the versions of packages by site, with those of the run's earlier parts."""
        self.note("sites", versions_so_far(self.environment.get("sites", self.sites_before), sites))

    def note(self, name: str, value: Json) -> None:
        """Record a fact of this run besides its environment, if there is anything to say."""
        if value:
            self.environment |= {name: value}
            self._write_environment()

    def _write_environment(self) -> None:
        self.recorder.write_environment(self.environment | {"data": self.data})

    def initial_arrays(self) -> ArrayRecord:
        """The checkpoint's global model, or the initial one from the run's seed."""
        if self.checkpoint:
            return state_to_record(self.checkpoint.arrays)
        return self.space.initial_arrays()

    def begin_round(self, number: int) -> None:
        """Counts a round that begins now, if this run counts them; 0: the prelude, if there is one."""
        if self.counts_rounds and (number or self.space.recipe.prelude):
            count_round(self.checkpoint_folder)

    def end_round(self, result: RoundResult) -> None:
        """Takes up the records of a round, and its model if it is the best one so far; writes them when it is time."""
        number, target, rows = result.number, self.experiment.run.target, result.notes.clients
        if self.local_models and self.local_models.is_measured(number):
            self.local_models.fused(record_to_arrays(result.model))
        metric = self.space.task.metric
        row = round_row(result.notes, result.target, self.experiment, metric, self._round_ended)
        row |= self._held_out(result.model, row["evaluation_seconds"])
        details = [*result.notes.details, *_target_details(target, result.target)]
        grouping = self.experiment.run.client_rows
        details = detail_rows(details, len(rows), domain_of, grouping)
        clients = [{"round": number, "domain": domain_of(name), **columns} for name, columns in rows.items()]
        clients = client_rows(clients, grouping)
        self.recorder.add(row, clients, [{"round": number, **detail} for detail in details])
        if number:
            self._select(result, row)
        self._write_in_time(number, result.model)
        self._say_undefined(rows)
        for callback in self.callbacks:
            callback.on_round(row, clients)

    def _select(self, result: RoundResult, row: Row) -> None:
        """Notes a round's score, its predictions, and its model if the score is a strict improvement."""
        score = score_of(row, self.validation)
        self.scores.append(score)
        if result.target.predictions is not None:
            self._unwritten.predictions[result.number] = result.target.predictions
        if is_better(score, self._best_score):
            self._best_score = score
            values = record_to_arrays(result.model)
            self._unwritten.best = BestModel(result.number, values, self._entries(self.strategy.server.state))

    def _write_in_time(self, number: int, model: ArrayRecord) -> None:
        """Writes what waits, with a checkpoint or without, if it is time for it or the run is over."""
        every = self.experiment.run.checkpoint_every or (1 if self._must_not_repeat() else 0)
        is_time = number <= 1 or time.monotonic() - self._unwritten.since >= WRITE_SECONDS
        saves = number % every == 0 if every else is_time
        if saves or self.is_over():
            self._write(with_all_predictions=False)
            self._save_checkpoint(number, record_to_arrays(model))
        elif is_time:
            self._write(with_all_predictions=True)
        else:
            return
        self._unwritten.since = time.monotonic()

    def _must_not_repeat(self) -> bool:
        """Whether a round that is computed again costs more than time of this machine."""
        masked = self.space.recipe.fuse.masked
        return self.counts_rounds or masked or self.experiment.run.runtime == "deployment"

    def _write(self, with_all_predictions: bool) -> None:
        """Writes the rows that wait, and their predictions: all, or those of rounds that a rule selects now.

        Only a checkpoint makes the others useless: until then a resumed run may select an earlier round again.
        """
        self._check()
        self.recorder.flush()
        predictions = self._unwritten.predictions
        chosen = set(predictions)
        if len(chosen) > 1 and not with_all_predictions:
            chosen &= selected_rounds(read_columns(self.folder / "rounds.csv"), self.validation)
        for number in sorted(chosen):
            predictions[number].write(self.folder, number)
        predictions.clear()

    def write_rows(self) -> None:
        """Writes the rows that wait, of a run that ends before its last round, as far as this is possible."""
        with contextlib.suppress(ClaimedError, OSError):
            self._check()
            self.recorder.flush()

    def _say_undefined(self, rows: Mapping[str, Row]) -> None:
        """Says once, and records, on whose validation examples the primary metric is not defined."""
        task = BY_METRIC[self.space.task.metric]
        noted = self.environment.get("undefined", {})
        if task.can_be_undefined and VALIDATIONS not in noted:
            line = undefined_validations(rows.items(), task.metric, task.title)
            if line:
                self.note("undefined", {**noted, VALIDATIONS: line})
                logger.warning(line)

    def _held_out(self, model: ArrayRecord, seconds: float) -> Row:
        """The columns of a round on `run.validation_domain`; empty without one. seconds: of all other evaluations."""
        if self.evaluate_held_out is None:
            return {}
        score = self.evaluate_held_out(model)
        columns: Row = {"evaluation_seconds": seconds + score.seconds}
        columns[primary_column(self.experiment, self.space.task.metric)] = score.value
        if self.experiment.run.select_by == "loss":
            columns[self.validation] = score.loss
        return columns

    def finish(self) -> None:
        """Writes the last model and the summary (which marks the run as finished); removes files that only resuming
        needs."""
        self._check()
        rounds = read_columns(self.folder / "rounds.csv")
        refuse_unmade(self.folder, rounds)
        self._say_stopped()
        last = self.strategy.finished_rounds
        link_file(arrays_file(self.checkpoint_folder, last), self.folder / "last.safetensors")
        self._keep_entries("last", self._entries(self.strategy.server.state))
        if self.experiment.run.keep_personal:
            entries = personal_entries(self.space.recipe, self.space.places)
            model, stored = load_file(self.folder / "last.safetensors"), self.strategy.server.state.stored
            write_personal(self.folder, self.space.plan.clients, entries, model, stored, self._metadata_of_client)
        recipe = self.space.recipe
        summary = summary_row(
            self.experiment,
            rounds,
            self._label(),
            recipe.infer.transductive or scale_rule(self.experiment.data, self.space.plan.data) == "site",
            uses_target_unlabelled=recipe.uses_target_unlabelled,
            pooled=recipe.pooled,
            target_images=self.target_images,
        )
        keep_selected(self.folder, rounds, self.validation)
        summary |= doubt_columns(self.folder, summary[f"{DEFAULT_RULE}_round"])
        self.recorder.write_summary(summary)
        end_run(self.folder, self.experiment)
        for callback in self.callbacks:
            callback.on_end(summary)

    def _label(self) -> str:
        """The name of the method in results, with what the run changes in its row."""
        label = self.space.recipe.label(self.experiment.method_name)
        changes = self.space.plan.changes
        return f"{label}@{changes}" if changes else label

    def _say_stopped(self) -> None:
        """Says and records that the run has ended before `train.rounds`, and after which round."""
        last, train = len(self.scores), self.experiment.train
        if last >= train.rounds:
            return
        best = last - rounds_since_best(self.scores)
        stopped: dict[str, Json] = {"after_round": last, "best_round": best, "of_rounds": train.rounds}
        reason = f"none since round {best} has a better validation (train.stop_after = {train.stop_after})"
        account = self.experiment, self.space.recipe, len(self.space.plan.clients)
        if self.counts_rounds:
            self.note("privacy", statement(*account, self.repeated, played=last))
        cost = spent(*account, last, self.repeated)
        if last >= self.last_round and cost:
            stopped["epsilon"] = cost.epsilon
            reason = (
                f"epsilon is {cost.epsilon:.4g} at delta {cost.delta:g}, and what follows would exceed the budget "
                f"(train.dp_max_epsilon = {train.dp_max_epsilon:g})"
            )
        self.note("stopped", stopped)
        logger.info("ended after round %d of %d: %s", last, train.rounds, reason)

    @property
    def origins(self) -> list[Origin]:
        """The runs that trained the model: this one, and those of the weights with which it began."""
        return [own_origin(self.experiment, self.data), *self.origins_before]

    def _metadata_of_client(self, client: str) -> dict[str, str]:
        return metadata_of(self.strategy.finished_rounds, self.origins, client=client)

    def _save_checkpoint(self, number: int, values: Arrays) -> None:
        """Saves the checkpoint of a round, and best.safetensors where a round since the last checkpoint is better.

        The model of an earlier round waits in the checkpoint's folder until the checkpoint stands: a run that is killed
        before repeats that round, and may then select another one.
        """
        best, self._unwritten.best = self._unwritten.best, None
        if best and best.round != number:
            write_arrays(
                self.checkpoint_folder / "best.safetensors", best.values, metadata_of(best.round, self.origins)
            )
            self._keep_entries("best", best.entries, self.checkpoint_folder)
        state = Checkpoint(number, dict(values), self.strategy.server.state, self.data | self.server_data)
        self._check()
        saved = save_checkpoint(self.checkpoint_folder, state, self.origins)
        take_over_best(self.folder, self.checkpoint_folder, number)
        self.strategy.server.exchange.saved_round = number
        if too_many(self.folder):
            keep_selected(self.folder, read_columns(self.folder / "rounds.csv"), self.validation)
        if best and best.round == number:
            link_file(saved, self.folder / "best.safetensors")
            self._keep_entries("best", best.entries)

    def _entries(self, state: ServerState) -> Entries:
        """What the inference rule needs of the clients besides a model: the tensors of its bank, by client."""
        bank = state.banks.get(self.space.recipe.infer.bank, {})
        return {client: dict(arrays) for client, arrays in bank.items()}

    def _keep_entries(self, which: str, entries: Entries, folder: Path | None = None) -> None:
        """Saves these entries next to that model (of the run's folder by default)."""
        keep_entries(folder or self.folder, which, self.space.recipe.infer.bank, entries)

    def _scores_so_far(self) -> list[float]:
        """Scores up to the checkpoint.

        If the checkpoint's model is the best, it is kept again: the run may have been killed before the link.
        """
        if not self.checkpoint:
            return []
        rounds = read_record(self.folder / "rounds.csv").query("round >= 1").sort_values("round")
        scores = [score_of(row, self.validation) for row in rounds.to_dict("records")]
        if scores and last_is_best(scores):
            link_file(arrays_file(self.checkpoint_folder, self.checkpoint.round), self.folder / "best.safetensors")
            self._keep_entries("best", self._entries(self.checkpoint.state))
        return scores


def _target_details(target: str, score: TargetScore) -> list[Row]:
    """The rows of details.csv about the unseen domain."""
    details = []
    for quantity, name, value in score.details:
        details.append({"client": target, "quantity": quantity, "name": name, "value": value})
    return details
