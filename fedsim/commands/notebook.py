"""What the commands `run`, `sweep` and `compare` do, as functions of Python with objects and data frames.

run = fedsim.run("feddg-ga", data={"photo": photos, "sketch": sketches, ...}, target="sketch", model=Net, rounds=5)
run.rounds, run.clients, run.summary, run.model, run.folder
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from fedsim.analysis.compare import compare as compare_runs
from fedsim.apps.given import Model, named_model, named_recipe
from fedsim.commands.notebook_html import NotebookBar, run_html
from fedsim.commands.runs import ProgressBar, headline
from fedsim.common.console import errors
from fedsim.common.errors import UserError
from fedsim.common.lists import first_few
from fedsim.common.tasks import OF_TENSORS
from fedsim.common.values import Json
from fedsim.data import unseen_domains
from fedsim.data.of_apps import HERE, hold, settings_for
from fedsim.data.targets import names_of_targets
from fedsim.data.tensor_sets import name_classes
from fedsim.export.trained import TrainedModel, load_trained
from fedsim.methods.assembly import assemble
from fedsim.methods.recipe import SLOTS, Recipe
from fedsim.records.reading import Runs, part_of, read_runs, read_settings
from fedsim.records.record_files import read_record
from fedsim.runs.plan import Plan, resolve, results_folder
from fedsim.runtime.launch import carry_out
from fedsim.settings.experiment import Experiment, read_experiment
from fedsim.settings.keywords import experiment_of

Data = str | Path | Mapping[str, Any]
TABLES = (".npz", ".csv", ".tsv", ".parquet")
FOLDER = "folder"  # key of the attributes of the data frame of a sweep


@dataclass(frozen=True)
class Run:
    """A finished run: its records as data frames, its model, and its folder. In a notebook it shows table and curve.

    rounds: a row for each round; round 0 is the initial model. clients: a row for each client and round
    summary: one row, with the results by each rule of selection
    """

    folder: Path

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """A row for each round; `docs/records.md` lists the columns."""
        return read_record(self.folder / "rounds.csv")

    @cached_property
    def clients(self) -> pd.DataFrame:
        """A row for each client and round."""
        return read_record(self.folder / "clients.csv")

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row with the results by each rule of selection."""
        return read_record(self.folder / "summary.csv")

    @cached_property
    def experiment(self) -> Experiment:
        """All settings of the run."""
        return read_settings(self.folder)

    @cached_property
    def model(self) -> TrainedModel:
        """The model of the selected round as a module, with its transforms and its inference rule."""
        which = "best" if (self.folder / "best.safetensors").is_file() else "last"
        return load_trained(self.folder, which, trust=True)

    def __repr__(self) -> str:
        return headline(self.folder)

    def _repr_html_(self) -> str:
        return run_html(self.rounds, headline(self.folder))


def run(
    method: str | Recipe = "fedavg",
    data: Data = "digits",
    target: str = "",
    *,
    model: str | Model | None = None,
    progress: bool = True,
    **settings: Json,
) -> Run:
    """Computes one run, or resumes it; a finished one is read.

    method: a row of `fedsim methods`, a combination `a+b`, a `Recipe`, or `module:name`
    data: the name or path of an experiment file, or the path of a folder of images DOMAIN/CLASS/IMAGE, a table or .npz;
    or a mapping from domains to torch Datasets of (tensor, class), or with `task="regression"` or `"multi-label"` of
    (tensor, number) or (tensor, labels of 0 and 1)
    target: the unseen domain; empty: the last one; "no-target": none, all domains train
    model: the name of a backbone, an nn.Module, or a class or function that makes one; None: that of the experiment
    progress: whether a bar is shown
    settings: of the experiment file, under their names: `rounds=5`, `lr=0.01`, `seed=1`, `output="outputs"`,
    `name="mine"`, `preset="csac"`, or fields of a part such as `proximal={"mu": 0.1}`

    Raises UserError for unknown names and for data and settings that do not fit, ClientFailedError for a client that
    fails.
    """
    experiment = planned(method, data, model, {**settings, **({"target": target} if target else {})})
    return _launched(resolve(experiment), progress)


def sweep(
    methods: Sequence[str | Recipe],
    data: Data = "digits",
    targets: str | Sequence[str] = "all",
    seeds: Sequence[int] = (0,),
    *,
    model: str | Model | None = None,
    progress: bool = True,
    **settings: Json,
) -> pd.DataFrame:
    """Computes methods x targets x seeds, one run after the other; finished ones are read.

    Returns a row for each run: its summary. `attrs["notes"]` says what is to be known of the runs, and the cells that
    failed, whose error does not stop the others. The arguments are those of `run`. The command `fedsim sweep` runs
    several cells at a time. Raises UserError where no run could be made.
    """
    plans = list(_plans(methods, data, targets, seeds, model, settings))
    done: list[Path] = []
    failed: list[str] = []
    for plan in plans:
        try:
            done.append(_launched(plan, progress).folder)
        except Exception as error:  # the other cells are computed all the same
            run_settings = plan.experiment.run
            cell = f"{plan.experiment.method_name} → {run_settings.target} (seed {run_settings.seed})"
            failed.append(f"failed: {cell}: {' '.join(str(error).split())}")
    if not done:
        raise UserError("; ".join(failed[:1]))
    folder = results_folder(plans[0].experiment)
    chosen = _chosen(folder, done)
    table = chosen.summary.reset_index(drop=True)
    notes = [text for texts in chosen.notes.values() for text in texts.values()]
    table.attrs.update({"notes": [*failed, *dict.fromkeys(notes)], FOLDER: str(folder), "runs": list(map(str, done))})
    return table


def compare(
    runs: str | Path | pd.DataFrame | Sequence[Run],
    baseline: str | None = None,
    *,
    select: str = "best_validation",
    metric: str = "",
    by: Sequence[str] = (),
) -> pd.DataFrame:
    """Compares finished runs: a row for each method, with its mean on each unseen domain and their average.

    runs: what `sweep` returned, a list of what `run` returned, or a folder of records
    baseline: the method with which the others are compared (`difference`, `p_value`, `p_holm`)
    select, metric, by: as in `fedsim compare`

    Accuracies are fractions. `attrs["notes"]` has the notes on the table, `attrs["title"]` its title. Raises
    UserError for runs that cannot be compared.
    """
    comparison = compare_runs(_runs(runs), select, baseline, by, metric=metric)
    means = comparison.cells.pivot(index="label", columns="target", values="mean")[comparison.columns]
    rest = comparison.methods.drop(columns=["average"]).set_index("label")
    table = means.reindex(comparison.methods["label"]).join(rest)
    table.attrs.update({"notes": comparison.notes, "title": comparison.title})
    return table


def planned(method: str | Recipe, data: Data, model: str | Model | None, settings: Mapping[str, Json]) -> Experiment:
    """The experiment of a call; UserError for what does not fit."""
    name = named_recipe(method)
    keywords = dict(settings)
    base = _base(data, keywords.pop("preset", ""))
    parts = [*assemble({"name": name}, {}).named, *SLOTS, "add"]
    experiment = experiment_of(name, keywords, parts, base)
    if isinstance(data, Mapping):
        experiment = _with_datasets(experiment, data)
    backbone = _backbone(model, data, experiment)
    return experiment.replace(model={"backbone": backbone}) if backbone else experiment


def _base(data: Data, preset: str) -> Experiment:
    """The experiment that `data` names, or one for the data that it names."""
    if isinstance(data, Mapping):
        return Experiment(name="datasets")
    if not isinstance(data, str | Path):
        raise UserError(f"data is {type(data).__name__}; give an experiment's name, a path, or {{domain: Dataset}}")
    path = Path(data)
    if path.is_dir():
        return Experiment(name=path.resolve().name).replace(data={"dataset": "folder", "root": str(data)})
    if path.suffix in TABLES:
        return Experiment(name=path.stem).replace(data={"dataset": "arrays", "root": str(data)})
    return read_experiment(str(data), preset=preset)


def _with_datasets(experiment: Experiment, data: Mapping[str, Any]) -> Experiment:
    """The experiment on these Datasets, which are read into this process."""
    if experiment.run.runtime != "inline":
        raise UserError(f"run.runtime = {experiment.run.runtime!r}: Datasets that are given in Python are in this "
                        "process; leave the runtime out, or name them as data.dataset = 'module:name'")  # fmt: skip
    task = experiment.data.task
    held = {str(domain): hold(str(domain), dataset, None, task) for domain, dataset in data.items()}
    shapes = {domain: of_domain.shape for domain, of_domain in held.items()}
    if len(set(shapes.values())) > 1:
        texts = [f"{domain} {list(shape)}" for domain, shape in shapes.items()]
        raise UserError(f"the domains have examples of different shapes: {first_few(texts)}")
    labels = {domain: of_domain.labels for domain, of_domain in held.items()}
    first, classes = 0, names_of_targets(experiment.data, labels, "data") if task in OF_TENSORS else ()
    if not classes:
        classes = name_classes(labels)
        first = int(classes[0])
    are_images = all(of_domain.are_images for of_domain in held.values())
    for domain, of_domain in held.items():
        HERE[domain] = of_domain.counted_from(first).in_form(are_images)
    of_data = settings_for(next(iter(shapes.values())), are_images)
    names = {"domains": sorted(held), "classes": list(classes)}
    _refuse_other_names(experiment, names)
    return experiment.replace(data={**of_data, **names})


def _refuse_other_names(experiment: Experiment, names: Mapping[str, list[str]]) -> None:
    """Raises UserError where the settings name other domains or classes than the Datasets have."""
    for name, present in names.items():
        given = list(getattr(experiment.data, name))
        if given and given != present:
            raise UserError(f"{name} = {given}: the Datasets have the {name} {present}; leave {name} out, and give the "
                            "Datasets that the run shall have")  # fmt: skip


def _backbone(model: str | Model | None, data: Data, experiment: Experiment) -> str:
    """The name of the backbone; empty for that of the experiment."""
    if isinstance(model, str):
        return model
    if model is not None:
        if not (isinstance(model, nn.Module) or callable(model)):
            raise UserError(
                f"model is {type(model).__name__}; give a backbone's name, or an nn.Module or what makes one"
            )
        return named_model(model)
    tensors = isinstance(data, Mapping) and bool(experiment.data.shape)
    return "mlp" if tensors and experiment.model == Experiment().model else ""


def _plans(
    methods: Sequence[str | Recipe],
    data: Data,
    targets: str | Sequence[str],
    seeds: Sequence[int],
    model: str | Model | None,
    settings: Mapping[str, Json],
) -> Iterator[Plan]:
    """The plans of all cells; UserError for a list that is empty or a text, and for cells that do not resolve."""
    if isinstance(methods, str) or not methods:
        raise UserError("methods is a list of methods, such as ['fedavg', 'feddg-ga']")
    for method in methods:
        base = planned(method, data, model, settings)
        names = unseen_domains(base.data) if targets == "all" else [targets] if isinstance(targets, str) else targets
        for target in names:
            for seed in seeds:
                yield resolve(base.replace(run={"target": target, "seed": seed}))


def _launched(plan: Plan, progress: bool) -> Run:
    """The finished run of a plan."""
    plan.refuse_misfits()  # before a folder is made
    with _bar(progress) as callbacks:
        return Run(carry_out(plan, callbacks))


@contextmanager
def _bar(progress: bool) -> Iterator[list[Any]]:
    """A bar for one run: HTML in a notebook, rich's on a terminal, none elsewhere."""
    if progress and _in_notebook():
        yield [NotebookBar()]
    elif progress and errors.is_terminal:
        bar = ProgressBar()
        try:
            yield [bar]
        finally:
            bar.close()
    else:
        yield []


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this code."""
    shell: Callable[[], Any] | None = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return shell is not None and hasattr(shell(), "kernel")


def _runs(runs: str | Path | pd.DataFrame | Sequence[Run]) -> Runs:
    """The records that `compare` is asked for."""
    if isinstance(runs, str | Path):
        return read_runs(runs)
    if isinstance(runs, pd.DataFrame):
        if FOLDER not in runs.attrs:
            raise UserError("compare takes the data frame that fedsim.sweep returned, a folder, or a list of runs")
        return _chosen(Path(runs.attrs[FOLDER]), [Path(path) for path in runs.attrs["runs"]])
    if not runs or not all(isinstance(each, Run) for each in runs):
        raise UserError("compare takes a folder, what fedsim.sweep returned, or a list of what fedsim.run returned")
    folders = [each.folder for each in runs]
    above = {results_folder(each.experiment) for each in runs}
    if len(above) > 1:
        raise UserError(f"these runs are of different experiments: {', '.join(sorted(map(str, above)))}; give all the "
                        "same name=... and output=...")  # fmt: skip
    return _chosen(above.pop(), folders)


def _chosen(folder: Path, runs: Sequence[Path]) -> Runs:
    """The records of these runs, of those below a folder."""
    records = read_runs(folder)
    names = {path.relative_to(folder).as_posix() for path in runs}
    return part_of(records, [run for run in records.experiments if run in names])
