"""All figures that the records of some runs allow, as PNG and SVG files."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from fedsim.analysis import combinations, figures, paper_figures
from fedsim.analysis.compare import compare, run_labels
from fedsim.analysis.comparison import Comparison, without_exchange
from fedsim.analysis.comparison_figures import against_papers, cost_front, target_bars
from fedsim.analysis.figure_style import Looks, look, styles
from fedsim.analysis.metrics import kept, kept_predictions
from fedsim.analysis.prediction_figures import case_grid, confusion_figure, reliability_figure
from fedsim.analysis.statistics import whole_run_costs
from fedsim.common.console import counted
from fedsim.common.errors import UserError, nearest
from fedsim.common.files import write_figure
from fedsim.records.alphas import Alphas, read_alphas
from fedsim.records.cases import read_cases
from fedsim.records.client_rows import client_metrics
from fedsim.records.reading import Runs, of_experiment, run_environment, run_folder, runs_with_unseen, with_unseen
from fedsim.records.selection import WORST_SOURCE

Parts = dict[str, tuple[Runs, Comparison | None]]  # the runs of each experiment, and their comparison
TARGETS = "target-accuracy"  # the key of the figure that shows the result
Figures = Iterator[tuple[str, Figure]]  # each with the name of its file
MaybeFigures = Iterator[tuple[str, Figure | None]]


def plot_all(
    runs: Runs,
    out: Path | str,
    select: str = "best_validation",
    by: Sequence[str] = (),
    layers: Sequence[str] = (),
) -> list[Path]:
    """Draws every figure for which the records have the columns; returns the paths of the PNG and SVG files.

    These are learning curves, bars per target, cost fronts, per-client metrics and layer-wise quantities. A figure
    never shows runs of more than one experiment. Where all runs are drawn into FOLDER/plots, figures of an earlier
    state that are not drawn any more are removed. What `compare` refuses of an experiment's runs is refused here.

    layers: layers or tensors of which every recorded quantity is drawn for each client. Raises UserError for a name
    that no run has recorded.
    """
    if select == WORST_SOURCE:
        raise UserError(f"the rule {select!r} is for `fedsim compare`: no predictions of its rounds were kept")
    out = Path(out)
    paths: list[Path] = []
    refuse_unknown_layers(runs, layers)
    parts = by_experiment(runs, select, by)
    out.mkdir(parents=True, exist_ok=True)
    with look(names_in(runs, by)):
        for name, (part, comparison) in parts.items():
            prefix = ""
            if len(parts) > 1:
                prefix = f"{_file_name(name)}-"
            drawn = draw(part, name, comparison, by, layers)
            for key, figure in counted(drawn, "figures drawn:"):
                stem = _free_stem(prefix + _file_name(key), paths)
                paths += _save(figure, out / stem)
    if not paths:
        raise UserError(f"{runs.source}: the records hold nothing to plot yet")
    main_folder = runs.folder / "plots"
    is_main_folder = out.resolve() == main_folder.resolve()
    if is_main_folder and not runs.only:
        _remove_others(out, paths)
    return paths


def first_to_open(paths: Sequence[Path]) -> str:
    """Return a line that names the picture to open first: the accuracies where they are drawn, else the first one."""
    pictures = [path for path in paths if path.suffix == ".png"]
    for picture in pictures:
        if picture.stem.endswith(TARGETS):
            return f"open first: {picture} (each method on each unseen domain)"
    return f"open first: {pictures[0]}"


def by_experiment(runs: Runs, select: str, by: Sequence[str]) -> Parts:
    """{experiment: (its runs, their comparison)}; a comparison is None where no finished run leaves a domain out."""
    parts: Parts = {}
    names = [experiment.name for experiment in runs.experiments.values()]
    for name in dict.fromkeys(names):
        part = of_experiment(runs, name)
        comparison = None
        if runs_with_unseen(part):
            part = with_unseen(part)
            if len(part.summary):
                comparison = compare(part, select, by=by, published=False)
        parts[name] = part, comparison
    return parts


def plot_search(folder: Path) -> list[Path]:
    """Draw the combination searches of an experiment's folder into its plots/, also where it has no runs yet."""
    searches = combinations.searches(folder)
    out = folder / "plots"
    out.mkdir(parents=True, exist_ok=True)
    names = [folder.name]
    for _, rows in searches:
        names += rows["target"].tolist()
    paths = []
    with look(names):
        for key, figure in combinations.figures(searches, folder.name):
            paths += _save(figure, out / key)
    return paths


def refuse_unknown_layers(runs: Runs, layers: Sequence[str]) -> None:
    """Raises UserError for a layer or tensor of which no run has recorded anything."""
    recorded = [] if runs.details.empty else list(runs.details["name"].dropna().unique())
    for layer in layers:
        if layer not in recorded:
            raise UserError(f"--layer {layer}: details.csv has no such name; {nearest(layer, recorded)}"
                            f"there are: {', '.join(map(str, recorded)) or 'none'}")  # fmt: skip


def draw(
    runs: Runs,
    name: str,
    comparison: Comparison | None,
    by: Sequence[str] = (),
    layers: Sequence[str] = (),
) -> Figures:
    """(key, Figure) of one experiment's runs, in the order of a report; each is drawn when it is asked for."""
    for key, figure in _drawn(runs, name, comparison, by, layers):
        if figure is not None:
            yield key, figure


def _drawn(
    runs: Runs,
    name: str,
    comparison: Comparison | None,
    by: Sequence[str],
    layers: Sequence[str],
) -> MaybeFigures:
    """(key, Figure), or None where the records lack columns."""
    labels = run_labels(runs, by)
    looks = styles(dict.fromkeys(labels.values()))  # in the order of the records, not of a figure's ranks
    best = list(comparison.methods["label"]) if comparison else []
    rounds = _labelled(runs.rounds, labels)
    if len(rounds):
        yield "learning-curves", figures.learning_curves(rounds, name, looks, best)
        if comparison:
            rounds = without_exchange(rounds, comparison.methods)
        yield "curves-over-bytes", figures.curves_over_bytes(rounds, name, looks, best)
    if comparison:
        yield TARGETS, target_bars(comparison, name, looks)
        costs = whole_run_costs(rounds)
        yield "cost", cost_front(comparison, costs, name, looks)
        first = next(iter(runs.experiments.values()))
        yield "papers", against_papers(comparison, first, name)
        yield from _of_predictions(runs, name, comparison, looks, labels)
    yield from combinations.figures(combinations.searches_of(runs), name)
    clients = _labelled(runs.clients, labels)
    if len(clients):
        for column in client_metrics(clients):
            figure = figures.metric_over_rounds(clients, column, name)
            yield f"client-{column}", figure
    details = _labelled(runs.details, labels)
    if len(details):
        yield from _details(details, name, layers)
    yield from _of_papers(runs, name, comparison, labels)


def _of_papers(runs: Runs, name: str, comparison: Comparison | None, labels: dict[str, str]) -> MaybeFigures:
    """The figures of settings that a sweep has varied, and of what `run.record` keeps besides details.csv."""
    if comparison:
        for key, rows in paper_figures.swept_settings(runs).items():
            methods = styles(dict.fromkeys(rows["label"]))
            yield f"over-{key}", paper_figures.over_setting(rows, key, name, comparison.select, methods)
    alphas: dict[str, dict[str, list[Alphas]]] = {}  # by label and target
    counts: dict[str, dict[str, list[int]]] = {}
    classes: list[str] = []
    for run, experiment in runs.experiments.items():
        target = experiment.run.target
        of_run = read_alphas(run_folder(runs, run))
        if of_run:
            alphas.setdefault(labels[run], {}).setdefault(target, []).append(of_run)
        environment = run_environment(runs, run)
        of_clients = environment.get("class_counts", {})
        if len(of_clients) > len(counts.get(target, {})):  # pooled training has one client
            counts[target], classes = of_clients, environment["classes"]
    for label, by_target in alphas.items():
        yield f"alpha-images-{label}", paper_figures.alpha_of_images(by_target, name, label)
    if counts:
        yield "classes-by-client", paper_figures.classes_by_client(counts, classes, name)


def _of_predictions(
    runs: Runs,
    name: str,
    comparison: Comparison,
    looks: Looks,
    labels: dict[str, str],
) -> MaybeFigures:
    """The figures of what the runs have kept."""
    predictions = kept_predictions(runs, labels, comparison.select)
    best = list(comparison.methods["label"])
    reliability = reliability_figure(predictions, name, looks, best, comparison.rule)
    yield "reliability", reliability
    for label, by_target in predictions.items():
        confusion = confusion_figure(by_target, name, label, comparison.rule)
        yield f"confusion-{label}", confusion
    all_cases = kept(runs, labels, comparison.select, read_cases)
    for label, cases in all_cases.items():
        for target, seeds in cases.items():
            figure = case_grid(seeds[0], name, label, target)
            yield f"cases-{label}-{target}", figure


def names_in(runs: Runs, by: Sequence[str] = ()) -> list[str]:
    """Every name that a figure may write: experiments, labels, targets, clients."""
    names = []
    for experiment in runs.experiments.values():
        names += [experiment.name, experiment.run.target]
    names += run_labels(runs, by).values()
    if "client" in runs.clients:
        clients = runs.clients["client"].unique()
        names += map(str, clients)
    return list(dict.fromkeys(names))


def _labelled(frame: pd.DataFrame, labels: dict[str, str]) -> pd.DataFrame:
    if frame.empty:
        return frame
    label = frame["run"].map(labels)
    return frame.assign(label=label)


def _details(details: pd.DataFrame, name: str, layers: Sequence[str]) -> MaybeFigures:
    for label, frame in details.groupby("label", sort=False):
        yield f"local-models-{label}", paper_figures.local_models(frame, name, label)
        yield f"layer-distances-{label}", paper_figures.layer_distances(frame, name, label)
    has_own_figures = details["quantity"].map(paper_figures.is_of_models)
    details = details[~has_own_figures]
    for (label, quantity, layer), frame in details.groupby(["label", "quantity", "name"], sort=False):
        if layer in layers:
            figure = paper_figures.layer_over_rounds(frame, layer, name, label, quantity)
            yield f"{quantity}-{label}-{layer}", figure
    for (label, quantity), frame in details.groupby(["label", "quantity"], sort=False):
        figure = figures.detail_over_rounds(frame, name, label, quantity)
        yield f"{quantity}-{label}", figure
        if "alpha" in quantity:
            figure = figures.detail_histogram(frame, name, label, quantity)
            yield f"{quantity}-{label}-histogram", figure


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=+-]+", "_", text).strip("_")


def _free_stem(stem: str, paths: list[Path]) -> str:
    """The name of a figure's files, with a number behind it where another figure of the same call has it."""
    taken = {path.stem.lower() for path in paths}
    name = stem
    number = 2
    while name.lower() in taken:
        name = f"{stem}-{number}"
        number += 1
    return name


def _mark(stem: str) -> str:
    """What a file says of itself: a file of the user, or a figure that was renamed, does not say this."""
    return f"drawn by fedsim plot as {stem}"


def _save(figure: Figure, stem: Path) -> list[Path]:
    png = stem.with_name(f"{stem.name}.png")
    svg = stem.with_name(f"{stem.name}.svg")
    mark = {"Description": _mark(stem.name)}
    write_figure(figure, png, dpi=150, facecolor="white", metadata=mark)
    figure.set_layout_engine("none")  # the places are found; to look for them again takes a fifth of the time
    undated = {"Date": None, **mark}
    write_figure(figure, svg, facecolor="white", metadata=undated)
    return [png, svg]


def _remove_others(folder: Path, drawn: list[Path]) -> None:
    """Remove the figures of a folder that an earlier `plot_all` has drawn under these names, and this one has not."""
    for file in folder.iterdir():
        is_picture = file.suffix in (".png", ".svg") and file.is_file()
        if not is_picture or file in drawn:
            continue
        with file.open("rb") as handle:
            start = handle.read(4000).decode("utf-8", "ignore")
        if _mark(file.stem) in start:
            file.unlink()
