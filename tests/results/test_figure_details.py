"""What a reader of the figures needs: numbers under every column, whole labels, and no figure of an earlier state."""

import pandas as pd
import pytest
from invented import pacs_experiment, write_grid, write_run

from fedsim.results import choose_runs, compare, plot_all, read_runs
from fedsim.results.bars import target_bars
from fedsim.results.figure_style import styles, wrapped
from fedsim.results.figures import metric_over_rounds

LONG = "fedprox (proximal.mu=0.01, fraction=0.1, rounds=2, lr=0.02543)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_grid(tmp_path_factory.mktemp("outputs"), {"fedavg": 0}, seeds=1, rounds=2, targets=("photo", "sketch"))


def test_the_lowest_panel_of_every_column_has_numbers(folder):
    """Six targets and the average fill two rows of four, so that one place is empty."""
    runs = read_runs(folder)
    found = compare(runs)
    found.targets = [f"d{index}" for index in range(6)]
    table = runs.summary.assign(label="fedavg", accuracy=0.5)
    figure = target_bars(found, table, "six", styles(["fedavg"]))
    figure.draw_without_rendering()
    shown = [axes for axes in figure.axes if axes.get_visible()]
    numbers = [any(label.get_visible() for label in axes.get_xticklabels()) for axes in shown]
    assert numbers == [False, False, False, True, True, True, True]


def test_long_labels_keep_their_differences():
    """They go on in further lines, at most three; a word that is too long for one is cut."""
    assert wrapped("fedavg") == "fedavg"
    assert wrapped(LONG) == "fedprox (proximal.mu=0.01,\nfraction=0.1, rounds=2,\nlr=0.02543)"
    assert wrapped("x" * 100).count("\n") == 0
    assert len(wrapped("x" * 100)) <= 28
    assert wrapped("$ $") == r"\$ \$"
    assert wrapped(f"{'a' * 20} {'b' * 20} {'c' * 20} {'d' * 20} end").split("\n")[2] == f"… {'d' * 20} end"


def test_labels_of_several_lines_fit_the_page(tmp_path):
    for rate in (0.011430, 0.25430):
        own = {"rounds": 2, "lr": rate, "weight_decay": rate / 100, "momentum": rate}
        write_run(tmp_path / str(rate), pacs_experiment("fedprox", train=own))
    runs = read_runs(tmp_path)
    for file in plot_all(runs, tmp_path / "figures"):
        assert file.is_file()


def weights(values):
    clients = ("art_painting", "cartoon", "sketch")
    rows = [(client, round_, value) for client, value in zip(clients, values) for round_ in (1, 2)]
    frame = pd.DataFrame(rows, columns=["client", "round", "weight"])
    return frame.assign(run="r", label="fedavg", method="fedavg", target="photo", seed=0, experiment="pacs")


def test_a_constant_is_drawn_on_an_axis_from_zero():
    """Around one number, an axis of its own would have 0.19 to 0.21, as if there were something to see."""
    equal = metric_over_rounds(weights([0.2, 0.2, 0.2]), "weight", "pacs").axes[0]
    assert equal.get_ylim() == pytest.approx((0, 0.22))
    apart = metric_over_rounds(weights([0.2, 0.3, 0.5]), "weight", "pacs").axes[0]
    assert apart.get_ylim()[0] > 0.1
    zero = metric_over_rounds(weights([0.0, 0.0, 0.0]), "weight", "pacs").axes[0]
    assert zero.get_ylim()[0] < 0


@pytest.mark.slow
def test_figures_that_are_not_drawn_any_more_are_removed(folder):
    """Only those that the same command has drawn, and only where it draws all runs: FOLDER/plots."""
    runs = read_runs(folder)
    plots = folder / "plots"
    (own := [plots / "client-mine.png", plots / "notes.svg", plots / "confusion-mine.svg"])[0].parent.mkdir()
    for file in own:
        file.write_text("mine")
    plot_all(runs, plots)
    for kind in ("png", "svg"):
        (plots / f"cost.{kind}").rename(plots / f"renamed.{kind}")  # a copy that the user has kept
    write_run(folder.parent, pacs_experiment("csac", "photo", train={"rounds": 2}))
    both = plot_all(read_runs(folder), plots)
    csac = {file.name for file in both if "csac" in file.name}
    assert csac
    plot_all(choose_runs(read_runs(folder), ["fedavg"]), plots)
    assert csac <= {file.name for file in plots.iterdir()}
    for run in (folder / "csac").rglob("summary.csv"):
        run.unlink()
    left = plot_all(read_runs(folder), plots)
    kept = {file.name for file in [*left, *own]} | {"renamed.png", "renamed.svg"}
    assert {file.name for file in plots.iterdir()} == kept
