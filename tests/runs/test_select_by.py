"""The round selected by another metric than the task's own: the loss, macro F1 or AUROC of the sources' validation."""

import json

import numpy as np
import pandas as pd
import pytest
from flwr.app import MetricRecord
from sklearn.metrics import f1_score, roc_auc_score
from support import run_small, tiny_experiment

from fedsim.analysis import compare
from fedsim.common.errors import UserError
from fedsim.common.measures import auroc, macro_f1, of_classes
from fedsim.common.tasks import less_is_better
from fedsim.data.benchmarks import benchmark
from fedsim.records import read_runs
from fedsim.records.selection import rule_title, select, validation_column
from fedsim.runs.origin import round_of
from fedsim.runs.plan import resolve
from fedsim.settings.experiment import read_experiment

COLUMN = {"loss": "mean_validation_loss", "macro_f1": "mean_validation_macro_f1", "auroc": "mean_validation_auroc"}


def by(folder, name, **run):
    return tiny_experiment(folder, rounds=4, run={"select_by": name, **run}, train={"lr": 0.1})


def test_the_metrics_by_hand():
    """Four images, two classes: F1 of class 0 is 2/3 and of class 1 is 4/5. AUROC with one class is not defined."""
    label, predicted = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1])
    assert macro_f1(label, predicted) == pytest.approx((2 / 3 + 4 / 5) / 2)
    first = np.array([0.9, 0.4, 0.5, 0.1])  # of the pairs (0, 1): 0.9 > 0.5, 0.9 > 0.1, 0.4 < 0.5, 0.4 > 0.1
    assert auroc(label, np.stack([first, 1 - first], axis=1)) == pytest.approx(3 / 4)
    assert np.isnan(of_classes("auroc", np.zeros(3, int), np.full((3, 2), 0.5)))


def test_the_metrics_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    label, probabilities = rng.integers(0, 4, 60), rng.dirichlet(np.ones(4), 60)
    predicted = probabilities.argmax(axis=1)
    assert macro_f1(label, predicted) == pytest.approx(f1_score(label, predicted, average="macro"))
    assert auroc(label, probabilities) == pytest.approx(roc_auc_score(label, probabilities, multi_class="ovr"))


def check_best(folder, column):
    """Summary, model and predictions are of the best round by this column."""
    rounds = pd.read_csv(folder / "rounds.csv").query("round >= 1").set_index("round")[column]
    best = int(rounds.idxmin() if less_is_better(column) else rounds.idxmax())
    assert pd.read_csv(folder / "summary.csv")["best_validation_round"].item() == best
    assert round_of(folder / "best.safetensors") == best
    assert (folder / "predictions" / f"round{best:06d}.safetensors").is_file()


@pytest.mark.parametrize("name", COLUMN)
def test_the_best_round_is_that_of_the_metric(name, tmp_path):
    folder, _ = run_small(by(tmp_path, name))
    check_best(folder, COLUMN[name])
    clients = pd.read_csv(folder / "clients.csv")
    if name != "loss":
        assert clients[f"validation_{name}"].notna().all()


def test_a_loss_selects_another_round_than_the_accuracy(tmp_path):
    """By hand: the accuracy grows to round 3, the loss is least in round 2."""
    rounds = pd.DataFrame({
        "round": [0, 1, 2, 3], "mean_validation_accuracy": [0.1, 0.5, 0.6, 0.7], "mean_validation_loss": [3, 2, 1, 1.5],
        "target_accuracy": 0.5,
    })  # fmt: skip
    assert select(rounds, column=validation_column(by(tmp_path, "primary")))["round"] == 3
    assert select(rounds, column=validation_column(by(tmp_path, "loss")))["round"] == 2


def hospitals(folder, name):
    """A run on tables, of which one hospital selects the round and trains nothing."""
    changes = ["train.rounds=3", f"run.select_by={name}", f"run.output={folder}"]
    hospital, target = benchmark(read_experiment("hospitals").data).domains[:2]
    return read_experiment("hospitals", [*changes, f"run.validation_domain={hospital}", f"run.target={target}"])


@pytest.mark.parametrize(("name", "column"), [
    ("auroc", "mean_local_validation_auroc"), ("loss", "mean_local_validation_loss"),
])  # fmt: skip
def test_of_the_local_models(name, column, tmp_path):
    check_best(run_small(by(tmp_path, name, select_on="local"))[0], column)


def test_the_loss_of_a_domain_that_no_client_has(tmp_path):
    check_best(run_small(resolve(hospitals(tmp_path, "loss")).experiment)[0], "validation_domain_loss")


def test_the_same_run_by_another_metric_has_the_same_model(tmp_path):
    """Only the selection differs; a comparison does not mix the two without a word, and says by what it selects."""
    first, _ = run_small(by(tmp_path / "a", "primary"))
    second, _ = run_small(by(tmp_path / "b", "auroc"))
    columns = ["round", "train_loss", "mean_validation_accuracy", "target_accuracy"]
    tables = [pd.read_csv(folder / "rounds.csv")[columns] for folder in (first, second)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)
    assert rule_title("best_validation", [by(tmp_path, "auroc")]) == "best source validation, by AUROC"
    notes = " ".join(compare(read_runs(tmp_path / "b")).notes)
    assert "by AUROC" in notes or "by AUROC" in compare(read_runs(tmp_path / "b")).title


def test_a_client_whose_images_have_one_class_has_no_auroc(tmp_path):
    """The mean is over the others, and `validated` says over how many."""

    def tamper(message, reply):
        config = message.content["config"]
        if config["phase"] == "evaluate" and config["client"] == "rot0":
            record = dict(reply.content["metrics"])
            record.pop("auroc")
            reply.content["metrics"] = MetricRecord(record)
        return reply

    folder, _ = run_small(by(tmp_path, "auroc"), tamper=tamper)
    rounds = pd.read_csv(folder / "rounds.csv").query("round >= 1")
    assert rounds["validated"].eq(2).all()
    assert rounds[COLUMN["auroc"]].notna().all()


def test_what_is_refused(tmp_path):
    """A held-out domain is evaluated by the primary metric and the loss; masks have neither F1 nor AUROC of classes."""
    with pytest.raises(UserError, match=r"run.validation_domain selects by the primary metric or the loss; set run\."):
        resolve(hospitals(tmp_path, "auroc"))
    masks = read_experiment("digit-masks", ["run.select_by=macro_f1"])
    with pytest.raises(UserError, match=r"run.select_by: macro_f1 is a metric of classes, which the task segment"):
        resolve(masks)


def test_the_hash_of_runs_without_the_setting_stays(tmp_path):
    usual, other = by(tmp_path, "primary"), by(tmp_path, "loss")
    assert usual.settings_hash() == tiny_experiment(tmp_path, rounds=4, train={"lr": 0.1}).settings_hash()
    assert usual.settings_hash() != other.settings_hash()
    assert "select_by" not in json.dumps(usual.preset)
