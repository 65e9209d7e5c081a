"""Metrics of predictions on numbers worked out by hand, files of predictions, and the rounds that are kept."""

import math
import shutil

import numpy as np
import pandas as pd
import pytest
from invented import embedded, write_grid
from support import interrupt, run_small, tiny_experiment
from typer.testing import CliRunner

from fedsim.analysis import compare
from fedsim.analysis.figure_style import styles
from fedsim.analysis.metrics import METRICS, confusion_matrix, expected_calibration_error, per_class_accuracy
from fedsim.analysis.prediction_figures import reliability_figure
from fedsim.analysis.report import more_than_accuracy, write_report
from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.records import read_runs
from fedsim.records.doubt import DOUBTS
from fedsim.records.predictions import (
    Predictions,
    keep_selected,
    pooled,
    predictions_file,
    read_predictions,
)
from fedsim.records.selection import RULES

# Six images of three classes and none of the fourth: a is right 2 of 3, b 1 of 2, c 0 of 1 (taken for b).
LABEL = np.array([0, 0, 0, 1, 1, 2])
ROWS = [[7, 1, 1, 1], [6, 3, 1, 0], [2, 5, 2, 1], [1, 8, 1, 0], [4, 3, 3, 0], [1, 5, 4, 0]]
PROBABILITIES = np.array(ROWS, dtype=np.float32) / 10
SMALL = Predictions(np.arange(6), LABEL, PROBABILITIES, ("a", "b", "c", "d"))
OF_CLASSES = [name for name, metric in METRICS.items() if "classification" in metric.tasks and name != "accuracy"]
OTHERS = [name for name in OF_CLASSES if name not in DOUBTS]  # those of run.doubt: tests/runs/test_doubt.py


def test_metrics_by_hand():
    """Accuracy 3/6; recalls 2/3, 1/2, 0; F1: a 2*2/(4+1+1) = 2/3, b 2*1/(2+2+1) = 2/5, c 0."""
    found = [METRICS[name].of(SMALL) for name in ("accuracy", "balanced_accuracy", "macro_f1")]
    assert found == pytest.approx([3 / 6, (2 / 3 + 1 / 2) / 3, (2 / 3 + 2 / 5) / 3])
    assert per_class_accuracy(SMALL) == pytest.approx([2 / 3, 1 / 2, 0, math.nan], nan_ok=True)
    assert confusion_matrix(SMALL).tolist() == [[2, 1, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    # AUROC of a: .7 .6 .2 against .1 .4 .1: 8 of 9. b: .8 .3 against .1 .3 .5 .5: 4 and 1.5 of 8. c: .4 above all: 1.
    assert METRICS["auroc"].of(SMALL) == pytest.approx((8 / 9 + 5.5 / 8 + 1) / 3)
    one_class = Predictions(np.arange(2), np.zeros(2, int), PROBABILITIES[:2], SMALL.classes)
    assert math.isnan(METRICS["auroc"].of(one_class))
    # Calibration in two bins: confidences .5 .4 .5 up to .5 (0 right, gap 1.4), .7 .6 .8 above (3 right, gap .9).
    assert expected_calibration_error(SMALL, bins=2) == pytest.approx((1.4 + 0.9) / 6, abs=1e-6)
    sure = Predictions(np.arange(2), np.array([0, 1]), np.array([[1.0, 0.0]] * 2), ("a", "b"))
    assert expected_calibration_error(sure) == pytest.approx(0.5)
    kept = {"m": {"t": pooled([SMALL] * 20), "u": pooled([SMALL] * 19)}}  # a point of 19 images is left out
    points = [axes.lines[1].get_xydata() for axes in reliability_figure(kept, "e", styles("m"), [], "r").axes]
    assert [each.round().ravel().tolist() for each in points] == [[40, 0, 50, 0, 60, 100, 70, 100, 80, 100], [50, 0]]


def test_predictions_are_kept_as_they_are(tmp_path):
    """They are in the order of the images; the frame has the names of classes, even for a class called `label`."""
    mixed = np.array([3, 1, 5, 0, 2, 4])
    Predictions(mixed, LABEL[mixed], PROBABILITIES[mixed], ("写真", "label", "c", "d")).write(tmp_path, 7)
    rules = {"last": "7,0.5", "oracle": "3,0.5", "best_validation": ","}
    columns = ",".join(f"{rule}_round,{rule}_target_accuracy" for rule in rules)
    (tmp_path / "summary.csv").write_text(f"method,target,seed,{columns}\nfedavg,d,0,{','.join(rules.values())}\n")
    found = read_predictions(tmp_path, "last")
    assert found.index.tolist() == list(range(6))
    assert all(map(np.array_equal, (found.label, found.probabilities), (LABEL, PROBABILITIES)))
    assert found.frame()["label"].tolist() == ["写真"] * 3 + ["label"] * 2 + ["c"]
    assert found.frame()["label (p)"].iloc[3] == pytest.approx(0.8)
    for rule in ("oracle", "best_validation"):
        with pytest.raises(UserError, match="no predictions were kept"):
            read_predictions(tmp_path, rule)
    predictions_file(tmp_path, 7).write_bytes(b"nonsense")
    with pytest.raises(UserError, match="the predictions cannot be read"):
        read_predictions(tmp_path, "last")
    assert len(pooled([found, found]).label) == 12
    with pytest.raises(UserError, match="different classes"):
        pooled([found, SMALL])


def test_only_selected_rounds_stay(tmp_path):
    """Best validation selects round 2, the oracle round 1, and the last round is 4."""
    for round_ in range(1, 5):
        SMALL.write(tmp_path, round_)
    rounds = pd.DataFrame({"round": range(5), "mean_validation_accuracy": [0.1, 0.2, 0.9, 0.3, 0.4]})
    rounds["target_accuracy"] = [0.9, 0.8, 0.5, 0.6, 0.7]
    keep_selected(tmp_path, rounds, "mean_validation_accuracy")
    assert {file.stem for file in (tmp_path / "predictions").iterdir()} == {"round000001", "round000002", "round000004"}


def test_a_run_keeps_what_its_rules_select(tmp_path):
    method = {"name": "fedavg", "infer": "recompute"}  # with statistics of the images themselves
    folder, _ = run_small(tiny_experiment(tmp_path / "a", method, rounds=3))
    summary = pd.read_csv(folder / "summary.csv").iloc[0]
    for rule in RULES:
        found = read_predictions(folder, rule)
        assert METRICS["accuracy"].of(found) == pytest.approx(summary[f"{rule}_target_accuracy"])
        assert found.probabilities.sum(axis=1) == pytest.approx(np.ones(len(found.label)), abs=1e-5)
    kept = {file: file.read_bytes() for file in (folder / "predictions").iterdir()}
    assert set(kept) == {predictions_file(folder, int(summary[f"{rule}_round"])) for rule in RULES}
    again = tiny_experiment(tmp_path / "b", method, rounds=3, run={"checkpoint_every": 2})
    interrupt(again, 1)
    other, _ = run_small(again)
    assert {file.name: file.read_bytes() for file in (other / "predictions").iterdir()} == {
        file.name: content for file, content in kept.items()
    }
    without, _ = run_small(tiny_experiment(tmp_path / "c", rounds=1, run={"keep_predictions": False}))
    assert not (without / "predictions").exists()


def add_predictions(run, right, diverged):
    """Predictions of three classes with this share of right ones, which are too confident, or NaN."""
    rng = np.random.default_rng(int(run.name[-1]))
    label = rng.integers(0, 3, 200)
    taken = np.where(rng.random(200) < right, label, (label + 1) % 3)
    probabilities = np.full((200, 3), 0.02)
    probabilities[np.arange(200), taken] = np.nan if diverged else 0.96
    round_ = pd.read_csv(run / "summary.csv")["best_validation_round"].iloc[0]
    Predictions(np.arange(200), label, probabilities, ("dog", "cat|", "house")).write(run, int(round_))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Two methods on two targets with two seeds; one run of fedavg has no predictions and one has diverged."""
    methods = {"fedavg": 0.0, "fedprox": 0.0}
    folder = write_grid(tmp_path_factory.mktemp("outputs"), methods, rounds=2, targets=("photo", "sketch"))
    for run in folder.glob("*/*/seed*"):
        if run.parts[-3:] != ("fedavg", "sketch", "seed1"):
            right = 0.9 if "fedprox" in run.parts else 0.6
            add_predictions(run, right, run.parts[-3:] == ("fedavg", "photo", "seed0"))
    return folder


@pytest.mark.parametrize("metric", OTHERS)
def test_compare_takes_a_metric(outputs, metric):
    comparison = compare(read_runs(outputs, only=["summary"]), baseline="fedavg", metric=metric)
    cells = comparison.cells.set_index(["label", "target"])["mean"]
    own = [METRICS[metric].of(read_predictions(outputs / "fedprox" / "photo" / f"seed{seed}")) for seed in range(2)]
    assert cells["fedprox", "photo"] == pytest.approx(np.mean(own))
    methods = comparison.methods.set_index("label")
    assert methods["rank"].to_dict() == {"fedprox": 1, "fedavg": 2}
    assert (methods["pairs"]["fedprox"], methods["difference"]["fedprox"] < 0) == (2, metric == "ece")
    worst = max if metric == "ece" else min
    assert methods["worst"]["fedprox"] == worst(cells["fedprox", "photo"], cells["fedprox", "sketch"])
    text, notes = comparison.render("table"), " ".join(comparison.notes)
    assert f"Worst: the {'greatest' if metric == 'ece' else 'least'} mean over seeds" in notes
    for words in ("fedavg: photo (seed 0), sketch (seed 1)", "Not computed: ", "some probabilities are no numbers"):
        assert words in notes
    assert (METRICS[metric].title in text, "Less is better" in text) == (True, metric == "ece")
    assert f"**{100 * cells['fedprox', 'photo']:.1f}**" in comparison.render("markdown")


def test_the_verb_takes_a_metric(outputs, tmp_path):
    folder = shutil.copytree(outputs, tmp_path / "pacs")
    shown = CliRunner().invoke(app, ["compare", str(folder), "--metric", "macro_f1"]).output
    assert "macro F1 on the unseen domain" in shown
    assert [file.name for file in folder.glob("comparison*")] == ["comparison-macro_f1.csv"]
    for file in folder.rglob("round*.safetensors"):
        file.unlink()
    runs = read_runs(folder)
    assert more_than_accuracy(runs, compare(runs), []) == (None, None)
    for metric, said in (
        ("macrof1", "did you mean 'macro_f1'"), ("ece", "ece needs kept predictions.*keep_predictions"),
        ("dice", "no dice, a metric of another task; theirs are accuracy, "),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            compare(runs, metric=metric)


def test_the_report_has_more_than_accuracy(outputs, unrendered):
    """It has a column per metric, the accuracy of each class, and a reason for what is missing."""
    text = write_report(outputs).read_text()
    matrices = {run["run"]: run["confusion"]["matrix"] for run in embedded(text)["runs"] if run["confusion"]}
    assert matrices[run := "fedprox/photo/seed1"] == confusion_matrix(read_predictions(outputs / run)).tolist()
    assert "fedavg/photo/seed0" not in matrices
    missing = "Missing (\N{EN DASH} marks empty cells): fedavg: photo (seed 0), sketch (seed 1)."
    recall = per_class_accuracy(pooled([read_predictions(run) for run in outputs.glob("fedprox/*/seed*")]))[0]
    for part in ("<h3>More than accuracy</h3>", "expected calibration error", "cat|", missing, "no numbers",
                 f">{100 * recall:.1f}</td>"):  # fmt: skip
        assert part in text
