"""Runs on tables: real hospitals, a loop by hand, which rows run, and the model of a finished run."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
from image_trees import SHARED
from safetensors.numpy import load_file
from sklearn.linear_model import LogisticRegression
from support import interrupt, numbers, run_small
from torch.nn import functional as F

import fedsim
from fedsim.common.errors import UserError
from fedsim.common.seeding import numpy_rng
from fedsim.data import load_client, load_pooled, load_target
from fedsim.data.array_rows import EMBEDDED
from fedsim.data.catalog import BENCHMARKS
from fedsim.data.scaling import moments_of, scale_of
from fedsim.export.card import card
from fedsim.export.files import export
from fedsim.export.inference import evaluate_arrays, predict
from fedsim.methods.table import METHODS
from fedsim.runs.plan import resolve
from fedsim.settings.experiment import read_experiment

HOSPITALS = ("cleveland", "hungary", "switzerland", "va_long_beach")
COMPLETE = (304, 260, 46, 130)
MLP = ("model.backbone=mlp", 'model.options={widths=[8], norm="batch", dropout=0.1}')
# What is made for pixels, for maps of features or for a text encoder, so that it does not run on rows of numbers.
OF_IMAGES = {
    "augmix", "ccst", "copa", "csac", "cutmix", "dsu", "elcfs", "fedccrl", "fedfa", "fedig", "fedig-a", "fedrdn",
    "fisc", "gfedavg-dson", "gfedavg-ibn", "gperxan", "jigen", "l2d", "mcsad", "mixstyle", "perada", "randaugment",
    "randconv", "stablefdg",
}  # fmt: skip
OF_TEXTS = {"fedapt", "plan", "promptfl"}


def hospitals(output, *overrides, preset="", target="hungary"):
    """The shipped experiment with few rounds."""
    usual = [f"run.target={target}", f"run.output={output}", "train.rounds=2"]
    return read_experiment("hospitals", [*usual, *overrides], preset)


@pytest.mark.parametrize(("preset", "counts"), [("", COMPLETE), ("all", (304, 293, 123, 200))])
def test_the_patients_are_those_of_the_protocol(preset, counts):
    plan = resolve(read_experiment("hospitals", [], preset))
    assert (plan.data.domains, plan.data.classes) == (HOSPITALS, ("no", "yes"))
    values = [load_target(plan.experiment.data, domain, plan.data)[0] for domain in HOSPITALS]
    assert tuple(map(len, values)) == counts
    assert plan.data.shape == (7 + 3 + 5 + 4,)
    assert np.isnan(np.concatenate(values)).any() == bool(preset)
    assert "CC BY 4.0" in EMBEDDED["hospitals"].file.with_suffix(".txt").read_text()


def test_the_data_set_says_which_of_its_patients_the_experiment_takes():
    note = BENCHMARKS["hospitals"].note
    counts = "{}, {}, {} and {}".format(*COMPLETE)
    assert f"`fedsim run hospitals` takes the {sum(COMPLETE)} patients ({counts}) for whom all ten features" in note
    assert "--preset all takes all 920" in note


@pytest.mark.parametrize("method", METHODS)
def test_which_rows_run_on_a_table(tmp_path, method):
    works = ["train.iterations=1", "parts.balanced_budget.budget=20", f"method.name={method}"]
    experiment = hospitals(tmp_path, *MLP, *works)
    if method not in OF_IMAGES | OF_TEXTS:
        folder, _ = run_small(experiment)
        assert np.isfinite(pd.read_csv(folder / "rounds.csv")["target_loss"]).all()
        return
    with pytest.raises(UserError) as error:
        run_small(experiment)
    assert "\n" not in str(error.value)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    if method in OF_IMAGES - {"csac", "perada"}:
        assert re.search("assumes that the examples are images, which does not hold", str(error.value))


def test_fedavg_is_the_loop_by_hand_to_the_bit(tmp_path):
    """Three hospitals, two rounds: their sums, their shuffled batches, their steps and the weighted mean."""
    experiment = hospitals(tmp_path, preset="all")
    folder, _ = run_small(experiment)
    plan = resolve(experiment)
    data, train, seed = plan.experiment.data, plan.experiment.train, plan.experiment.run.seed
    clients = {name: load_client(data, name, "hungary") for name in plan.clients}
    scale = scale_of([moments_of(client.images[client.train], 7) for client in clients.values()])
    assert json.loads((folder / "environment.json").read_text())["scale"]["mean"] == list(scale.mean)
    model = {name: torch.tensor(value.numpy()) for name, value in plan.build_net().state_dict().items()}
    for number in (1, 2):
        states = []
        for name, client in clients.items():
            x = torch.from_numpy(scale.apply(client.images[client.train]))
            y = torch.from_numpy(client.labels[client.train])
            state = {key: value.clone().requires_grad_() for key, value in model.items()}
            optimizer = torch.optim.SGD(state.values(), lr=train.lr, momentum=train.momentum, fused=True)
            order = numpy_rng(seed, "batches", name, "train", number).permutation(len(y))
            for start in range(0, len(order), train.batch_size):
                batch = order[start : start + train.batch_size]
                if len(batch) == 1:  # of Long Beach's 161; a last batch of one is left out, because of batch norm
                    continue
                optimizer.zero_grad()
                F.cross_entropy(F.linear(x[batch], state["head.weight"], state["head.bias"]), y[batch]).backward()
                optimizer.step()
            states.append({key: value.detach().double() for key, value in state.items()})
        counts = np.array([client.examples for client in clients.values()], np.float64)
        shares = counts / counts.sum()
        model = {
            key: sum(share * state[key] for share, state in zip(shares, states, strict=True)).float() for key in model
        }
    trained = load_file(folder / "last.safetensors")
    assert trained.keys() == model.keys()
    assert {key: value.tobytes() for key, value in trained.items()} == {
        key: value.numpy().tobytes() for key, value in model.items()
    }


@pytest.mark.parametrize("preset", ["", "all"])
@pytest.mark.parametrize("target", HOSPITALS)
def test_a_linear_model_of_pooled_hospitals_is_the_logistic_regression(tmp_path, target, preset):
    """scikit-learn's, with its penalty w^2 / 2 on the difference w of the rows of weights, of the same rows with the
    same scale: within one point, and in Switzerland (46 complete patients) within one patient."""
    data = resolve(hospitals(tmp_path, preset=preset, target=target)).experiment.data
    pooled = load_pooled(data, target)
    scale = scale_of([moments_of(pooled.images[pooled.train], 7)])
    images, labels, _ = load_target(data, target)
    reference = LogisticRegression(max_iter=5000)
    reference.fit(scale.apply(pooled.images[pooled.train]), pooled.labels[pooled.train])
    full = ("train.epochs=100", f"train.batch_size={pooled.examples}", "train.lr=0.5")
    decay = f"train.weight_decay={2 / pooled.examples}"
    experiment = hospitals(
        tmp_path, "method.name=deepall", *full, decay, "train.rounds=5", preset=preset, target=target
    )
    folder, _ = run_small(experiment)
    accuracy = pd.read_csv(folder / "rounds.csv")["target_accuracy"].iloc[-1]
    assert accuracy == pytest.approx(reference.score(scale.apply(images), labels), abs=max(0.01, 1.01 / len(labels)))


def test_a_resumed_run_keeps_its_scale(tmp_path):
    whole, _ = run_small(hospitals(tmp_path / "whole", "train.rounds=3", *MLP))
    cut = hospitals(tmp_path / "cut", "train.rounds=3", *MLP)
    folder = interrupt(cut, 1)
    before = json.loads((folder / "environment.json").read_text())["scale"]
    run_small(cut)
    assert json.loads((folder / "environment.json").read_text())["scale"] == before
    pd.testing.assert_frame_equal(numbers(folder / "rounds.csv"), numbers(whole / "rounds.csv"))


@pytest.mark.parametrize("scale", ["federated", "site"])
def test_the_model_scales_as_the_run_did_also_where_the_data_are_not(tmp_path, monkeypatch, scale):
    folder, _ = run_small(hospitals(tmp_path, *MLP, f"data.scale={scale}", "run.keep_predictions=true", preset="all"))
    model = fedsim.load(folder)
    images, labels, _ = load_target(model.experiment.data, "hungary")
    with torch.inference_mode():
        right = (model(torch.from_numpy(images)).argmax(1).numpy() == labels).mean()
    rounds = pd.read_csv(folder / "rounds.csv").set_index("round")["target_accuracy"]
    assert right == pytest.approx(rounds[pd.read_csv(folder / "summary.csv")["best_validation_round"].item()])
    monkeypatch.setitem(EMBEDDED, "hospitals", None)  # the data are not on this machine
    assert fedsim.load(folder).shape == (19,)


def test_a_model_is_exported_with_its_scale(tmp_path):
    folder, _ = run_small(hospitals(tmp_path, *MLP, preset="all"))
    worst, source = export(fedsim.load(folder), "torch", tmp_path / "model.pt2")
    assert worst < 1e-5
    assert source == "8 rows of hungary"


@pytest.mark.parametrize("scale", ["federated", "site"])
def test_new_rows_of_a_table_are_predicted_as_the_run_predicts(tmp_path, scale):
    """The new table has the columns of the run in another order, and no label."""
    folder, _ = run_small(hospitals(tmp_path, *MLP, f"data.scale={scale}", preset="all"))
    model = fedsim.load(folder)
    rows = pd.read_csv(EMBEDDED["hospitals"].file, dtype=str, keep_default_na=False)
    rows = rows[rows["hospital"] == "hungary"].drop(columns=["hospital", "disease", "num"])
    rows[rows.columns[::-1]].to_csv(tmp_path / "new.csv", index=False)
    predictions = predict(model, [tmp_path / "new.csv"])
    _, expected = evaluate_arrays(model, "hungary", *load_target(model.experiment.data, "hungary"))
    np.testing.assert_allclose(predictions["p(yes)"], expected["p(yes)"], atol=1e-6)
    assert predictions["image"].iloc[0] == f"{tmp_path / 'new.csv'}, row 2"
    rows.drop(columns="age").to_csv(tmp_path / "less.csv", index=False)
    with pytest.raises(UserError, match="has no column 'age'"):
        predict(model, [tmp_path / "less.csv"])
    with pytest.raises(UserError, match=re.escape("takes tensors of the shape [19], and no image files")):
        model.prepare(["x.png"])
    assert ("sum of squares of every feature" in card(model)) == (scale == "federated")
    assert pd.read_csv(folder / "summary.csv")["transductive"].item() == (scale == "site")


def test_a_hospital_with_one_class_trains_and_is_named(tmp_path, caplog):
    lines = ["x,label,domain", *(f"{n},{'uv'[n % 2]},{'ab'[n % 4 > 1]}" for n in range(24))]
    (tmp_path / "t.csv").write_text("\n".join([*lines, *(f"{n},u,c" for n in range(8))]))
    own = ["data.dataset=arrays", f"data.root={tmp_path / 't.csv'}", "model.backbone=linear", "run.target=a"]
    caplog.set_level("INFO", logger="fedsim")
    folder, _ = run_small(read_experiment("digits", [*own, f"run.output={tmp_path}", "train.rounds=1"]))
    assert "client 'c' has no training images of v" in caplog.text
    assert (folder / "best.safetensors").is_file()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.target=hungry"], "has no domain 'hungry'; did you mean 'hungary'?"),
        (["run.validation_domain=hungary"], "'hungary' is the unseen domain, which may select nothing"),
        (["data.augment=flip"], "data.augment has an effect only with a data set of images"),
        (["data.normalize=imagenet"], "data.normalize has an effect only with a data set of images"),
        (["model.backbone=resnet18"], "resnet18 takes square images, and an example has the shape [19]"),
        (["model.backbone=cnn-1d"], "cnn-1d needs signals [channels, length], and an example has the shape [19]"),
        (["model.backbone=mlp", "model.options={width=[8]}"], "model.options.width of mlp: "),
        (
            ["method.infer=tsmo_bn"],
            "tsmo_bn assumes that the examples are images, which does not hold with these data (rows of a table, or "
            "other tensors); use a part or a method that takes any tensors",
        ),
        (["data.scale=site", "data.clients_per_domain=2"], "data.scale = 'site' scales every domain by its own rows"),
        (["train.dp_clip=1.0", "train.dp_epsilon=1.0"], "train.dp_clip perturbs only the model"),
    ],
)
def test_what_does_not_fit_a_table_is_one_line_and_nothing_is_written(tmp_path, overrides, message):
    with pytest.raises(UserError, match=re.escape(message)) as error:
        run_small(hospitals(tmp_path, *overrides))
    assert "\n" not in str(error.value)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_mapping_of_datasets_is_run_and_only_what_was_known_before_is_scaled(tmp_path):
    """Signals are not scaled unless it is said; then their scale has one number for each channel."""
    own = ["data.dataset=signals_of_two:signals", "model.backbone=cnn-1d", "run.target=b", "train.rounds=1"]
    folder, grid = run_small(read_experiment("digits", [*own, f"run.output={tmp_path / '1'}"]))
    assert "scale" not in json.loads((folder / "environment.json").read_text())
    own = [*own, "data.scale=federated", f"run.output={tmp_path / '2'}"]
    folder, grid = run_small(read_experiment("digits", own))
    assert len(json.loads((folder / "environment.json").read_text())["scale"]["mean"]) == 2
    assert fedsim.load(folder, trust=True).shape == (2, 16)
    assert grid.seen


FILES = {"speakers": "vowel.csv", "watches": "watch.npz"}


@pytest.mark.parametrize(("name", "least"), [("speakers", 0.4), ("watches", 0.6)])
def test_the_experiments_with_files_of_their_own_run_where_the_files_are(tmp_path, name, least):
    file = SHARED / "tabular" / FILES[name]
    if not file.is_file():
        pytest.skip(f"no file {file}")
    usual = ["train.rounds=20", f"run.output={tmp_path}"]
    folder, _ = run_small(read_experiment(name, [f"data.root={file}", *usual]))
    assert pd.read_csv(folder / "rounds.csv")["mean_validation_accuracy"].iloc[-1] > least


def test_the_experiments_resolve_where_no_file_is():
    assert resolve(read_experiment("speakers")).data.shape == (9,)
    assert resolve(read_experiment("watches")).data.shape == (6, 128)
