"""Runs of each task on tables: what is recorded, selected, compared and reported, and which rows run."""

import json
import math
import re

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from support import run_small
from torch.nn import functional as F
from torch.utils.data import Dataset

import fedsim
from fedsim.analysis.compare import compare
from fedsim.analysis.metrics import METRICS, metrics_of
from fedsim.analysis.report import write_report
from fedsim.common.errors import UserError
from fedsim.common.seeding import numpy_rng
from fedsim.common.tasks import TASKS
from fedsim.data import load_client, load_target, load_target_masks
from fedsim.data.scaling import moments_of, scale_of
from fedsim.export.features import plot_features
from fedsim.export.targets import evaluate_targets
from fedsim.export.trained import load_trained
from fedsim.methods.assembly import build_recipe
from fedsim.methods.table import METHODS
from fedsim.records.doubt import DOUBTS
from fedsim.records.reading import read_runs
from fedsim.records.selection import select
from fedsim.runs.plan import resolve
from fedsim.settings.experiment import Experiment, read_experiment

HOSPITALS = ("bern", "lyon", "oslo")
LABELS = {"regression": "days", "multi-label": ["flu", "cold", "rare"], "binary": "sick", "classification": "sick"}
# The rows that run where examples have no class and are no images: a test compares this list with what is refused.
WITHOUT_CLASSES = [
    "fedavg", "fedprox", "scaffold", "ditto", "fedbn", "silobn", "deepall", "feddg-ga", "mixup", "gfedavg", "fedavgm",
    "fedadam", "fedyogi", "fedadagrad", "krum", "qfedavg", "fednova", "fedomg", "feddyn", "fedcm", "fedsam",
    "mofedsam", "fedlesam", "fedlesam-s", "fedlesam-d", "fedgala", "fedgma", "afl",
    "rfa", "centered-clipping", "term", "fedasam", "fedasam-swa",
    "fedheal",
]  # fmt: skip


def patients(one_class=False):
    """Rows of three hospitals; Oslo has no patient with the label `rare`, and perhaps none that is sick."""
    rng = np.random.default_rng(0)
    rows = []
    for shift, hospital in enumerate(HOSPITALS):
        for _ in range(40):
            a, b, c = rng.normal(size=3)
            days = 50 + 8 * a - 5 * b + shift + rng.normal()
            is_oslo = hospital == "oslo"
            rows.append(
                {
                    "hospital": hospital, "a": a, "b": b, "c": c, "days": round(days, 2), "flu": int(a > 0),
                    "cold": int(b > 0), "rare": int(c > 0.5 and not is_oslo),
                    "sick": "yes" if days > 50 and not (one_class and is_oslo) else "no",
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def experiment(folder, task, *overrides, method="fedavg", target="oslo", one_class=False):
    """A run of two rounds on that table."""
    file = folder / "patients.csv"
    patients(one_class).to_csv(file, index=False)
    columns = {"features": ["a", "b", "c"], "label": LABELS[task], "domain": "hospital"}
    settings = {
        "name": task,
        "data": {"dataset": "arrays", "root": str(file), "task": task, "columns": columns},
        "model": {"backbone": "linear"},
        "train": {"rounds": 2, "batch_size": 8, "lr": 0.05},
        "method": {"name": method},
        "run": {"target": target, "output": str(folder / "outputs")},
    }
    text = folder / "experiment.json"
    given = Experiment(**settings)
    text.with_suffix(".toml").write_text(given.toml())
    return read_experiment(str(text.with_suffix(".toml")), list(overrides))


@pytest.mark.parametrize("task", ["regression", "multi-label", "binary"])
def test_a_run_is_recorded_selected_compared_and_reported(tmp_path, task):
    """Two methods and two unseen hospitals; every table and page follows the task's metric."""
    row = TASKS[task]
    for method in ("fedavg", "fedprox"):
        for target in ("bern", "oslo"):
            folder, _ = run_small(experiment(tmp_path, task, "train.rounds=3", method=method, target=target))
            rounds = pd.read_csv(folder / "rounds.csv")
            column = f"mean_validation_{row.metric}"
            best = rounds.loc[rounds["round"] > 0].set_index("round")[column]
            expected = best.idxmin() if row.less_is_better else best.idxmax()
            assert select(rounds, "best_validation", column)["round"] == expected
            tensors = load_file(folder / "best.safetensors")
            is_last = expected == 3
            same = all((tensors[name] == value).all() for name, value in load_file(folder / "last.safetensors").items())
            assert same == is_last
    runs = read_runs(tmp_path / "outputs" / task)
    comparison = compare(runs, baseline="fedavg")
    order = comparison.methods["average"].to_list()
    assert order == sorted(order, reverse=not row.less_is_better)
    assert comparison.methods["rank"].to_list()[0] == 1
    text = comparison.render("table")
    caption = " ".join(text.split())
    assert row.title in caption
    assert (" (%)" in caption) == row.is_fraction
    best_difference = comparison.methods.loc[comparison.methods["label"] == "fedprox", "difference"].iloc[0]
    rank = comparison.methods.loc[comparison.methods["label"] == "fedprox", "rank"].iloc[0]
    is_better = (best_difference < 0) == row.less_is_better and best_difference != 0
    assert (rank == 1) == (is_better or best_difference == 0)
    for metric in [name for name in metrics_of(row) if name not in DOUBTS]:
        other = compare(runs, metric=metric)
        title = row.title if other.is_primary else METRICS[metric].title
        assert title.lower() in other.render("markdown").lower()
    assert row.title.lower() in write_report(tmp_path / "outputs" / task).read_text().lower()


def test_fedavg_on_a_regression_is_the_loop_by_hand_to_the_bit(tmp_path):
    """Features and targets by the sums of two hospitals, their shuffled batches, their steps, the weighted mean."""
    given = experiment(tmp_path, "regression", "data.holdout=0.2")
    folder, _ = run_small(given)
    plan = resolve(given)
    data, train, seed = plan.experiment.data, plan.experiment.train, plan.experiment.run.seed
    clients = {name: load_client(data, name, "oslo", plan.data) for name in plan.clients}
    scale = scale_of([moments_of(client.images[client.train], 3) for client in clients.values()])
    units = scale_of([moments_of(client.masks[client.train], 1) for client in clients.values()])
    recorded = json.loads((folder / "environment.json").read_text())
    assert recorded["scale"]["mean"] == [*scale.mean, *units.mean]
    assert recorded["targets"] == ["days"]
    model = {name: torch.tensor(value.numpy()) for name, value in plan.build_net().state_dict().items()}
    for number in (1, 2):
        states = []
        for name, client in clients.items():
            x = torch.from_numpy(scale.apply(client.images[client.train]))
            y = torch.from_numpy(client.masks[client.train])
            state = {key: value.clone().requires_grad_() for key, value in model.items()}
            optimizer = torch.optim.SGD(state.values(), lr=train.lr, momentum=train.momentum, fused=True)
            order = numpy_rng(seed, "batches", name, "train", number).permutation(len(y))
            for start in range(0, len(order), train.batch_size):
                batch = order[start : start + train.batch_size]
                optimizer.zero_grad()
                standardized = (y[batch] - units.mean[0]) / units.std[0]
                F.mse_loss(F.linear(x[batch], state["head.weight"], state["head.bias"]), standardized).backward()
                optimizer.step()
            states.append({key: value.detach().double() for key, value in state.items()})
        counts = np.array([client.examples for client in clients.values()], np.float64)
        shares = counts / counts.sum()
        model = {
            key: sum(share * state[key] for share, state in zip(shares, states, strict=True)).float() for key in model
        }
    trained = load_file(folder / "last.safetensors")
    assert {key: value.tobytes() for key, value in trained.items()} == {
        key: value.numpy().tobytes() for key, value in model.items()
    }
    # What the run recorded of the unseen hospital, in days, is what the loaded model measures there.
    trained_model = load_trained(folder, "last")
    oslo = load_client(data, "oslo", "bern", plan.data)
    table, _ = evaluate_targets(trained_model, "oslo", oslo.images, oslo.masks, np.arange(40))
    rounds = pd.read_csv(folder / "rounds.csv")
    assert table["mae"].iloc[0] == pytest.approx(rounds["target_mae"].iloc[-1], rel=1e-5)
    plot_features(folder, tmp_path / "figures")
    assert float(np.ravel(trained_model(torch.from_numpy(oslo.images)).detach()).mean()) > 20  # days, not deviations


def test_a_rule_that_depends_on_the_order_measures_what_the_run_recorded(tmp_path):
    """`recompute` sees the 40 rows of the unseen hospital in five groups, whose variances are unbiased."""
    settings = ("model.backbone=mlp", 'model.options={norm="batch"}')
    settings += ("method.infer=recompute", "method.recompute.batch=8")
    folder, _ = run_small(experiment(tmp_path, "regression", *settings, method="silobn"))
    model = load_trained(folder, "last")
    values, _, indices = load_target(model.experiment.data, "oslo")
    targets = load_target_masks(model.experiment.data, "oslo")
    table, predictions = evaluate_targets(model, "oslo", values, targets, indices)
    recorded = pd.read_csv(folder / "rounds.csv")["target_mae"].iloc[-1]
    assert table["mae"].iloc[0] == pytest.approx(recorded, rel=1e-5)
    row = predictions.set_index("image").loc["oslo[3]"]
    assert row["days (truth)"] == pytest.approx(targets[3, 0])


def test_targets_as_they_are_with_a_scale_of_none(tmp_path):
    folder, _ = run_small(experiment(tmp_path, "regression", "data.scale=none", "train.lr=0.0001"))
    assert "scale" not in json.loads((folder / "environment.json").read_text())
    losses = pd.read_csv(folder / "rounds.csv")["train_loss"]
    assert losses.iloc[1] > 500  # squares of days


@pytest.mark.parametrize("task", ["regression", "multi-label"])
def test_which_rows_run_without_classes(tmp_path, task):
    """The other rows are refused in one line, before anything is written."""
    assert [name for name in METHODS if name in WITHOUT_CLASSES] == WITHOUT_CLASSES
    for method in METHODS:
        given = experiment(tmp_path, task, "data.clients_per_domain=2", method=method)
        if method in WITHOUT_CLASSES:
            build_recipe(given)
            continue
        with pytest.raises(UserError, match=r"is made for|assumes that") as error:
            run_small(given)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("method", WITHOUT_CLASSES)
def test_the_rows_train_without_classes(tmp_path, method):
    usual = ("model.backbone=mlp", "data.clients_per_domain=2")
    for task in ("regression", "multi-label"):
        folder, _ = run_small(experiment(tmp_path, task, *usual, method=method))
        rounds = pd.read_csv(folder / "rounds.csv")
        assert np.isfinite(rounds["target_loss"]).all()
        assert rounds["train_loss"].iloc[1:].notna().all()


def test_a_domain_of_one_class_is_undefined_and_never_perfect(tmp_path):
    """AUROC of Oslo has no value; averages and ranks are over the two other hospitals, and the reason stands once."""
    for target in HOSPITALS:
        folder, _ = run_small(experiment(tmp_path, "binary", target=target, one_class=True))
        said = json.loads((folder / "environment.json").read_text()).get("undefined", {})
        if target == "oslo":
            assert said == {"oslo": "it has no example of yes, so that AUROC is not defined there"}
            assert pd.read_csv(folder / "rounds.csv")["target_auroc"].isna().all()
        else:  # Oslo validates on one class
            assert re.search(
                "not defined on the validation examples of oslo.* over the other 1 of 2", said["(validation)"]
            )
            clients = pd.read_csv(folder / "clients.csv").query("round > 0").set_index("client")
            assert clients.loc["oslo", "validation_auroc"].isna().all()
            assert clients.loc["oslo", "validation_loss"].notna().all()
            rounds = pd.read_csv(folder / "rounds.csv").query("round > 0")
            other = "lyon" if target == "bern" else "bern"
            assert rounds["mean_validation_auroc"].to_list() == clients.loc[other, "validation_auroc"].to_list()
    comparison = compare(read_runs(tmp_path / "outputs" / "binary"))
    assert (comparison.undefined, comparison.defined) == (("oslo",), ["bern", "lyon"])
    means = comparison.cells.set_index("target")["mean"]
    assert means["average"] == pytest.approx((means["bern"] + means["lyon"]) / 2)
    notes = " ".join(comparison.notes)
    assert "AUROC is not defined on oslo: averages and ranks are over 2 of 3 targets." in notes
    assert notes.count("it has no example of yes") == 1
    assert "Missing" not in notes
    assert "undefined" in comparison.render("csv") or "undefined" in comparison.render("table")
    sensitivity = compare(read_runs(tmp_path / "outputs" / "binary"), metric="sensitivity")
    assert sensitivity.undefined == ("oslo",)
    assert "no example there is of the positive class" in " ".join(sensitivity.notes)
    assert "The positive class is the second one in the order of classes" in " ".join(sensitivity.notes)


def test_accuracy_on_a_domain_of_one_class_is_said(tmp_path, caplog):
    folder, _ = run_small(experiment(tmp_path, "classification", one_class=True))
    line = "oslo: it has no example of yes, so that accuracy there is the share of no that is recognized"
    assert line in caplog.text
    comparison = compare(read_runs(tmp_path / "outputs" / "classification"))
    assert f"{line}." in comparison.notes
    assert compare(read_runs(folder.parents[2]), metric="auroc").undefined == ("oslo",)


def test_sensitivity_is_taken_at_the_threshold_of_the_sources(tmp_path):
    folder, _ = run_small(experiment(tmp_path, "binary"))
    rounds = pd.read_csv(folder / "rounds.csv").set_index("round")
    clients = pd.read_csv(folder / "clients.csv").query("round > 0")
    summary = pd.read_csv(folder / "summary.csv").iloc[0]
    chosen = int(summary["best_validation_round"])
    threshold = clients[clients["round"] == chosen]["validation_threshold"].mean()
    assert rounds["mean_validation_threshold"][chosen] == pytest.approx(threshold)
    kept = load_file(folder / "predictions" / f"round{chosen:06d}.safetensors")
    is_called = kept["probabilities"][:, 1] > rounds["mean_validation_threshold"][chosen]
    expected = is_called[kept["label"] == 1].mean()
    found = compare(read_runs(folder.parents[2]), metric="sensitivity").cells["mean"]
    assert found.iloc[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("task", "overrides", "reason"),
    [
        ("regression", ["train.focal=2"], "are for classes; .* has targets of a regression"),
        ("multi-label", ["train.class_weights=[1,2,3]"], "are for classes; .* has several labels"),
        ("binary", ["train.huber=1"], "train.huber is the loss of a regression, and the task here is binary"),
        ("regression", ['data.columns.label="a"'], "'a' is a feature, and also the label"),
        ("regression", ['data.columns.label="sick"'], "row 2: the label '(yes|no)' is no finite number"),
        ("multi-label", ['data.columns.label=["flu","days"]'], "column 'days', row 2: the label .* is neither 0 nor 1"),
        ("classification", ['data.columns.label="days"'], "has a fraction; .* set data.task = 'regression'"),
        ("classification", ['data.columns.label=["flu","cold"]'], "several columns of 0 and 1 are data.task = 'multi-"),
        ("binary", ["data.task=ranking"], "ranking"),
        ("binary", ['data.columns.label="hospital"', 'data.columns.domain="sick"'], "'binary' needs two classes, and"),
        ("regression", ["method.name=moon"], "made for classification, and arrays is used for regression"),
    ],
)
def test_what_a_task_lacks_is_one_line(tmp_path, task, overrides, reason):
    with pytest.raises(UserError, match=reason) as error:
        run_small(experiment(tmp_path, task, *overrides))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("dataset", "task", "reason"),
    [
        (
            "digits",
            "regression",
            "has classes; targets that are numbers or several labels come from",
        ),
        ("digits", "binary", "data.task = 'binary' needs two classes, and .* has 10"),
        ("digit-masks", "binary", "is a data set for segmentation; leave data.task out"),
    ],
)
def test_a_data_set_of_pictures_has_a_task_of_its_own(dataset, task, reason):
    with pytest.raises(UserError, match=reason):
        resolve(Experiment(data={"dataset": dataset, "task": task}))


class Rows(Dataset):
    """Tensors with targets of any kind."""

    def __init__(self, values, targets):
        self.values, self.targets = torch.tensor(values, dtype=torch.float32), targets

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index], self.targets[index]


def datasets(column):
    table = patients()
    by_hospital = table.groupby("hospital")
    return {name: Rows(rows[["a", "b", "c"]].to_numpy(), rows[column].to_numpy()) for name, rows in by_hospital}


def test_python_takes_each_task(tmp_path):
    usual = {"target": "oslo", "model": "linear", "output": str(tmp_path), "progress": False, "rounds": 1}
    run = fedsim.run("fedavg", datasets("days"), task="regression", name="days", huber=1.0, **usual)
    assert run.summary["last_target_mae"].notna().all()
    assert "mean absolute error" in repr(run)
    assert "<svg" in run._repr_html_()
    run = fedsim.run("fedavg", datasets(["flu", "cold", "rare"]), task="multi-label", name="labels", **usual)
    details = pd.read_csv(run.folder / "details.csv")
    assert set(details["name"]) == {0, 1}  # Oslo has no patient with the third label
    run = fedsim.run("fedavg", datasets("flu"), task="binary", name="flu", **usual)
    assert not math.isnan(run.summary["last_target_auroc"].iloc[0])
    with pytest.raises(UserError, match=r"is no integer; .*'regression'"):
        fedsim.run("fedavg", datasets("days"), name="wrong", **usual)
    with pytest.raises(UserError, match=r"targets\[0\]: .* is neither 0 nor 1"):
        fedsim.run("fedavg", datasets("days"), task="multi-label", name="wrong", **usual)


def test_npz_files_bring_targets(tmp_path):
    table = patients()
    file = tmp_path / "patients.npz"
    x, domain = table[["a", "b", "c"]].to_numpy(), table["hospital"].to_numpy(dtype=str)
    for task, label in (("regression", "days"), ("multi-label", ["flu", "cold", "rare"])):
        np.savez(file, x=x, label=table[label].to_numpy(), domain=domain)
        usual = {"model": "linear", "output": str(tmp_path / "outputs"), "progress": False, "rounds": 1}
        run = fedsim.run("fedavg", file, "oslo", task=task, name=task, **usual)
        assert run.summary[f"last_target_{TASKS[task].metric}"].notna().all()
    np.savez(file, x=x, label=np.where(domain == "bern", np.nan, 1.0), domain=domain)
    with pytest.raises(UserError, match=r"label\[0\]: nan is no finite number"):
        fedsim.run("fedavg", file, "oslo", task="regression", name="wrong", output=str(tmp_path), progress=False)
