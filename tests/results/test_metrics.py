"""Metrics of predictions on numbers worked out by hand, files of predictions, and the rounds that are kept."""

import math

import numpy as np
import pandas as pd
import pytest
from invented import write_grid
from support import Interrupt, run_small, small_experiment
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.results import compare, predictions, read_runs, select, write_report
from fedsim.results.metrics import METRICS, confusion_matrix, expected_calibration_error, per_class_accuracy
from fedsim.results.plots import draw
from fedsim.results.predictions import (
    Predictions,
    keep_selected,
    pooled,
    predictions_file,
    read_predictions,
    write_predictions,
)

# Six images of three classes and none of the fourth: a is right 2 of 3, b 1 of 2, c 0 of 1 (taken for b).
LABEL = np.array([0, 0, 0, 1, 1, 2])
PROBABILITIES = np.array(
    [
        [0.7, 0.1, 0.1, 0.1],
        [0.6, 0.3, 0.1, 0.0],
        [0.2, 0.5, 0.2, 0.1],
        [0.1, 0.8, 0.1, 0.0],
        [0.4, 0.3, 0.3, 0.0],
        [0.1, 0.5, 0.4, 0.0],
    ],
    dtype=np.float32,
)
SMALL = Predictions(np.arange(6), LABEL, PROBABILITIES, ("a", "b", "c", "d"))


def test_metrics_by_hand():
    """Accuracy 3/6; recalls 2/3, 1/2, 0; F1: a 2*2/(4+1+1) = 2/3, b 2*1/(2+2+1) = 2/5, c 0."""
    assert METRICS["accuracy"].of(SMALL) == pytest.approx(0.5)
    assert per_class_accuracy(SMALL) == pytest.approx([2 / 3, 1 / 2, 0, math.nan], nan_ok=True)
    assert METRICS["balanced_accuracy"].of(SMALL) == pytest.approx((2 / 3 + 1 / 2) / 3)
    assert METRICS["macro_f1"].of(SMALL) == pytest.approx((2 / 3 + 2 / 5) / 3)
    assert confusion_matrix(SMALL).tolist() == [[2, 1, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]


def test_auroc_by_counting_pairs():
    """a: .7 .6 .2 against .1 .4 .1: 8 of 9 pairs. b: .8 .3 against .1 .3 .5 .5: 4 and 1.5 of 8. c: .4 above all: 1."""
    assert METRICS["auroc"].of(SMALL) == pytest.approx((8 / 9 + 5.5 / 8 + 1) / 3)
    one_class = Predictions(np.arange(2), np.zeros(2, int), PROBABILITIES[:2], SMALL.classes)
    assert math.isnan(METRICS["auroc"].of(one_class))


def test_calibration_error_by_hand():
    """Two bins: confidences .5 .4 .5 up to .5 (0 right, gap 1.4), .7 .6 .8 above (3 right, gap .9)."""
    assert expected_calibration_error(SMALL, bins=2) == pytest.approx((1.4 + 0.9) / 6, abs=1e-6)
    sure = Predictions(np.arange(2), np.array([0, 1]), np.array([[1.0, 0.0], [1.0, 0.0]]), ("a", "b"))
    assert expected_calibration_error(sure) == pytest.approx(0.5)


def test_predictions_are_kept_as_they_are(tmp_path):
    """They are in the order of the images; the frame has the names of classes, even for a class called `label`."""
    mixed = np.array([3, 1, 5, 0, 2, 4])
    shuffled = Predictions(mixed, LABEL[mixed], PROBABILITIES[mixed], ("写真", "label", "c", "d"))
    write_predictions(tmp_path, 7, shuffled)
    rules = {"last": "7,0.5", "oracle": "3,0.5", "best_validation": ","}
    columns = ",".join(f"{rule}_round,{rule}_target_accuracy" for rule in rules)
    (tmp_path / "summary.csv").write_text(f"method,target,seed,{columns}\nfedavg,d,0,{','.join(rules.values())}\n")
    found = read_predictions(tmp_path, "last")
    assert found.index.tolist() == list(range(6))
    assert np.array_equal(found.label, LABEL)
    assert np.array_equal(found.probabilities, PROBABILITIES)
    frame = found.frame()
    assert frame["label"].tolist() == ["写真"] * 3 + ["label"] * 2 + ["c"]
    assert frame["label (p)"].iloc[3] == pytest.approx(0.8)
    for rule in ("oracle", "best_validation"):
        with pytest.raises(UserError, match="no predictions were kept"):
            read_predictions(tmp_path, rule)
    predictions_file(tmp_path, 7).write_bytes(b"nonsense")
    with pytest.raises(UserError, match="not readable predictions"):
        read_predictions(tmp_path, "last")
    assert len(pooled([found, found]).label) == 12
    with pytest.raises(UserError, match="different classes"):
        pooled([found, SMALL])


def test_only_selected_rounds_stay(tmp_path):
    """Best validation selects round 2, the oracle round 1, and the last round is 4."""
    for round_ in range(1, 5):
        write_predictions(tmp_path, round_, SMALL)
    rounds = pd.DataFrame({"round": range(5), "mean_validation_accuracy": [0.1, 0.2, 0.9, 0.3, 0.4]})
    rounds["target_accuracy"] = [0.9, 0.8, 0.5, 0.6, 0.7]
    keep_selected(tmp_path, rounds, "mean_validation_accuracy")
    assert {file.stem for file in (tmp_path / "predictions").iterdir()} == {"round000001", "round000002", "round000004"}


@pytest.mark.parametrize("method", ["fedavg", "fedig-a"])
def test_a_run_keeps_what_its_rules_select(tmp_path, method):
    """Accuracy from the kept predictions is the recorded one, for each rule; a resumed run keeps the same bytes."""
    folder, _ = run_small(small_experiment(tmp_path / "a", method))
    summary = pd.read_csv(folder / "summary.csv").iloc[0]
    for rule in ("best_validation", "last", "oracle"):
        found = read_predictions(folder, rule)
        assert METRICS["accuracy"].of(found) == pytest.approx(summary[f"{rule}_target_accuracy"])
        assert found.probabilities.sum(axis=1) == pytest.approx(np.ones(len(found.label)), abs=1e-5)
    rounds = pd.read_csv(folder / "rounds.csv")
    kept = {int(select(rounds, rule)["round"]) for rule in ("best_validation", "last", "oracle")}
    files = {predictions_file(folder, round_) for round_ in kept}
    assert set((folder / "predictions").iterdir()) == files
    again = small_experiment(tmp_path / "b", method, run={"checkpoint_every": 2})
    with pytest.raises(KeyboardInterrupt):
        run_small(again, Interrupt(1))
    other, _ = run_small(again)
    assert {file.name: file.read_bytes() for file in (other / "predictions").iterdir()} == {
        file.name: file.read_bytes() for file in files
    }


def test_predictions_can_be_left_out(tmp_path):
    """This is useful for targets with a hundred thousand images."""
    folder, _ = run_small(small_experiment(tmp_path, run={"keep_predictions": False}))
    assert not (folder / "predictions").exists()


def with_predictions(folder, quality, seed=0):
    """Give a run predictions whose accuracy is `quality`, and which are too confident."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 3, 200)
    taken = np.where(rng.random(200) < quality, label, (label + 1) % 3)
    probabilities = np.full((200, 3), 0.02)
    probabilities[np.arange(200), taken] = 0.96
    chosen = pd.read_csv(folder / "summary.csv")["best_validation_round"].iloc[0]
    predictions = Predictions(np.arange(200), label, probabilities, ("dog", "cat|", "house"))
    write_predictions(folder, int(chosen), predictions)
    return predictions


@pytest.fixture
def outputs(tmp_path):
    """Two methods on two targets with two seeds; csac is better, and one run of fedavg has no predictions."""
    folder = write_grid(tmp_path, {"fedavg": 0.0, "csac": 0.0}, rounds=2, targets=("photo", "sketch"))
    for run in folder.glob("*/*/seed*"):
        if run.parts[-3:] != ("fedavg", "sketch", "seed1"):
            with_predictions(run, 0.9 if "csac" in run.parts else 0.6, int(run.name[-1]))
    return folder


@pytest.mark.parametrize(
    "metric", [name for name, one in METRICS.items() if one.read is read_predictions and not one.primary]
)
def test_compare_takes_a_metric(outputs, metric):
    """Cells, differences and ranks are those of the metric; the cell of a run without predictions is missing."""
    runs = read_runs(outputs)
    comparison = compare(runs, baseline="fedavg", metric=metric)
    cells = comparison.cells.set_index(["label", "target"])["mean"]
    own = [METRICS[metric].of(read_predictions(outputs / "csac" / "photo" / f"seed{seed}")) for seed in range(2)]
    assert cells["csac", "photo"] == pytest.approx(np.mean(own))
    methods = comparison.methods.set_index("label")
    assert methods["rank"].to_dict() == {"csac": 1, "fedavg": 2}
    assert methods.loc["csac", "pairs"] == 3
    assert (methods.loc["csac", "difference"] < 0) == (metric == "ece")
    assert any("fedavg: sketch (seed 1)" in note for note in comparison.notes)
    assert comparison.published.empty
    text = comparison.render("table")
    assert METRICS[metric].title in text
    assert ("Less is better" in text) == (metric == "ece")
    assert f"**{100 * cells['csac', 'photo']:.1f}**" in comparison.render("markdown")


def test_the_verb_takes_a_metric(outputs):
    words = ["compare", str(outputs), "--metric"]
    result = CliRunner().invoke(app, [*words, "macro_f1"])
    assert result.exit_code == 0, result.output
    assert "macro F1 on the unseen domain" in result.output
    assert (outputs / "comparison-macro_f1.csv").is_file()
    assert not (outputs / "comparison.csv").exists()
    assert "did you mean 'macro_f1'" in str(CliRunner().invoke(app, [*words, "macrof1"]).exception)
    for file in outputs.rglob("round*.safetensors"):
        file.unlink()
    assert "ece needs kept predictions" in str(CliRunner().invoke(app, [*words, "ece"]).exception)


def test_confusion_is_drawn_per_target(outputs):
    """There is a panel per target, pooled over seeds; cells are shares of the row's class."""
    figure = dict(draw(read_runs(outputs), "pacs"))["confusion-csac"]
    assert [axes.get_title() for axes in figure.axes] == ["unseen: photo", "unseen: sketch"]
    assert figure.get_suptitle().endswith("\n(best source validation)")
    runs = [read_predictions(outputs / "csac" / "photo" / f"seed{seed}") for seed in range(2)]
    matrix = confusion_matrix(pooled(runs))
    shown = figure.axes[0].get_images()[0].get_array()
    assert shown[0].tolist() == pytest.approx((100 * matrix[0] / matrix[0].sum()).tolist())
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["dog", "cat|", "house"]


def test_the_report_has_more_than_accuracy(outputs, unrendered):
    """It has a column per metric, and the accuracy of each class; without predictions there is no such section."""
    text = write_report(outputs).read_text()
    assert "<h3>More than accuracy</h3>" in text
    assert "expected calibration error" in text
    folded = text[text.index("Confusion matrices, one figure per method") :]
    assert folded[: folded.index("</details>")].count("<img") == 2
    assert "Missing (\N{EN DASH} marks empty cells): fedavg: sketch (seed 1)." in text
    assert "cat|" in text
    recall = per_class_accuracy(
        pooled(
            [read_predictions(run) for target in ("photo", "sketch") for run in (outputs / "csac" / target).iterdir()]
        )
    )[0]
    assert f">{100 * recall:.1f}</td>" in text
    for file in outputs.rglob("round*.safetensors"):
        file.unlink()
    assert "More than accuracy" not in write_report(outputs).read_text()


def test_a_run_removes_predictions_on_the_way_when_they_are_many_or_large(tmp_path, monkeypatch):
    for round_ in (1, 2, 3):
        write_predictions(tmp_path, round_, SMALL)
    assert not predictions.too_many(tmp_path)
    monkeypatch.setattr(predictions, "UNREMOVED_FILES", 2)
    assert predictions.too_many(tmp_path)
    monkeypatch.setattr(predictions, "UNREMOVED_FILES", 3)
    assert not predictions.too_many(tmp_path)
    monkeypatch.setattr(predictions, "UNREMOVED_BYTES", 3 * predictions_file(tmp_path, 1).stat().st_size - 1)
    assert predictions.too_many(tmp_path)
    assert not predictions.too_many(tmp_path / "empty")


def test_a_run_that_diverged_leaves_the_others_their_metrics(outputs, unrendered):
    """Its probabilities are NaN. It ended a table, and the whole report, in an unexpected error."""
    run = outputs / "csac" / "photo" / "seed0"
    round_ = int(pd.read_csv(run / "summary.csv")["best_validation_round"][0])
    wrong = PROBABILITIES.copy()
    wrong[2] = np.nan
    write_predictions(run, round_, Predictions(np.arange(6), LABEL, wrong, ("a", "b", "c", "d")))
    with pytest.raises(UserError, match="some probabilities are no numbers"):
        read_predictions(run)
    table = compare(read_runs(outputs), metric="auroc")
    assert any(note.startswith("Not computed: ") and "no numbers" in note for note in table.notes)
    assert table.cells["mean"].notna().any()
    assert "no numbers" in write_report(outputs).read_text()


def test_a_metric_of_another_task_is_not_advised(outputs):
    """To keep predictions would not give a classification a Dice."""
    for metric in ("dice", "surface_distance"):
        with pytest.raises(UserError, match=f"no {metric}, a metric of another task; theirs are accuracy, ") as caught:
            compare(read_runs(outputs), metric=metric)
        assert "keep_predictions" not in str(caught.value)
