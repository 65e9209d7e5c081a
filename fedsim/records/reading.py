"""Reads runs from disk into pandas: one call returns all records below a folder."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedsim.common.errors import UserError, nearest
from fedsim.common.lists import with_commas
from fedsim.parts.part import named_part
from fedsim.records.archive import folder_of
from fedsim.records.differences import Recipe, by_part, with_recorded_values
from fedsim.records.environment import read_environment
from fedsim.records.readers import AGAIN, named, read_text
from fedsim.records.record_files import is_finished, read_record, trained_rounds
from fedsim.records.selection import RULES, notes_on
from fedsim.settings.experiment import Experiment, parse_experiment
from fedsim.settings.run import NO_TARGET

if TYPE_CHECKING:
    import pandas as pd

TABLES = ("summary", "rounds", "clients", "details")
RUN_SECTION = "\n[run]\n"  # the last one of the resolved settings, which a file that was cut off lacks
KEYS = ["run", "experiment", "method", "target", "seed"]


@dataclass
class Runs:
    """All records below one folder; every frame carries the columns run, experiment, method, target, seed.

    folder: where the records are; source: what was read, which is that folder or the archive that it was taken from
    notes: {run: {kind: text}} on its rounds (`notes_on`).
    damaged: {run: what is wrong with one of its files}, for the runs that cannot be read, so that they are in no table.
    only: `methods fedavg; targets rot0` where these are a part of the folder's runs; else empty.
    """

    summary: "pd.DataFrame"
    rounds: "pd.DataFrame"
    clients: "pd.DataFrame"
    details: "pd.DataFrame"
    experiments: dict[str, Experiment]
    unfinished: list[str] = field(default_factory=list)
    folder: Path = Path()
    notes: dict[str, dict[str, str]] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    only: str = ""
    source: Path = Path()

    @cached_property
    def comparable(self) -> dict[str, Experiment]:
        """The settings by which runs are compared (`with_recorded_values`)."""
        return with_recorded_values(self.experiments, self.recipe_of)

    def recipe_of(self, run: str) -> Recipe:
        """Return the recorded recipe of a run; empty where there is none."""
        return run_environment(self, run).get("recipe", {})

    @cached_property
    def unused_parts(self) -> set[tuple[str, str]]:
        """(method, part) for the parts that [parts] of a run sets, but that are in no recorded recipe of the method."""
        used: dict[str, set[str]] = {}  # {method: the parts of its recorded recipes}
        given: dict[str, None] = {}
        for run, experiment in self.experiments.items():
            given |= dict.fromkeys(experiment.parts)
            if recipe := self.recipe_of(run):
                parts = used.setdefault(experiment.method_name, set())
                parts.update(by_part(recipe))
        unused = set()
        for method, parts in used.items():
            for part in given:
                if named_part(part) not in parts:
                    unused.add((method, part))
        return unused

    def labels(self) -> dict[str, str]:
        """Return the label of every run: of a finished one from its summary, of another one its method."""
        labels = {}
        for run, experiment in self.experiments.items():
            labels[run] = experiment.method_name
        if "label" in self.summary:
            labelled = self.summary.dropna(subset=["label"])
            labels |= dict(zip(labelled["run"], labelled["label"]))
        return labels


def read_runs(folder: Path | str, unfinished: bool = False, only: Sequence[str] = TABLES) -> Runs:
    """Records of all finished runs below `folder` (outputs/, one experiment's, or one run's), or of an archive.

    Frames: summary (a row per run), rounds (run and round), clients (run, round and client), details (run, round,
    client and layer); docs/records.md lists their columns. Accuracies are fractions, sizes bytes, times
    seconds; an empty cell is NaN. `experiments` holds the resolved settings, by the values of the column `run`.

    `unfinished=True` also reads the rounds, clients and details of runs that have no summary yet.
    only: the tables that are read; the others are empty, which saves most of the time with hundreds of runs.
    A run with a file that is cut off, changed or of another format is left out, and `damaged` names the file. Raises
    UserError if there is no such folder, no run in it, or none that can be read.
    """
    source = Path(folder)
    folder = folder_of(source)
    paths = {}
    finished = {}
    for path in find_runs(folder):
        run = _key(path, folder)
        paths[run] = path
        if is_finished(path):
            finished[run] = path
    chosen = paths if unfinished else finished
    if not chosen:
        raise UserError(f"{source}: no finished run; {len(paths)} unfinished; repeat their commands to resume them")
    records, damaged = _read_all(chosen, only)
    if not records:
        raise UserError(_none_readable(source, list(damaged.values())))
    frames = {name: _joined(records, chosen, name) for name in TABLES}
    runs = Runs(
        **frames,
        experiments={run: record.experiment for run, record in records.items()},
        folder=folder,
        source=source,
        notes={run: record.notes for run, record in records.items() if run in finished and "summary" in only},
        damaged={run: text.removeprefix(f"{folder}{os.sep}") for run, text in damaged.items()},
    )
    runs.unfinished = [run for run in paths if run not in finished]
    return runs


class Record(NamedTuple):
    """What is read of one run: its settings, its tables by name, and what is to be said of its rounds."""

    experiment: Experiment
    tables: "dict[str, pd.DataFrame]"
    notes: dict[str, str]


def _read_all(paths: Mapping[str, Path], only: Sequence[str]) -> tuple[dict[str, Record], dict[str, str]]:
    """Return ({run: what is read of it}, {run: why it cannot be read})."""
    records = {}
    damaged = {}
    for run, path in paths.items():
        try:
            records[run] = _read_run(path, only)
        except UserError as error:
            damaged[run] = str(error)
    return records, damaged


def _read_run(path: Path, only: Sequence[str]) -> Record:
    """Return what is read of one run's folder; UserError, which names the file, for one that cannot be read."""
    app = read_environment(path).get("app")
    experiment = _parsed_settings(path / "experiment.toml").of_app(app)
    tables = {name: read_record(path / f"{name}.csv") for name in TABLES if name in only}
    selected = math.nan
    if "summary" in only and is_finished(path):
        if tables["summary"].empty:
            raise UserError(f"{path / 'summary.csv'}: it is empty or cut off; {AGAIN}")
        selected = tables["summary"]["best_validation_round"].iloc[0]
        _require_keys(path / "summary.csv", experiment, tables["summary"])
        _require_rules(path / "summary.csv", tables["summary"])
        _require_rounds(path / "rounds.csv", tables)
    with named(path / "rounds.csv"):
        notes = notes_on(trained_rounds(path), selected)
    return Record(experiment, tables, notes)


def _require_keys(file: Path, experiment: Experiment, summary: "pd.DataFrame") -> None:
    """UserError for a summary whose method, target or seed the settings next to it lack: these are cut off."""
    run = experiment.run
    keys = {"method": (experiment.method_name, "fedavg"), "target": (run.target, ""), "seed": (run.seed, 0)}
    for key, (value, default) in keys.items():
        recorded = summary[key].fillna("").iloc[0]
        if value == default != recorded:
            raise UserError(f"{file}: its {key} is {recorded!r}, and that of experiment.toml {value!r}; {AGAIN}")


def _require_rules(file: Path, summary: "pd.DataFrame") -> None:
    """UserError for a summary that has a metric on the target under one selection rule and not under all of them."""
    metrics: set[str] = set()
    for rule in RULES:
        start = f"{rule}_target_"
        named = [column for column in summary.columns if column.startswith(start)]
        metrics.update(column.removeprefix(start) for column in named)
    for rule, metric in product(RULES, sorted(metrics)):
        column = f"{rule}_target_{metric}"
        if column not in summary:
            raise UserError(f"{file}: no column {column}; {AGAIN}")


def _require_rounds(file: Path, tables: "Mapping[str, pd.DataFrame]") -> None:
    """UserError for a finished run whose rounds were read and end before the last one that its summary names."""
    if "rounds" not in tables or not file.is_file():
        return
    last = tables["summary"]["last_round"].iloc[0]
    rounds = tables["rounds"]
    if rounds.empty or rounds["round"].max() < last:
        raise UserError(f"{file}: it ends before round {last}, which summary.csv names; {AGAIN}")


def _none_readable(source: Path, reasons: list[str]) -> str:
    """Return why no run of a folder can be read: the first reason, which names its file, and the number of runs."""
    if len(reasons) == 1:
        return reasons[0]
    return f"{source}: none of its {len(reasons)} runs can be read; the first is {reasons[0]}"


def of_experiment(runs: Runs, name: str) -> Runs:
    """The part of `runs` that belongs to the experiment of that name."""
    names = {run: experiment.name for run, experiment in runs.experiments.items()}
    part = part_of(runs, [run for run in names if names[run] == name])
    part.unfinished = [run for run in runs.unfinished if _experiment_name(runs, run) in ("", name)]
    part.damaged = _selected(runs.damaged, lambda run: _experiment_name(runs, run) in ("", name))
    return part


def _selected(texts: Mapping[str, str], is_wanted: Callable[[str], bool]) -> dict[str, str]:
    """Return the texts of the runs for which the function is true."""
    return {run: text for run, text in texts.items() if is_wanted(run)}


def _experiment_name(runs: Runs, run: str) -> str:
    """The experiment of an unfinished or damaged run; empty when its settings cannot be read (yet)."""
    try:
        return read_settings(run_folder(runs, run)).name
    except (UserError, OSError):
        return ""


def choose_runs(
    runs: Runs,
    methods: Sequence[str] = (),
    targets: Sequence[str] = (),
    seeds: Sequence[int] = (),
) -> Runs:
    """The part of `runs` with these methods (by name or label), targets and seeds; an empty list takes all.

    Raises UserError for a name that no run has.
    """
    labels = runs.labels()
    methods = with_commas(methods, set(labels.values()))
    names = {}
    settings = []
    all_names = []
    for run, experiment in runs.experiments.items():
        names[run] = _names_of_method(run, experiment, labels[run])
        settings.append(experiment.run)
        all_names += sorted(names[run])
    _require_known("method", methods, all_names)
    _require_known("target", targets, [each.target for each in settings])
    _require_known("seed", seeds, [each.seed for each in settings])
    choice = Choice(methods, targets, [f"seed{seed}" for seed in seeds])
    chosen = []
    for run, experiment in runs.experiments.items():
        if choice.has(names[run], experiment.run.target, f"seed{experiment.run.seed}"):
            chosen.append(run)
    if not chosen:
        raise UserError("no finished run has one of these methods, targets and seeds together")
    part = part_of(runs, chosen)
    texts = [runs.only, _choice_text(methods, targets, seeds)]
    part.only = "; ".join(filter(None, texts))
    part.unfinished = list(filter(choice.has_unread, runs.unfinished))
    part.damaged = _selected(runs.damaged, choice.has_unread)
    return part


def runs_with_unseen(runs: Runs) -> list[str]:
    """Return the names of the runs that leave a domain out; those on all domains (NO_TARGET) do not."""
    return [run for run, experiment in runs.experiments.items() if experiment.run.target != NO_TARGET]


def with_unseen(runs: Runs) -> Runs:
    """Return the runs that leave a domain out (`runs_with_unseen`); `only` says how many others there are.

    Raises UserError where there are runs, and none of them leaves a domain out.
    """
    chosen = runs_with_unseen(runs)
    count = len(runs.experiments)
    others = count - len(chosen)
    if not others:
        return runs
    if not chosen:
        plural = "s" if count > 1 else ""
        raise UserError(
            f"{runs.source}: {count} finished run{plural}, and none leaves a domain out (target {NO_TARGET}), so that "
            "no accuracy on an unseen domain can be compared; give them one: fedsim sweep CONFIG --targets all, or "
            "target=DATASET in the start of a Flower app"
        )
    part = part_of(runs, chosen)
    text = f"those that leave a domain out, which {others} of {count} do not (target {NO_TARGET})"
    part.only = "; ".join(filter(None, [runs.only, text]))
    return part


def _names_of_method(run: str, experiment: Experiment, label: str) -> set[str]:
    """The names by which a run's method is chosen: its method, its label, and its method's folder."""
    return {experiment.method_name, label, _path_names(run)[0]} - {""}


def _choice_text(methods: Sequence[str], targets: Sequence[str], seeds: Sequence[int]) -> str:
    """`methods fedavg; seeds 0, 1` of the lists that are not empty."""
    texts = []
    for what, values in {"methods": methods, "targets": targets, "seeds": seeds}.items():
        if values:
            texts.append(f"{what} {', '.join(map(str, values))}")
    return "; ".join(texts)


@dataclass(frozen=True)
class Choice:
    """Methods, targets and seeds (`seed0`) by which runs are chosen; an empty list takes all."""

    methods: Sequence[str]
    targets: Sequence[str]
    seeds: Sequence[str]

    def has(self, names: set[str], target: str, seed: str) -> bool:
        """Whether a run with one of these names of a method, this target and seed is chosen."""
        has_method = not self.methods or not names.isdisjoint(self.methods)
        has_target = not self.targets or target in self.targets
        return has_method and has_target and (not self.seeds or seed in self.seeds)

    def has_unread(self, run: str) -> bool:
        """Whether an unfinished or damaged run is chosen, of which nothing is read but its path."""
        folder, target, seed = _path_names(run)
        return self.has({folder, folder.partition("@")[0]}, target, seed)


def _require_known(what: str, names: Sequence[Any], available: Sequence[Any]) -> None:
    """UserError for a name that is not available."""
    for name in names:
        if name not in available:
            listed = ", ".join(map(str, dict.fromkeys(available)))
            near = nearest(str(name), map(str, available))
            raise UserError(f"no finished run of the {what} {str(name)!r}; {near}there are: {listed}")


def _path_names(run: str) -> list[str]:
    """`pacs/fedavg@lr=0.1/photo/seed0` -> `fedavg@lr=0.1`, `photo`, `seed0`; empty where the path is shorter."""
    return ["", "", *run.split("/")][-3:]


def part_of(runs: Runs, chosen: Sequence[str]) -> Runs:
    """The records of these runs alone."""
    names = set(chosen)
    frames = {}
    for name in TABLES:
        frame = getattr(runs, name)
        frames[name] = frame[frame["run"].isin(names)].reset_index(drop=True)
    return replace(
        runs,
        **frames,
        experiments={run: runs.experiments[run] for run in chosen},
        notes={run: texts for run, texts in runs.notes.items() if run in names},
    )


def find_runs(folder: Path | str) -> list[Path]:
    """Folders of all runs below `folder`, finished or not, in the order of their names."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; give outputs/, an experiment's or a run's folder in it, or NAME.zip"
        )
    paths = []
    for place, below, files in os.walk(folder):  # unlike rglob, it does not fail when another run removes a folder
        if "experiment.toml" in files:
            paths.append(Path(place))
            below.clear()
    if not paths:
        raise UserError(f"{folder}: no run in it (a run's folder holds an experiment.toml)")
    return sorted(paths)


def run_folder(runs: Runs, run: str) -> Path:
    """Folder of one run, by its name in the frames' column `run`."""
    folder = runs.folder / run
    # Records that are read from one run's own folder have that folder's name in this column.
    return folder if folder.is_dir() else runs.folder


def run_environment(runs: Runs, run: str) -> dict[str, Any]:
    """What environment.json of a run holds; empty when there is none. UserError when it cannot be read."""
    return read_environment(run_folder(runs, run))


def read_settings(run: Path) -> Experiment:
    """Return the resolved settings of one run's folder; UserError when they cannot be read, or for another format."""
    read_environment(run)
    return _parsed_settings(run / "experiment.toml")


def _parsed_settings(file: Path) -> Experiment:
    """Return the resolved settings of a run's experiment.toml; UserError when they cannot be read."""
    text = read_text(file)
    if not text.endswith("\n") or RUN_SECTION not in text:
        raise UserError(f"{file}: it is cut off: a run's settings end with the section [run]; {AGAIN}")
    try:
        with named(file, "the settings"):
            return parse_experiment(text)
    except UserError as error:
        reason = str(error).removeprefix(f"{file}: ")
        raise UserError(f"{file}: {reason}") from None


def unfinished(run: Path) -> str:
    """Return a text when the run has not finished, so that a later round may still replace its best model; else ""."""
    rounds = read_record(run / "rounds.csv")
    if is_finished(run) or rounds.empty:
        return ""
    planned = read_settings(run).train.rounds
    return f"the run has not finished: this is the best of {rounds['round'].max()} of {planned} rounds"


def finished_runs(folder: Path) -> list[Path]:
    """Return the folders of the finished runs below `folder`; UserError without any, or for another format."""
    runs = list(filter(is_finished, find_runs(folder)))
    if not runs:
        raise UserError(f"{folder}: no finished run in it; repeat the commands of unfinished ones to resume them")
    for run in runs:
        read_settings(run)
    return runs


def _key(path: Path, folder: Path) -> str:
    relative = path.relative_to(folder).as_posix()
    return path.name if relative == "." else relative


def _joined(records: Mapping[str, Record], paths: Mapping[str, Path], name: str) -> "pd.DataFrame":
    """The rows of one record file of all runs, with the run's keys as first columns."""
    import pandas as pd

    frames, keys = [], []
    for key, record in records.items():
        frame = record.tables.get(name, pd.DataFrame())
        if len(frame):
            experiment = record.experiment
            run = experiment.run
            target = run.target or paths[key].parent.name
            frames.append(frame.drop(columns=KEYS, errors="ignore"))
            keys.append((key, experiment.name, experiment.method_name, target, run.seed))
    if not frames:
        return pd.DataFrame(columns=KEYS)
    lengths = [len(frame) for frame in frames]
    places = np.repeat(np.arange(len(keys)), lengths)
    repeated = pd.DataFrame(keys, columns=KEYS).loc[places]
    rows = pd.concat(frames, ignore_index=True)
    return pd.concat([repeated.reset_index(drop=True), rows], axis=1)
