"""Figures are drawn if the records have their columns, are not blank, have labels, and repeat with the same bytes."""

from dataclasses import replace
from itertools import islice
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from invented import pacs_experiment, write_grid, write_run
from matplotlib.colors import to_hex
from matplotlib.image import imread

from fedsim.common.errors import UserError
from fedsim.results import choose_runs, compare, plot_all, read_runs
from fedsim.results.bars import target_bars
from fedsim.results.cost_figure import FRONT, cost_front, readable
from fedsim.results.figure_style import styles
from fedsim.results.figures import (
    are_shares,
    detail_over_rounds,
    few_enough,
    histogram_bounds,
    layer_group,
)
from fedsim.results.plots import draw

LONG_NAME = "an-experiment-with-a-long-name"
METHODS = {"fedavg": 0, "feddg-ga": 0.02, "csac": 0.03}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return read_runs(write_grid(tmp_path_factory.mktemp("outputs"), METHODS, rounds=4, targets=("photo", "sketch")))


@pytest.fixture(scope="module")
def figures(runs):
    """All figures of the runs; tests only look at them."""
    return dict(draw(runs, LONG_NAME))


@pytest.fixture(scope="module")
def files(runs, tmp_path_factory):
    return plot_all(runs, tmp_path_factory.mktemp("plots"))


NAMES = {
    "learning-curves",
    "target-accuracy",
    "cost",
    "client-weight",
    "client-gap",
    "divergence_weight-csac",
    "alpha-csac",
    "alpha-csac-histogram",
}


def test_every_record_has_its_figure_in_both_formats(files):
    assert {path.name for path in files} == {f"{name}{kind}" for name in NAMES for kind in (".png", ".svg")}


def test_pictures_are_not_blank(files):
    for path in files:
        if path.suffix == ".png":
            pixels = imread(path)
            assert min(pixels.shape[:2]) > 300
            assert 0.01 < float(np.mean(pixels[..., :3].min(axis=2) < 0.9)) < 0.9
        else:
            assert len(list(ElementTree.parse(path).iter())) > 100


@pytest.mark.parametrize("part", ["all", "one run"])
def test_nothing_is_cut_off(runs, figures, part):
    one = draw(read_runs(runs.folder / "csac" / "sketch" / "seed0"), LONG_NAME, "oracle")
    for figure in figures.values() if part == "all" else dict(one).values():
        figure.draw_without_rendering()
        box, page = figure.get_tightbbox(), figure.get_size_inches()
        assert box.x0 >= -0.02
        assert box.y0 >= -0.02
        assert box.x1 <= page[0] + 0.02
        assert box.y1 <= page[1] + 0.02


def test_axes_and_titles_are_labelled(runs, figures):
    assert set(figures) == NAMES
    for key, figure in figures.items():
        assert LONG_NAME in figure.get_suptitle(), key
        assert figure.get_supxlabel() or any(axes.get_ylabel() for axes in figure.axes), key
    by_oracle = dict(islice(draw(runs, "pacs", "oracle"), 3))
    assert "ORACLE" in by_oracle["target-accuracy"].get_suptitle()
    assert "ORACLE" in by_oracle["cost"].get_suptitle()


def test_legend_names_every_client_although_one_is_unseen_in_each_panel(figures):
    figure = figures["client-gap"]
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"art_painting", "cartoon", "photo", "sketch"}


def test_constant_weights_are_left_out_where_others_move(figures):
    figure = figures["client-weight"]
    assert {axes.get_ylabel() for axes in figure.axes} == {"feddg-ga\nweight", ""}


def test_same_records_same_svg(runs, files, tmp_path):
    one = read_runs(runs.folder / "fedavg" / "photo")
    first = [path.read_bytes() for path in plot_all(one, tmp_path / "a") if path.suffix == ".svg"]
    second = [path.read_bytes() for path in plot_all(one, tmp_path / "b") if path.suffix == ".svg"]
    assert first == second
    assert mpl.rcParams["axes.grid"] is False


def test_an_unfinished_run_has_curves_only(tmp_path):
    write_run(tmp_path, pacs_experiment(train={"rounds": 2}), finish=False)
    files = plot_all(read_runs(tmp_path, unfinished=True), tmp_path / "plots")
    assert {path.stem for path in files} == {"learning-curves", "client-weight"}


def test_experiments_are_drawn_apart_and_variants_are_labelled(tmp_path):
    for name, rate in (("pacs", 0.01), ("pacs-fast", 0.1)):
        write_run(tmp_path, pacs_experiment(name=name, train={"rounds": 1, "lr": rate}))
    stems = {path.stem for path in plot_all(read_runs(tmp_path), tmp_path / "plots")}
    assert {"pacs-learning-curves", "pacs-fast-learning-curves"} <= stems
    write_run(tmp_path / "again", pacs_experiment(name="pacs", train={"rounds": 1, "lr": 0.5}))
    both = read_runs(tmp_path)
    figure = dict(draw(both, "all"))["target-accuracy"]
    texts = {text.get_text() for text in figure.axes[0].get_yticklabels()}
    assert texts == {"fedavg (lr=0.01)", "fedavg (lr=0.1)", "fedavg (lr=0.5)"}


def test_nothing_to_plot_is_said(tmp_path):
    folder = write_run(tmp_path, pacs_experiment(train={"rounds": 1}), finish=False)
    for name in ("rounds.csv", "clients.csv"):
        (folder / name).unlink()
    with pytest.raises(UserError, match="nothing to plot"):
        plot_all(read_runs(tmp_path, unfinished=True), tmp_path / "plots")


def test_styles_differ_without_colour():
    looks = styles([f"method {i}" for i in range(20)]).values()
    assert len({(look.color, str(look.line)) for look in looks}) == 20
    assert len({(str(look.line), look.marker) for look in looks}) == 20


def test_shares_are_drawn_by_their_spread(runs):
    details = runs.details
    alpha = details[details["quantity"] == "alpha"]
    shares = alpha.assign(value=alpha["value"] / alpha.groupby(["run", "round", "name"])["value"].transform("sum"))
    assert not are_shares(alpha)
    assert are_shares(shares)
    assert not are_shares(shares[shares["client"] == "cartoon"])
    drawn = detail_over_rounds(shares.assign(group="x"), "pacs", "csac", "share")
    assert drawn.axes[2].get_ylabel() == "share\nspread between clients"
    own = shares[(shares["target"] == "photo") & (shares["round"] == 2) & shares["name"].str.startswith("conv1")]
    expected = own.groupby("seed")["value"].std().mean()
    line = next(line for line in drawn.axes[2].get_lines() if line.get_label() == "conv1")
    assert line.get_ydata()[list(line.get_xdata()).index(2)] == pytest.approx(expected)


def test_a_quantity_of_whole_clients_has_no_panel_of_layers(runs):
    """FADA records one number for each client; the cell of the tensor's name is empty in details.csv."""
    alpha = runs.details[runs.details["quantity"] == "alpha"]
    drawn = detail_over_rounds(alpha.assign(name=float("nan")), "pacs", "fada", "tightness")
    assert len(drawn.axes) == alpha["target"].nunique()


def test_no_panel_has_more_curves_than_one_can_tell_apart():
    """Of 57 methods the twelve best ones are drawn, or the eleven best ones and FedAvg, and the title says so."""
    labels = [f"m{index}" for index in range(56)] + ["fedavg"]
    assert few_enough(labels[:12], labels) == (labels[:12], "")
    assert few_enough(labels, labels[::-1]) == (labels[45:], "; 12 of 57 methods: the best")
    assert few_enough(labels, labels) == ([*labels[:11], "fedavg"], "; 12 of 57 methods: the best and fedavg")
    assert few_enough(labels[:-1], ())[1] == "; 12 of 56 methods: the first"


def test_a_quantity_of_the_server_has_a_line_of_its_own(runs):
    """FADA records the fused model's number beside those of the clients, and FedGMA only such numbers: no client."""
    alpha = runs.details[runs.details["quantity"] == "alpha"]
    of_server = alpha[alpha["client"] == alpha["client"].iloc[0]].assign(client=float("nan"))
    for frame in (pd.concat([of_server, alpha]), of_server):
        drawn = detail_over_rounds(frame, "pacs", "fada", "tightness")
        lines = {line.get_label() for line in drawn.axes[0].get_lines()}
        assert "server" in lines
        assert len(lines & set(alpha["client"])) == (0 if frame is of_server else 3)


def test_histograms_zoom_into_narrow_values():
    assert histogram_bounds(0.1, 0.9) == (0.0, 1.0)
    assert histogram_bounds(0.25, 0.26) == pytest.approx((0.249, 0.261))
    assert histogram_bounds(0.5, 0.5) == pytest.approx((0.45, 0.55))
    assert histogram_bounds(-1.0, 3.0) == pytest.approx((-1.4, 3.4))


@pytest.mark.parametrize(
    ("most", "column", "shown"),
    [
        (0.005, "gigabytes", "5 MB"),
        (2e-5, "gigabytes", "20 kB"),
        (134.4, "gigabytes", "134.4 GB"),
        (0.6, "minutes", "36 s"),
        (45, "minutes", "45 min"),
        (300, "minutes", "5 h"),
    ],
)
def test_costs_are_in_readable_units(most, column, shown):
    factor, unit = readable(most, column)
    assert f"{factor * most:g} {unit}" == shown


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("features.layer1.0.bn1.weight", "layer1"),
        ("fc.bias", "fc"),
        ("blocks.3.attention", "blocks.3"),
        ("features", "features"),
    ],
)
def test_layer_groups(name, group):
    assert layer_group(name) == group


def test_one_seed_has_no_mean_over_seeds(runs, figures):
    """The titles say so; those of several seeds say what the band is."""
    for several, drawn in ((True, figures), (False, dict(draw(choose_runs(runs, seeds=[0]), "pacs")))):
        for key in ("learning-curves", "target-accuracy", "cost", "divergence_weight-csac", "client-gap"):
            words = " ".join(drawn[key].get_suptitle().split())
            assert ("mean ± std over seeds" in words, "one seed" in words) == (several, not several), words


def test_methods_that_see_the_target_are_marked_and_have_no_place_on_the_front(runs):
    """Beside the others they would make these look worse than they are."""
    own = replace(runs, summary=runs.summary.assign(transductive=runs.summary["method"] == "csac"))
    table, found = own.summary.assign(label=own.summary["method"]), compare(own)
    bars = target_bars(found, table.assign(accuracy=table["best_validation_target_accuracy"]), "pacs", styles(METHODS))
    assert {text.get_text() for text in bars.axes[0].get_yticklabels()} == {"fedavg", "feddg-ga", "csac †"}
    costs = pd.DataFrame({"gigabytes": 1.0, "minutes": [2.0, 3.0, 1.0]}, index=["fedavg", "feddg-ga", "csac"])
    drawn = cost_front(found, costs, "pacs", styles(METHODS))
    assert "csac †" in {text.get_text() for text in drawn.legends[0].get_texts()}
    (front,) = [line for line in drawn.axes[1].get_lines() if line.get_label() == FRONT]
    assert 1.0 not in front.get_xdata()
    assert not [line for line in drawn.axes[0].get_lines() if line.get_label() == FRONT]  # one point is no line
    assert FRONT in {text.get_text() for text in drawn.legends[0].get_texts()}
    drawn = cost_front(found, costs[["gigabytes"]].assign(minutes=float("nan")), "pacs", styles(METHODS))
    assert FRONT not in {text.get_text() for text in drawn.legends[0].get_texts()}


def test_structures_are_no_layers(runs):
    """The Dice of each structure is recorded where other quantities name a layer."""
    alpha = runs.details[runs.details["quantity"] == "alpha"].replace({"name": {"conv1.weight": "cup"}})
    assert detail_over_rounds(alpha, "fundus", "fedavg", "dice").axes[2].get_ylabel() == "dice\nper structure"


def test_a_method_looks_the_same_in_all_figures(figures):
    """The bars are in the order of ranks, the curves in that of the records."""
    bars = figures["target-accuracy"].axes[0]
    names = [text.get_text() for text in bars.get_yticklabels()]
    drawn = [{name: to_hex(bar.get_facecolor()) for name, bar in zip(names, bars.patches)}]
    assert names != list(METHODS)
    markers = []
    for key in ("learning-curves", "cost"):
        axes = figures[key].axes[0]
        lines = [line[0] if isinstance(line, tuple) else line for line in axes.get_legend_handles_labels()[0]]
        own = {name: line for name, line in zip(axes.get_legend_handles_labels()[1], lines) if name in METHODS}
        drawn.append({name: to_hex(line.get_color()) for name, line in own.items()})
        markers.append({name: line.get_marker() for name, line in own.items()})
    assert drawn[0] == drawn[1] == drawn[2]
    assert markers[0] == markers[1]
    assert len(set(drawn[0].values())) == len(markers[0]) == len(METHODS)
