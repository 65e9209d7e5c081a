"""A model of tables or arrays is evaluated on files of labelled rows."""

import math
import re

import numpy as np
import pandas as pd
import pytest
import torch
from support import run_small
from typer.testing import CliRunner

import fedsim
from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.data.array_rows import EMBEDDED
from fedsim.data.feature_tables import cell_notes
from fedsim.export.card import card
from fedsim.export.cli import _cells, _headings
from fedsim.export.files import comparison_images
from fedsim.export.inference import evaluate_rows, predict
from fedsim.settings.experiment import read_experiment


def trained(folder, labels, weight, *overrides):
    """A linear model of one feature x, with the logits `weight` * x; it trained on b, and a was unseen."""
    table = pd.DataFrame({"x": np.arange(24) - 12.0, "label": [labels[n % 2] for n in range(24)]})
    table["site"] = ["ab"[n % 4 > 1] for n in range(24)]
    table["p"], table["q"] = np.arange(24) // 4 % 2, np.arange(24) // 8 % 2
    table.to_csv(folder / "t.csv", index=False)
    given = [
        "data.dataset=arrays", f"data.root={folder / 't.csv'}", "data.columns={features=['x'], domain='site'}",
        "data.scale=none", "model.backbone=linear", "run.target=a", f"run.output={folder}", "train.rounds=1",
        *overrides,
    ]  # fmt: skip
    run, _ = run_small(read_experiment("digits", given))
    model = fedsim.load(run, "last")
    state = model.net.state_dict()
    with torch.no_grad():
        state["head.weight"].copy_(torch.tensor(weight))
        state["head.bias"].zero_()
    return model


def written(file, text):
    file.write_text(text)
    return file


def test_metrics_by_hand_per_domain(tmp_path):
    """The class v is predicted for x > 0."""
    model = trained(tmp_path, "uv", [[-1.0], [1.0]])
    rows = "site,label,x\nnorth,u,-2\nsouth,u,2\nnorth,v,-1\nnorth,v,1\nsouth,v,5\nnorth,v,3\nb,u,-1\n"
    measures, predictions = evaluate_rows(model, written(tmp_path / "new.csv", rows))
    rows = measures.set_index("domain")
    assert list(rows.index) == ["b (trained)", "north", "south", "all"]
    assert list(rows["images"]) == [1, 4, 2, 6]
    assert list(rows["accuracy"]) == pytest.approx([1, 3 / 4, 1 / 2, 4 / 6])
    assert rows.loc["north", "balanced_accuracy"] == pytest.approx((1 + 2 / 3) / 2)
    assert rows.loc["north", "macro_f1"] == pytest.approx((2 / 3 + 4 / 5) / 2)
    south = predictions[predictions["domain"] == "south"]
    assert list(south["image"]) == [f"{tmp_path / 'new.csv'}, row 3", f"{tmp_path / 'new.csv'}, row 6"]
    assert list(south["label"]) == ["u", "v"]
    assert list(south["predicted"]) == ["v", "v"]


def test_a_table_without_domains_is_one_that_is_called_like_its_file(tmp_path):
    model = trained(tmp_path, "uv", [[-1.0], [1.0]])
    pd.DataFrame({"x": [1.0, 2.0], "label": ["u", "v"]}).to_parquet(tmp_path / "east.parquet")
    measures, _ = evaluate_rows(model, tmp_path / "east.parquet")
    assert measures[["domain", "accuracy"]].to_numpy().tolist() == [["east", 0.5]]


def test_the_errors_of_a_regression_by_hand(tmp_path):
    """The predictions are 2, 4 and 8; the errors 1, 1 and 0, around a mean of 14 / 3."""
    model = trained(tmp_path, (1, 2), [[2.0]], "data.task=regression")
    measures, predictions = evaluate_rows(model, written(tmp_path / "new.csv", "x,label\n1,3\n2,3\n4,8\n"))
    row = measures.iloc[0]
    squares = 2 * (5 / 3) ** 2 + (10 / 3) ** 2
    assert (row["domain"], row["images"]) == ("new", 3)
    assert list(row[["mae", "rmse", "r2"]]) == pytest.approx([2 / 3, math.sqrt(2 / 3), 1 - 2 / squares])
    assert list(predictions["label"]) == [2, 4, 8]


def test_the_areas_of_several_labels_by_hand(tmp_path):
    """The score of p grows with x and that of q falls: three of four pairs of p are in order, and no pair of q."""
    several = "data.columns={features=['x'], domain='site', label=['p', 'q']}"
    model = trained(tmp_path, "uv", [[1.0], [-1.0]], "data.task=multi-label", several)
    measures, _ = evaluate_rows(model, written(tmp_path / "new.csv", "x,p,q\n1,0,0\n2,1,0\n3,0,0\n4,1,1\n"))
    assert list(measures.iloc[0, 1:]) == pytest.approx([4, 3 / 8, 3 / 4, 0])


def test_arrays_of_an_npz_file(tmp_path):
    model = trained(tmp_path, "uv", [[-1.0], [1.0]])
    values = np.array([[1.0], [-1.0], [2.0]])
    np.savez(tmp_path / "new.npz", x=values, label=np.array(["v", "v", "v"]), site=np.array(["c", "c", "d"]))
    measures, _ = evaluate_rows(model, tmp_path / "new.npz")
    assert list(measures["domain"]) == ["c", "d", "all"]
    assert list(measures["accuracy"]) == pytest.approx([1 / 2, 1, 2 / 3])
    np.savez(tmp_path / "wide.npz", x=np.ones((2, 3)), label=np.array(["u", "v"]))
    with pytest.raises(UserError, match=re.escape("have the shape [3], and this model takes [1]")):
        evaluate_rows(model, tmp_path / "wide.npz")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x,label\n1,w\n", "the label 'w' is no class of the model; its classes are u, v"),
        ("x,label\n1,\n", "row 2: the label is empty"),
        ("x,site\n1,a\n", "has no column 'label'"),
        ("y,label\n1,u\n", "has no column 'x'"),
        ("x,label\none,u\n", "row 2: 'one' is no number"),
        ("x,label\n", "has no rows"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(tmp_path, text, reason):
    model = trained(tmp_path, "uv", [[-1.0], [1.0]])
    with pytest.raises(UserError, match=re.escape(reason)) as error:
        evaluate_rows(model, written(tmp_path / "new.csv", text))
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="no file"):
        evaluate_rows(model, tmp_path / "none.csv")


@pytest.mark.parametrize(("preset", "scale"), [("", "federated"), ("all", "federated"), ("all", "site")])
def test_the_unseen_hospital_has_the_score_of_the_run(tmp_path, preset, scale):
    """Also where the run leaves out patients with an empty cell, as the protocol without a preset does."""
    usual = ["run.target=hungary", f"run.output={tmp_path}", "train.rounds=2", f"data.scale={scale}"]
    folder, _ = run_small(read_experiment("hospitals", usual, preset))
    result = CliRunner().invoke(
        app,
        ["evaluate", str(folder), "--data", str(EMBEDDED["hospitals"].file), "--which", "last", "--output",
         str(tmp_path / "predictions.csv")],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "rows" in result.output.split("accuracy")[0]  # and not images
    measures, _ = evaluate_rows(fedsim.load(folder, "last"), EMBEDDED["hospitals"].file)
    rows = measures.set_index("domain")
    assert list(rows.index) == ["cleveland (trained)", "hungary", "switzerland (trained)", "va_long_beach (trained)"]
    target = pd.read_csv(folder / "rounds.csv")["target_accuracy"].iloc[-1]
    assert rows.loc["hungary", "accuracy"] == pytest.approx(target)
    predictions = pd.read_csv(tmp_path / "predictions.csv")
    hungary = predictions[predictions["domain"] == "hungary"]
    assert (hungary["label"] == hungary["predicted"]).mean() == pytest.approx(target)


def test_predict_names_the_cells_that_the_model_does_not_know(tmp_path):
    """The features are x, with the values 0 to 23, and sex; their mean over the source b is that of the run."""
    frame = pd.DataFrame({"x": np.arange(24), "sex": ["Male", "Female"] * 12, "label": list("uvvu") * 6})
    frame["site"] = ["ab"[n % 4 > 1] for n in range(24)]
    frame.to_csv(tmp_path / "t.csv", index=False)
    given = [
        "data.dataset=arrays", f"data.root={tmp_path / 't.csv'}", "data.scale=federated", "model.backbone=linear",
        "data.columns={features=['x', 'sex'], categories=['sex'], domain='site'}", "run.target=a",
        f"run.output={tmp_path}", "train.rounds=1",
    ]  # fmt: skip
    run, _ = run_small(read_experiment("digits", given))
    file = written(tmp_path / "new.csv", "x,sex\n3,male\n610,Male\nn/a,other\n,Female\n")
    result = CliRunner().invoke(app, ["predict", str(run), str(file), "--which", "last"])
    assert result.exit_code == 0, result.output
    model = fedsim.load(run, "last")
    notes = cell_notes(file, model.experiment.data, model.plan.data, model.feature_scale)
    start = f"{file}, row "
    assert [note.removeprefix(start).split(" (")[0] for note in notes] == [
        "2: sex 'male' is no category of the model and counts as another value; write 'Male' if that is meant",
        "3: x 610 is far from the values that trained",
        "4: sex 'other' is no category of the model and counts as another value; known: Female, Male",
        "4: x 'n/a' counts as an empty cell",
    ]
    assert "counts as an empty cell" in " ".join(result.stderr.split())


def test_predict_shows_the_probability_of_the_positive_class(tmp_path):
    """With the logits 0 and x, the positive class v has the probability 1 / (1 + 3) at x = -ln 3."""
    model = trained(tmp_path, "uv", [[0.0], [1.0]], "data.task=binary")
    predictions = predict(model, [written(tmp_path / "new.csv", f"x\n{-math.log(3)}\n")])
    row = next(predictions.itertuples(index=False))
    assert _headings(model) == ["class", "probability", "p(v)"]
    assert _cells(model, row) == ["u", "75.0 %", "25.0 %"]


@pytest.mark.parametrize("rule", ["t3a", "lame"])
def test_rows_are_predicted_in_the_batches_in_which_they_are_evaluated(tmp_path, rule):
    """Both rules depend on the order of the rows, which lie here class by class, and on their batches."""
    columns = "data.columns={features=['x', 'p'], domain='site'}"
    model = trained(tmp_path, "uv", [[-1.0, 0.5], [1.0, -0.5]], f"method.infer={rule}", columns)
    values = np.random.default_rng(0).normal(size=(150, 2))
    rows = pd.DataFrame(values, columns=["x", "p"]).sort_values("x")
    rows["label"] = np.repeat(["u", "v"], 75)
    rows.to_csv(tmp_path / "new.csv", index=False)
    _, evaluated = evaluate_rows(model, tmp_path / "new.csv")
    predicted = predict(model, [tmp_path / "new.csv"])
    assert list(predicted["image"]) == [f"{tmp_path / 'new.csv'}, row {number}" for number in range(2, 152)]
    in_order = evaluated.set_index("image").loc[predicted["image"]].reset_index()
    pd.testing.assert_frame_equal(predicted, in_order[predicted.columns])


@pytest.mark.parametrize("rule", ["data.scale=site", "method.infer=t3a"])
def test_the_domains_of_a_table_are_predicted_separately(tmp_path, rule):
    """Standardized together, the rows of the domain with the small values would all be of one class."""
    columns = "data.columns={features=['x', 'p'], domain='site'}"
    model = trained(tmp_path, "uv", [[-1.0, 0.5], [1.0, -0.5]], rule, columns)
    draws = np.random.default_rng(0)
    rows = pd.DataFrame(draws.normal(size=(60, 2)), columns=["x", "p"])
    rows["label"] = draws.choice(["u", "v"], 60)
    rows["site"] = draws.choice(["here", "there"], 60)
    rows.loc[rows["site"] == "there", "x"] += 9
    rows.to_csv(tmp_path / "new.csv", index=False)
    _, evaluated = evaluate_rows(model, tmp_path / "new.csv")
    predicted = predict(model, [tmp_path / "new.csv"])
    assert list(predicted["image"]) == [f"{tmp_path / 'new.csv'}, row {number}" for number in range(2, 62)]
    in_order = evaluated.set_index("image").loc[predicted["image"]].reset_index()
    pd.testing.assert_frame_equal(predicted, in_order[predicted.columns])
    file = written(tmp_path / "some.csv", "x,p,site\n1,0,here\n2,1,\n3,1,here\n")
    with pytest.raises(UserError, match=re.escape(f"{file}, row 3: its domain is empty")):
        predict(model, [file])


def test_rows_that_training_left_out_have_no_prediction(tmp_path):
    """The mean and the deviation of a site are those of its complete rows, in `predict` as in `evaluate`."""
    columns = "data.columns={features=['x', 'p'], domain='site'}"
    model = trained(tmp_path, "uv", [[-1.0, 0.5], [1.0, -0.5]], "data.missing=drop", "data.scale=site", columns)
    file = written(tmp_path / "new.csv", "x,p,site,label\n1,0,h,u\n2,,h,v\n3,4,h,v\n900,,h,u\n")
    _, evaluated = evaluate_rows(model, file)
    predicted = predict(model, [file])
    assert list(predicted["image"]) == [f"{file}, row 2", f"{file}, row 4"]
    pd.testing.assert_frame_equal(predicted, evaluated[predicted.columns])
    notes = cell_notes(file, model.experiment.data, model.plan.data, model.feature_scale)
    empty = "2 of 4 rows have an empty feature (numbers 3, 5)"
    assert notes == [f"{file}: {empty}; data.missing = 'drop' leaves them out, as in training"]
    file = written(tmp_path / "empty.csv", "x,p,site\n1,,h\n")
    with pytest.raises(UserError, match=r"every row has an empty cell, so that data\.missing = 'drop' leaves none"):
        predict(model, [file])


def test_columns_in_another_order_are_refused(tmp_path):
    """Without names in the settings the weight of one column would be applied to another."""
    rows = pd.DataFrame(np.arange(48.0).reshape(24, 2), columns=["x", "p"])
    rows["label"], rows["site"] = list("uvvu") * 6, list("aabb") * 6
    file = tmp_path / "t.csv"
    rows.to_csv(file, index=False)
    given = ["data.dataset=arrays", f"data.root={file}", "data.columns={domain='site'}", "model.backbone=linear",
             "run.target=a", f"run.output={tmp_path}", "train.rounds=1"]  # fmt: skip
    run, _ = run_small(read_experiment("digits", given))
    rows[["p", "x", "label", "site"]].to_csv(file, index=False)
    for words in (["evaluate", str(run)], ["features", str(run)]):
        shown = CliRunner().invoke(app, [*words, *(["--which", "last"] if words[0] == "evaluate" else [])])
        assert "has other columns than in the run (their order)" in str(shown.exception)
    assert "random rows" in comparison_images(fedsim.load(run, "last"))[1]


def test_an_empty_cell_that_nothing_replaces_is_refused(tmp_path):
    """The output of such a row is no number, of which the first class would be the greatest."""
    model = trained(tmp_path, "uv", [[-1.0], [1.0]])
    assert "float32 tensors of the shape [1]: x; as they are in the data, not standardized." in card(model)
    file = written(tmp_path / "new.csv", "x,label\n1,v\n,u\n")
    for use in (evaluate_rows, lambda model, file: predict(model, [file])):
        with pytest.raises(UserError, match=re.escape(f"{file}, row 3: a cell is empty, and data.scale = 'none'")):
            use(model, file)


def test_a_row_alone_has_no_scale_of_its_own(tmp_path):
    """Standardized by itself it would be 0 in each column, whatever is in it."""
    model = trained(tmp_path, "uv", [[-1.0], [1.0]], "data.scale=site")
    file = written(tmp_path / "new.csv", "x,label\n900,v\n")
    for use in (evaluate_rows, lambda model, file: predict(model, [file])):
        with pytest.raises(UserError, match=re.escape(f"{file}, row 2: with data.scale = 'site'")):
            use(model, file)
    assert "standardized before, by the mean and the deviation of their own site" in card(model)
    file = written(tmp_path / "new.csv", "x,label\n900,v\n100,u\n")
    assert list(predict(model, [file])["predicted"]) == ["v", "u"]
