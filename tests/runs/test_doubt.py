"""`run.doubt`: temperature and threshold by hand, fitted by clients in sums; what the run and its model then say."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file
from support import interrupt, numbers, run_small, small_experiment, tiny_experiment
from typer.testing import CliRunner

import fedsim
from fedsim.analysis import compare
from fedsim.commands.cli import app
from fedsim.common.doubt import BINS, Doubt, fit_temperature, mean_loss, score_counts, slopes, softmax, threshold_of
from fedsim.common.errors import ClientFailedError, UserError
from fedsim.data import load_client
from fedsim.export.card import card
from fedsim.export.files import export
from fedsim.export.inference import predict
from fedsim.records import read_runs
from fedsim.records.doubt import calibrated_loss, coverage, read_doubt, read_doubted, set_size
from fedsim.records.predictions import Predictions
from fedsim.runs.plan import resolve
from fedsim.runs.workspace import close_workspaces
from fedsim.settings.experiment import from_table
from fedsim.tensors.arrays import record_to_arrays, state_to_record

LOGITS, LABELS = np.array([[4.0, 0], [0, 3], [2, 0]]), np.array([0, 1, 1])
ASKED = {"run": {"doubt": 0.1}, "train": {"rounds": 2}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder of a small run, its grid with all messages)."""
    close_workspaces()
    folder, grid = run_small(small_experiment(tmp_path_factory.mktemp("doubt"), **ASKED))
    close_workspaces()
    return folder, grid


def fitted(logits, labels):
    return fit_temperature(lambda grid: slopes(logits, labels, grid))


def with_scores(scores):
    """Probabilities of two classes, with which label 0 has these scores."""
    scores = np.array(scores)
    return np.stack([1 - scores, scores], axis=1), np.zeros(len(scores), int)


def test_temperature_by_hand():
    """Of three examples, one of which is wrong; one that is always right has the least, one always wrong the greatest
    temperature."""
    temperature = fitted(LOGITS, LABELS)
    assert temperature == pytest.approx(2.5181886274, abs=1e-10)
    assert mean_loss(softmax(LOGITS / temperature), LABELS) == pytest.approx(0.5394214047, abs=1e-10)
    assert slopes(LOGITS, LABELS, np.array([1.0]))[0] == pytest.approx(
        7 - 4 * 0.9820138 - 3 * 0.9525741 - 2 * 0.8807971
    )
    assert fitted(LOGITS[:2], LABELS[:2]) == 1 / 16
    assert fitted(LOGITS[2:], LABELS[2:]) == 16
    shares = [slopes(LOGITS[part], LABELS[part], np.array([0.5, 2])) for part in (slice(1), slice(1, 3))]
    np.testing.assert_allclose(sum(shares), slopes(LOGITS, LABELS, np.array([0.5, 2])))  # sites add up


@pytest.mark.parametrize(("alpha", "threshold"), [(0.2, 0.8), (0.1, 0.9), (0.5, 0.5), (0.05, 1.0), (0.21, 0.8)])
def test_threshold_by_hand(alpha, threshold):
    """Of the nine scores .1 to .9, the k-th is taken: k = 8 of .2; 10 of .05 are more than there are."""
    counts = score_counts(*with_scores(np.arange(1, 10) / 10))
    assert np.flatnonzero(counts).tolist() == [99, 199, 299, 399, 499, 599, 699, 799, 899]
    assert threshold_of(counts, alpha) == threshold


def test_scores_at_the_ends():
    """0 is in the first interval and 1 in the last; without any example every class is in the set."""
    counts = score_counts(*with_scores([0.0, 0.0004, 1.0]))
    assert counts[0] == 2
    assert counts[-1] == 1
    assert threshold_of(np.zeros(BINS, int), 0.1) == 1.0


def test_sets_by_hand():
    """At temperature 2 the probabilities .9, .1 are .75, .25; a set has its ends, and may be empty."""
    probabilities = np.array([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8]])
    doubt = Doubt(0.1, 2.0, 0.5)
    calibrated = doubt.calibrated(probabilities)
    np.testing.assert_allclose(calibrated, [[0.75, 0.25], [0.5, 0.5], [1 / 3, 2 / 3]])
    assert doubt.sets(calibrated).tolist() == [[True, False], [True, True], [False, True]]
    assert Doubt(0.1, 1.0, 0.3).sets(np.array([[0.7, 0.3], [0.6, 0.4]])).tolist() == [[True, False], [False, False]]
    content = Predictions(np.arange(3), np.array([0, 1, 0]), probabilities, ("a", "b")), doubt
    assert coverage(content) == pytest.approx(2 / 3)
    assert set_size(content) == pytest.approx(4 / 3)
    assert calibrated_loss(content) == pytest.approx(-np.log([0.75, 0.5, 1 / 3]).mean())


def test_fitted_by_the_clients(run):
    """What the clients' sums give is what their validation rows together give, of the model of the selected round."""
    folder, grid = run
    record = json.loads((folder / "environment.json").read_text())["doubt"]
    experiment = fedsim.load(folder).experiment
    logits, labels = validation_of(folder, experiment)
    assert sum(record["examples"].values()) == len(labels)
    assert record["temperature"] == pytest.approx(fitted(logits, labels), rel=1e-6)
    counts = score_counts(softmax(logits / record["temperature"]), labels)
    assert record["threshold"] == pytest.approx(threshold_of(counts, 0.1), abs=1.5 / BINS)
    asked = [message for message, _ in grid.seen if message.metadata.message_type == "query.doubt"]
    assert len(asked) == 4 * 3  # three grids of temperatures and the scores, of three sources


def validation_of(folder, experiment):
    """([N, classes] logits of the run's best model, [N] labels) of the validation rows of all sources."""
    model = fedsim.load(folder)
    logits, labels = [], []
    for client in resolve(experiment).clients:
        data = load_client(experiment.data, client, experiment.run.target)
        images = torch.from_numpy(np.ascontiguousarray(data.images[data.validation]))
        with torch.inference_mode():
            logits.append(model(images).numpy())
        labels.append(data.labels[data.validation])
    return np.concatenate(logits), np.concatenate(labels)


def test_other_records_are_those_of_a_run_without(run, tmp_path):
    """Without `run.doubt` no client is asked, and the rounds, the clients and the models are the same."""
    folder, _ = run
    close_workspaces()
    plain, grid = run_small(small_experiment(tmp_path, train={"rounds": 2}))
    assert not [message for message, _ in grid.seen if message.metadata.message_type == "query.doubt"]
    for name in ("rounds.csv", "clients.csv"):
        pd.testing.assert_frame_equal(numbers(folder / name), numbers(plain / name))
    np.testing.assert_equal(load_file(folder / "best.safetensors"), load_file(plain / "best.safetensors"))
    columns = pd.read_csv(folder / "summary.csv").columns.difference(pd.read_csv(plain / "summary.csv").columns)
    assert set(columns) == {
        "target_coverage", "target_set_size", "target_calibrated_ece", "target_calibrated_loss"
    }  # fmt: skip
    with pytest.raises(UserError, match=r"nothing was fitted to the sources' validation; run it with run.doubt = 0.1"):
        read_doubted(plain)
    with pytest.raises(UserError, match=r"holds a run with other settings \(run.doubt\)"):
        run_small(small_experiment(tmp_path, **ASKED))


def test_metrics_of_a_comparison(run):
    """`compare --metric` has the coverage and the size of the sets on the unseen domain, as summary.csv."""
    folder, _ = run
    summary = pd.read_csv(folder / "summary.csv").iloc[0]
    for metric in ("coverage", "set_size", "calibrated_ece", "calibrated_loss"):
        comparison = compare(read_runs(folder), metric=metric)
        assert comparison.cells["mean"][0] == pytest.approx(summary[f"target_{metric}"])
    predictions, doubt = read_doubted(folder)
    is_covered = 1 - doubt.calibrated(predictions.probabilities)[np.arange(len(predictions.label)), predictions.label]
    assert summary["target_coverage"] == pytest.approx((is_covered <= doubt.threshold).mean())


def test_predictions_and_exported_model(run, tmp_path):
    """`fedsim predict` and both kinds of exported files give the same calibrated probabilities and sets."""
    folder = shutil.copytree(run[0], tmp_path / "seed0")
    model = fedsim.load(folder)
    file = tmp_path / "image.png"
    Image.fromarray(np.arange(784, dtype=np.uint8).reshape(28, 28)).save(file)
    row = predict(model, [file]).iloc[0]
    probabilities = row[[f"p({name})" for name in model.classes]].to_numpy(float)[None]
    calibrated = model.doubt.calibrated(probabilities)
    assert row["probability_calibrated"] == pytest.approx(calibrated.max())
    inside = [name for name, chosen in zip(model.classes, model.doubt.sets(calibrated)[0]) if chosen]
    assert row["set"] == " | ".join(inside)
    shown = CliRunner().invoke(app, ["predict", str(folder), str(file)])
    assert "set (90 %)" in shown.output
    assert "set (90 %)" not in CliRunner().invoke(app, ["predict", str(folder), str(file), "--which", "last"]).output
    export(model, "torch", tmp_path / "best.pt2")
    logits, soft, sets = torch.export.load(tmp_path / "best.pt2").module()(model.prepare([file]))
    np.testing.assert_allclose(soft.detach().numpy(), calibrated, atol=1e-5)
    assert sets.tolist() == model.doubt.sets(calibrated).tolist()
    torch.testing.assert_close(logits, model(model.prepare([file])), atol=1e-4, rtol=0)
    text = card(model)
    assert "shall have the true class in 90 % of all cases" in text
    assert "the slope of the validation loss at 3 x 65 temperatures" in text


def test_after_an_interruption(run, tmp_path):
    """A run that was interrupted fits the same when it is continued, also where all its rounds were played before."""
    experiment = small_experiment(tmp_path, **ASKED)
    close_workspaces()
    folder = interrupt(experiment, 2)
    assert read_doubt(folder) is None
    close_workspaces()
    run_small(experiment)
    assert read_doubt(folder) == read_doubt(run[0])


def damaged(change):
    """A function that changes the counts in the reply of rot15."""

    def tamper(message, reply):
        config = message.content["config"]
        if config["phase"] == "doubt" and config["client"] == "rot15" and "temperature" in config:
            arrays = record_to_arrays(reply.content["doubt"])
            reply.content["doubt"] = state_to_record({"counts": change(arrays["counts"])})
        return reply

    return tamper


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda counts: counts + 1, "its counts of scores are not those of"),
        (lambda counts: np.where(counts > 0, -counts, counts), "its counts of scores are not those of"),
        (lambda counts: counts[:-1], r"tensor 'counts' is int64\[999\], expected int64\[1000\]"),
        (lambda counts: counts.astype(np.float64), "tensor 'counts' is float64"),
    ],
)
def test_refused_sums(tmp_path, change, reason):
    """Counts that cannot be true are that client's failure; the run goes on without them where it may."""
    close_workspaces()
    with pytest.raises(ClientFailedError, match=f"sums refused: {reason}"):
        run_small(tiny_experiment(tmp_path / "a", run={"doubt": 0.1}), tamper=damaged(change))
    close_workspaces()
    settings = {"doubt": 0.1, "on_client_failure": "continue"}
    folder, _ = run_small(tiny_experiment(tmp_path / "b", run=settings), tamper=damaged(change))
    assert list(json.loads((folder / "environment.json").read_text())["doubt"]["examples"]) == ["rot0", "rot30"]


def without_sums(clients, questions):
    """A function that damages the replies of these clients to some of the questions, which are counted from 0."""
    asked = dict.fromkeys(clients, 0)

    def tamper(message, reply):
        config = message.content["config"]
        if config["phase"] == "doubt" and config["client"] in clients:
            if asked[config["client"]] in questions:
                reply.content["doubt"] = state_to_record({"none": np.zeros(1)})
            asked[config["client"]] += 1
        return reply

    return tamper


def test_a_source_that_did_not_answer_is_named(tmp_path, caplog):
    """What is fitted is no promise about its domain: the log, the comparison and the card say so."""
    close_workspaces()
    settings = {"doubt": 0.1, "on_client_failure": "continue"}
    folder, _ = run_small(tiny_experiment(tmp_path, run=settings), tamper=without_sums(["rot15"], range(4)))
    record = json.loads((folder / "environment.json").read_text())["doubt"]
    assert record["missing"] == ["rot15"]
    assert "run.doubt: it is fitted without rot15, which did not answer" in caplog.text
    runs = read_runs(folder)
    (note,) = [text for text in compare(runs, metric="coverage").notes if "rot15" in text]
    assert note == "The sets and the temperature are fitted without some of the sources in seed0 (rot15)."
    assert not any("rot15" in text for text in compare(runs).notes)
    assert "Not all sources answered: it is fitted without rot15." in card(fedsim.load(folder))


@pytest.mark.parametrize(
    ("lost", "questions"),
    [(["rot15"], [0]), (["rot15"], [1, 2]), (["rot0", "rot15", "rot30"], [0]), (["rot0", "rot15", "rot30"], [1])],
)
def test_a_temperature_between_the_sums_of_unlike_sources_is_not_fitted(tmp_path, caplog, lost, questions):
    """The second grid lies between two temperatures of the first, where the slope of fewer sources need not be 0."""
    close_workspaces()
    settings = {"doubt": 0.1, "on_client_failure": "continue"}
    folder, _ = run_small(tiny_experiment(tmp_path, run=settings), tamper=without_sums(lost, questions))
    assert read_doubt(folder) is None
    assert "run.doubt: not all questions were answered by the same clients, so that nothing is fitted" in caplog.text


@pytest.mark.parametrize(
    ("method", "more", "reason"),
    [
        ({"name": "fedavg", "infer": "recompute"}, {}, "recompute predicts on the unseen domain in another way"),
        ({"name": "fedavg", "fuse": "private_mean"}, {}, "without the noise of private_mean"),
        ("fedavg", {"train": {"dp_clip": 1.0}, "model": {"backbone": "digits-cnn"}}, "would leave the client without"),
    ],
)
def test_refusals(tmp_path, method, more, reason):
    """One line says why nothing can be fitted."""
    close_workspaces()
    with pytest.raises(UserError, match=reason):
        run_small(tiny_experiment(tmp_path, method, run={"doubt": 0.1}, **more))


def test_other_tasks_are_refused():
    """Sets are of classes."""
    experiment = from_table({"data": {"dataset": "digit-masks"}, "run": {"doubt": 0.1}, "model": {"backbone": "unet"}})
    with pytest.raises(UserError, match=r"run.doubt: it makes sets of classes, and the task here is segmentation"):
        resolve(experiment)
