"""The figures of CSAC and FedIG-A: the numbers that are drawn, worked out by hand, and when each figure is drawn."""

import math

import numpy as np
import pandas as pd
import pytest
from invented import pacs_experiment, write_run
from support import numbers, run_small, tiny_experiment

from fedsim.analysis import compare
from fedsim.analysis.figure_style import styles
from fedsim.analysis.paper_figures import (
    alpha_of_images,
    classes_by_client,
    layer_distances,
    layer_over_rounds,
    local_models,
    over_setting,
    swept_settings,
)
from fedsim.analysis.plots import draw, plot_all
from fedsim.common.errors import UserError
from fedsim.records import read_runs
from fedsim.records.alphas import Alphas


def details(rows, **columns):
    """Rows (seed, round, client, quantity, name, value) of details.csv as they are read, of one target."""
    frame = pd.DataFrame(rows, columns=["seed", "round", "client", "quantity", "name", "value"])
    frame["client"] = frame["client"].replace("", np.nan)
    return frame.assign(target="c", **columns)


def drawn(axes, label):
    """{x: y} of the line with that label."""
    (line,) = [line for line in axes.get_lines() if line.get_label() == label]
    return dict(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_alpha_of_each_image():
    """Two seeds with images 1, 3 and 2: each layer has its three points in the order of the images, and their mean."""
    one = Alphas(np.array([1, 3]), np.array([[0.1, 0.3], [1.0, 0.8]]), ("backbone.a", "backbone.b"))
    other = Alphas(np.array([2]), np.array([[0.8], [0.6]]), one.layers)
    (axes,) = alpha_of_images({"sketch": [one, other]}, "x", "fedig-a").axes
    points = [collection.get_offsets() for collection in axes.collections]
    assert [layer[:, 1].tolist() for layer in points] == [[0.1, 0.8, 0.3], [1.0, 0.6, 0.8]]
    assert points[1][:, 0].tolist() == pytest.approx([0.65, 1.0, 1.35])
    assert [line.get_ydata()[0] for line in axes.get_lines()] == pytest.approx([0.4, 0.8])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["a", "b"]
    assert axes.get_title() == "unseen: sketch"


def test_the_weight_of_a_layer_by_client():
    """The mean over two seeds of each client in each round, and nothing of another layer."""
    weights = {("a", 1): (0.2, 0.4), ("a", 2): (0.5, 0.7), ("b", 1): (0.8, 0.6), ("b", 2): (0.5, 0.3)}
    rows = [(seed, number, client, "divergence_weight", "fc.weight", values[seed])
            for (client, number), values in weights.items() for seed in (0, 1)]  # fmt: skip
    (axes,) = layer_over_rounds(details(rows), "fc.weight", "x", "csac", "divergence_weight").axes
    assert drawn(axes, "a") == pytest.approx({1: 0.3, 2: 0.6})
    assert drawn(axes, "b") == pytest.approx({1: 0.7, 2: 0.4})


def test_models_of_clients_on_all_domains():
    """The acquisition and the last round, in percent, means over two seeds; the fused model is the last row."""
    rows = []
    for number, shift in ((0, 0.0), (1, 0.05), (2, 0.1)):
        for seed in (0, 1):
            for client, name, value in (("a", "a", 0.5), ("a", "c", 0.3), ("b", "a", 0.2), ("b", "c", 0.4)):
                rows.append((seed, number, client, "local_accuracy", name, value + shift + 0.02 * seed))
            for name in "ac":
                rows.append((seed, number, "", "fused_accuracy", name, 0.6 + shift + 0.02 * seed))
    first, last = local_models(details(rows), "x", "csac").axes
    assert first.images[0].get_array().tolist() == [pytest.approx(row) for row in ([51, 31], [21, 41], [61, 61])]
    assert last.images[0].get_array().tolist() == [pytest.approx(row) for row in ([61, 41], [31, 51], [71, 71])]
    assert [tick.get_text() for tick in first.get_yticklabels()] == ["a", "b", "fused"]
    assert [tick.get_text() for tick in first.get_xticklabels()] == ["a", "c"]
    assert [axes.get_title() for axes in (first, last)] == ["unseen: c, round 0", "unseen: c, round 2"]
    assert [text.get_text() for text in first.texts] == ["51", "31", "21", "41", "61", "61"]
    assert local_models(details([(0, 1, "a", "divergence_weight", "w", 0.5)]), "x", "csac") is None
    errors = local_models(details([(0, 1, "a", "local_mae", "c", 3.25), (0, 1, "", "fused_mae", "c", 0.5)]), "x", "y")
    (only,) = errors.axes  # in the unit of the target
    assert [text.get_text() for text in only.texts] == ["3.25", "0.5"]
    assert ("mae" in errors.get_suptitle(), "%" in errors.get_suptitle()) == (True, False)
    assert only.images[0].get_clim() == (0, 3.25)


def test_distances_of_layers():
    """Of the last round, with the deviation over two seeds: 1 and 3 have the mean 2 and the deviation sqrt(2)."""
    rows = [(0, 1, "", "distance_within", "u", 9.0)]
    for quantity, values in {"distance_within": {"u": (1, 3), "v": (4, 4)}, "distance_across": {"u": (5, 7)}}.items():
        rows += [(seed, 2, "", quantity, name, pair[seed]) for name, pair in values.items() for seed in (0, 1)]
    (axes,) = layer_distances(details(rows), "x", "csac").axes
    within, across = axes.containers
    assert within.lines[0].get_ydata().tolist() == [2, 4]
    assert across.lines[0].get_ydata()[0] == 6
    bars = within.lines[2][0].get_segments()
    assert bars[0][:, 1].tolist() == pytest.approx([2 - math.sqrt(2), 2 + math.sqrt(2)])
    assert [within.get_label(), across.get_label()] == ["same domain", "different domains"]


def test_classes_of_each_client():
    (axes,) = classes_by_client({"c": {"a": [5, 0, 1], "b": [2, 2, 2]}}, ["dog", "cat", "cow"], "x").axes
    assert axes.images[0].get_array().tolist() == [[5, 0, 1], [2, 2, 2]]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["dog", "cat", "cow"]
    assert [text.get_text() for text in axes.texts] == ["5", "0", "1", "2", "2", "2"]


@pytest.fixture
def sweep(tmp_path):
    """Runs of FedProx with three mu on two targets with two seeds, and of FedAvg, which has no such setting."""
    for target in ("photo", "sketch"):
        for seed in (0, 1):
            for mu in (0.01, 0.1, 1.0):
                experiment = pacs_experiment("fedprox", target, seed,
                                             method={"proximal": {"mu": mu}})  # fmt: skip
                write_run(tmp_path / f"mu{mu}", experiment)
            write_run(tmp_path / "plain", pacs_experiment("fedavg", target, seed))
    runs = read_runs(tmp_path)
    column = "best_validation_target_accuracy"
    for place, row in runs.summary.iterrows():
        base = {"photo": 0.8, "sketch": 0.6}[row["target"]]
        mu = runs.experiments[row["run"]].method.get("proximal", {}).get("mu", 0)
        runs.summary.loc[place, column] = base + 0.1 * mu + 0.02 * row["seed"]
    return runs


def test_accuracy_over_a_setting(sweep):
    """Photo .8, sketch .6, plus a tenth of mu and .02 in the second seed: photo at mu = 1 is 91 % on average."""
    ((key, rows),) = swept_settings(sweep).items()
    assert key == "method.proximal.mu"
    figure = over_setting(rows, key, "x", "best_validation", styles(["fedprox"]))
    photo, _, average = figure.axes
    assert drawn(photo, "fedprox") == pytest.approx({0.01: 81.1, 0.1: 82, 1: 91})
    assert drawn(average, "fedprox") == pytest.approx({0.01: 71.1, 0.1: 72, 1: 81})
    heights = photo.collections[0].get_paths()[0].vertices[:, 1]
    deviation = 100 * 0.02 / math.sqrt(2)
    assert [heights.min(), heights.max()] == pytest.approx([81.1 - deviation, 91 + deviation])
    assert photo.get_xscale() == "log"
    assert [tick.get_text() for tick in photo.get_xticklabels()] == ["0.01", "0.1", "1"]


def test_a_method_of_which_two_settings_vary_is_not_drawn_over_one(sweep):
    for run in list(sweep.experiments):
        if "mu0.1/" in run:
            sweep.experiments[run] = sweep.experiments[run].replace(train={"lr": 0.5})
    assert swept_settings(sweep) == {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One run of CSAC and one of FedIG-A with all that `run.record` can keep of them."""
    folder = tmp_path_factory.mktemp("recorded")
    run_small(tiny_experiment(folder, "csac", run={"record": ["local_models", "classes"]}))
    run_small(tiny_experiment(folder, "fedig-a", run={"record": ["alpha"]}))
    return folder / "small"


def test_runs_that_record_them_have_the_figures(folder):
    runs = read_runs(folder)
    tensor = "backbone.fc.weight"
    figures = dict(draw(runs, "small", compare(runs, "last", published=False), layers=[tensor]))
    of_papers = {"local-models-csac", "alpha-images-fedig-a", "classes-by-client"}
    assert of_papers <= set(figures)
    assert not [key for key in figures if key.startswith(("local_accuracy", "fused_accuracy", "distance_"))]
    layer = f"divergence_weight-csac-{tensor}"
    assert [key for key in figures if tensor in key] == [layer]
    recorded = numbers(next(folder.rglob("csac/**/details.csv")))
    rows = recorded[(recorded["quantity"] == "divergence_weight") & (recorded["name"] == tensor)]
    expected = rows[rows["client"] == "rot0"][["round", "value"]]
    assert drawn(figures[layer].axes[0], "rot0") == dict(expected.to_numpy().tolist())


def test_a_layer_that_nothing_was_recorded_of_is_one_line(folder, tmp_path):
    with pytest.raises(UserError, match=r"--layer fc\.weight: details\.csv has no such name; .*backbone\.fc\.weight"):
        plot_all(read_runs(folder), tmp_path / "out", layers=["fc.weight"])
    assert not (tmp_path / "out").exists()
