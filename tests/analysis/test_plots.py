"""Figures are drawn if the records have their columns, are not blank, have labels, and repeat with the same bytes."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from invented import pacs_experiment, write_run
from matplotlib.figure import Figure
from matplotlib.image import imread

from fedsim.analysis import compare
from fedsim.analysis.comparison import without_exchange
from fedsim.analysis.comparison_figures import FRONT, cost_front, readable, target_bars
from fedsim.analysis.figure_style import places, styles
from fedsim.analysis.figures import (
    are_shares,
    curves_over_bytes,
    detail_over_rounds,
    few_enough,
    histogram_bounds,
    metric_over_rounds,
)
from fedsim.analysis.plots import draw, first_to_open, plot_all
from fedsim.analysis.statistics import whole_run_costs
from fedsim.common.errors import UserError
from fedsim.records import choose_runs, read_runs

NAME = "an-experiment-with-a-long-name"
METHODS = ("fedavg", "feddg-ga", "csac")
NAMES = {
    "learning-curves", "target-accuracy", "cost", "papers", "client-weight", "client-gap", "divergence_weight-csac",
    "alpha-csac", "alpha-csac-histogram",
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(grid):
    return read_runs(grid)


def texts(found):
    return [text.get_text() for text in found]


def test_axes_and_titles_are_labelled_and_whole(runs, grid):
    """The titles say the rule and the seeds; of several seeds they say what the band is."""
    figures, one = dict(draw(runs, NAME, compare(runs))), read_runs(grid / "csac" / "sketch" / "seed0")
    of_one_run = dict(draw(one, NAME, compare(one, "oracle")))
    assert set(figures) == NAMES
    for key, figure in figures.items():
        assert NAME in figure.get_suptitle(), key
        assert figure.get_supxlabel() or any(axes.get_ylabel() for axes in figure.axes), key
    for several, drawn in ((True, figures), (False, of_one_run)):
        assert all(("ORACLE" in drawn[key].get_suptitle()) != several for key in ("target-accuracy", "cost"))
        for key in ("learning-curves", "target-accuracy", "cost", "divergence_weight-csac", "client-weight"):
            words = " ".join(drawn[key].get_suptitle().split())
            assert ("mean ± std over seeds" in words, "one seed" in words) == (several, not several), words
    # Constant weights are left out where others move; the legend has the client that is unseen in a panel, too.
    assert set(texts(figures["client-gap"].legends[0].get_texts())) == {"art_painting", "cartoon", "photo", "sketch"}
    assert {axes.get_ylabel() for axes in figures["client-weight"].axes} == {"feddg-ga\nweight", ""}
    # Nothing is cut off.
    for figure in (*(of_one_run[key] for key in ("target-accuracy", "alpha-csac-histogram")), figures["client-gap"]):
        figure.draw_without_rendering()
        box, page = figure.get_tightbbox(), figure.get_size_inches()
        assert min(box.x0, box.y0, page[0] - box.x1, page[1] - box.y1) >= -0.02


def test_an_unfinished_run_has_curves_only_which_are_not_blank_and_repeat(tmp_path):
    folder = write_run(tmp_path, pacs_experiment(train={"rounds": 2}), finish=False)
    files = [plot_all(read_runs(tmp_path, unfinished=True), tmp_path / name) for name in "ab"]
    names = {f"{name}.{kind}" for name in ("learning-curves", "client-weight") for kind in ("png", "svg")}
    assert [{path.name for path in own} for own in files] == [names] * 2
    for first, second in zip(*map(sorted, files)):
        assert first.read_bytes() == second.read_bytes()
        if first.suffix == ".png":
            pixels = imread(first)
            assert min(pixels.shape[:2]) > 300
            assert 0.01 < float(np.mean(pixels[..., :3].min(axis=2) < 0.9)) < 0.9
        else:
            assert len(list(ElementTree.parse(first).iter())) > 100
    assert mpl.rcParams["axes.grid"] is False
    for name in ("rounds.csv", "clients.csv"):
        (folder / name).unlink()
    with pytest.raises(UserError, match="nothing to plot"):
        plot_all(read_runs(tmp_path, unfinished=True), tmp_path / "plots")


def test_curves_over_the_bytes_of_the_clients():
    """Two seeds send 1 and 3 MB in round 1, and 2 MB each in round 2: on average 2 and 4 MB by then."""
    columns = ["run", "label", "target", "seed", "round", "bytes_up", "target_accuracy"]
    rows = [
        ["a0", "a", "sketch", 0, 0, 0.0, 0.1],
        ["a0", "a", "sketch", 0, 1, 1e6, 0.4],
        ["a0", "a", "sketch", 0, 2, 2e6, 0.5],
        ["a1", "a", "sketch", 1, 1, 3e6, 0.6],
        ["a1", "a", "sketch", 1, 2, 2e6, 0.7],
    ]
    whole = pd.DataFrame(rows, columns=columns)
    half = whole.assign(run=whole["run"].str.replace("a", "b"), label="b", bytes_up=whole["bytes_up"] / 2)
    looks = styles(["a", "b"])
    figure = curves_over_bytes(pd.concat([half, whole], ignore_index=True), NAME, looks)
    (panel,) = figure.axes
    assert (panel.get_xlabel(), panel.get_xscale()) == ("MB sent by all clients", "log")
    lines = {line.get_label(): line.get_xydata().tolist() for line in panel.get_lines()}
    assert lines == {"a": [[2, 50], [4, 60]], "b": [[1, 50], [2, 60]]}
    third = whole.assign(run=whole["run"].str.replace("a", "c"), label="c")
    methods = pd.DataFrame({"label": ["a", "b", "c"], "pooled": [False, False, True]})
    rounds = without_exchange(pd.concat([half, whole, third], ignore_index=True), methods)
    (panel,) = curves_over_bytes(rounds, NAME, styles(["a", "b", "c"])).axes
    assert {line.get_label() for line in panel.get_lines()} == {"a", "b"}
    costs = whole_run_costs(rounds.assign(bytes_down=rounds["bytes_up"], round_seconds=60.0))
    assert costs["gigabytes"].isna().to_dict() == {"a": False, "b": False, "c": True}
    assert costs["minutes"].notna().all()
    assert curves_over_bytes(whole, NAME, looks) is None  # one amount
    assert curves_over_bytes(whole.drop(columns="bytes_up"), NAME, looks) is None


def test_shares_are_drawn_by_their_spread(runs):
    alpha = runs.details[runs.details["quantity"] == "alpha"]
    shares = alpha.assign(value=alpha["value"] / alpha.groupby(["run", "round", "name"])["value"].transform("sum"))
    assert [are_shares(each) for each in (alpha, shares, shares[shares["client"] == "cartoon"])] == [False, True, False]
    drawn = detail_over_rounds(shares.assign(group="x"), "pacs", "csac", "share")
    assert drawn.axes[2].get_ylabel() == "share\nspread between clients"
    own = shares[(shares["target"] == "photo") & (shares["round"] == 2) & shares["name"].str.startswith("conv1")]
    expected = own.groupby("seed")["value"].std().mean()
    line = next(line for line in drawn.axes[2].get_lines() if line.get_label() == "conv1")
    assert line.get_ydata()[list(line.get_xdata()).index(2)] == pytest.approx(expected)


def test_no_panel_has_more_curves_than_one_can_tell_apart():
    """Of 57 methods the twelve best ones are drawn, or the eleven best ones and FedAvg, and the title says so."""
    looks = styles([f"method {i}" for i in range(20)]).values()
    assert len({(look.color, str(look.line)) for look in looks}) == 20
    assert len({(str(look.line), look.marker) for look in looks}) == 20  # without colour
    fixed = styles(["a", "fedavg", "b", "deepall"])
    assert [(fixed[name].color, fixed[name].line) for name in ("fedavg", "deepall")] == [
        ("#000000", "-"),
        ("#808080", "--"),
    ]
    assert places(["fedavg", "a", "deepall", *"bcdefg"]) == {
        "fedavg": 14, "a": 0, "deepall": 15, "b": 1, "c": 2, "d": 3, "e": 4, "f": 5, "g": 8}  # fmt: skip
    assert places(["a", "b", "a", "b", "c"]) == {"a": 0, "b": 1, "c": 2}  # each run of a method has its label
    labels = [f"m{index}" for index in range(56)] + ["fedavg"]
    assert few_enough(labels[:12], labels) == (labels[:12], "")
    assert few_enough(labels, labels[::-1]) == (labels[45:], "; 12 of 57 methods: the best")
    assert few_enough(labels, labels) == ([*labels[:11], "fedavg"], "; 12 of 57 methods: the best and fedavg")
    assert few_enough(labels[:-1], ())[1] == "; 12 of 56 methods: the first"


def test_numbers_and_names_of_axes():
    shown = {
        ("gigabytes", 0.005): "5 MB", ("gigabytes", 2e-5): "20 kB", ("gigabytes", 134.4): "134.4 GB",
        ("minutes", 0.6): "36 s", ("minutes", 45): "45 min", ("minutes", 300): "5 h",
    }  # fmt: skip
    for (column, most), text in shown.items():
        factor, unit = readable(most, column)
        assert f"{factor * most:g} {unit}" == text
    zoomed = {(0.1, 0.9): (0, 1), (0.25, 0.26): (0.249, 0.261), (0.5, 0.5): (0.45, 0.55), (-1, 3): (-1.4, 3.4)}
    assert all(histogram_bounds(*ends) == pytest.approx(bounds) for ends, bounds in zoomed.items())


def test_methods_that_see_the_target_are_marked_and_have_no_place_on_the_front(runs):
    own = replace(runs, summary=runs.summary.assign(transductive=runs.summary["method"] == "csac"))
    found = compare(own, published=False)
    bars = target_bars(found, "pacs", styles(METHODS))
    assert set(texts(bars.axes[0].get_yticklabels())) == {"fedavg", "feddg-ga", "csac †"}
    costs = pd.DataFrame({"gigabytes": 1.0, "minutes": [2.0, 3.0, 1.0]}, index=METHODS)
    drawn = cost_front(found, costs, "pacs", styles(METHODS))
    assert {"csac †", FRONT} <= set(texts(drawn.legends[0].get_texts()))
    (front,) = [line for line in drawn.axes[1].get_lines() if line.get_label() == FRONT]
    assert 1.0 not in front.get_xdata()
    assert FRONT not in [line.get_label() for line in drawn.axes[0].get_lines()]  # one point is no line


def test_the_picture_to_open_first_is_that_of_the_accuracies():
    curves = [Path("learning-curves.png"), Path("learning-curves.svg")]
    assert first_to_open(curves) == "open first: learning-curves.png"
    all_files = [*curves, Path("pacs-target-accuracy.png"), Path("pacs-target-accuracy.svg"), Path("cost.png")]
    assert first_to_open(all_files) == "open first: pacs-target-accuracy.png (each method on each unseen domain)"


@pytest.mark.slow
def test_figures_that_are_not_drawn_any_more_are_removed(own_grid):
    """Only those that the same command has drawn, and only where it draws all runs: FOLDER/plots."""
    plots = own_grid / "plots"
    (own := [plots / "client-mine.png", plots / "notes.svg", plots / "confusion-mine.svg"])[0].parent.mkdir()
    for file in own:
        file.write_text("mine")
    csac = {file.name for file in plot_all(read_runs(own_grid), plots) if "csac" in file.name}
    for kind in ("png", "svg"):
        (plots / f"cost.{kind}").rename(plots / f"renamed.{kind}")  # a copy that the user has kept
    plot_all(choose_runs(read_runs(own_grid), ["fedavg"]), plots)
    assert csac
    assert csac <= {file.name for file in plots.iterdir()}
    for run in (own_grid / "csac").rglob("summary.csv"):
        run.unlink()
    left = plot_all(read_runs(own_grid), plots)
    kept = {file.name for file in [*left, *own]} | {"renamed.png", "renamed.svg"}
    assert {file.name for file in plots.iterdir()} == kept


def line_of(figure, name):
    """The line with that label, in the first panel that has it."""
    return next(line for axes in figure.axes for line in axes.get_lines() if line.get_label() == name)


def test_lines_break_where_a_client_was_not_drawn_and_not_where_nobody_was(tmp_path):
    data = {"dataset": "folder", "domains": ["art", "cartoon", "photo"]}
    write_run(tmp_path, pacs_experiment("fedavg", "art", data=data), clients=2, drawn=2)
    clients = read_runs(tmp_path).clients.assign(label="fedavg")
    figure = metric_over_rounds(clients, "weight", "crowd")
    rounds = clients.groupby("client")["round"].agg(set)
    gaps_of = {client: set(range(min(own), max(own))) - own for client, own in rounds.items()}
    client, gaps = next((client, gaps) for client, gaps in gaps_of.items() if gaps)
    line = line_of(figure, client)
    assert {round_ for round_, value in zip(line.get_xdata(), line.get_ydata()) if np.isnan(value)} == gaps
    assert line.get_markevery() == 1  # a value without neighbours is a marker
    frame = pd.DataFrame({"round": [2, 4, 6], "client": "art", "gap": [0.1, 0.2, 0.3], "label": "a", "target": "b"})
    figure = metric_over_rounds(frame.assign(run="x", seed=0), "gap", "crowd")
    assert list(line_of(figure, "art").get_ydata()) == [0.1, 0.2, 0.3]


def test_two_names_that_are_one_file_name_are_two_pictures(tmp_path, monkeypatch):
    """Labels differ in signs that no file name has; the second picture replaced the first one."""
    write_run(tmp_path, pacs_experiment("fedavg"))
    figures = [("one-a/b", Figure()), ("one-a b", Figure())]
    monkeypatch.setattr("fedsim.analysis.plots.draw", lambda *arguments: iter(figures))
    drawn = plot_all(read_runs(tmp_path), tmp_path / "plots")
    assert [file.name for file in drawn] == ["one-a_b.png", "one-a_b.svg", "one-a_b-2.png", "one-a_b-2.svg"]
    assert all(file.is_file() for file in drawn)
