"""A run on masks: its records, selection, tables, figures and report are named after Dice."""

import numpy as np
import pandas as pd
import pytest
import torch
from invented import embedded

from fedsim.analysis import compare
from fedsim.analysis.report import write_report
from fedsim.common.errors import UserError
from fedsim.records import read_runs
from fedsim.records.cases import Cases, read_cases
from fedsim.records.predictions import read_predictions
from fedsim.testing.contract import run_watched, small_plan

MASKS = [
    "data.dataset=digit-masks", 'data.domains=["inverted", "noise", "shaded"]', "run.target=noise",
    "model.backbone=unet-small", "train.optimizer=adam", "train.lr=0.01", "train.rounds=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs")
    run_watched(small_plan("fedavg", folder, MASKS))
    return folder


def test_records_and_kept_cases_have_the_metric(outputs):
    """Dice instead of accuracy, the rounds that the rules select by it, and each structure in details.csv."""
    run = next(outputs.rglob("summary.csv")).parent
    names = ("rounds", "clients", "summary", "details")
    rounds, clients, summary, details = frames = [pd.read_csv(run / f"{name}.csv") for name in names]
    assert "validation_dice" in clients
    assert not [column for frame in frames for column in frame if "accuracy" in column]
    best = rounds.loc[rounds["round"] >= 1].sort_values("mean_validation_dice", kind="stable").iloc[-1]
    assert summary["best_validation_target_dice"][0] == best["target_dice"]
    assert summary["oracle_target_dice"][0] == rounds["target_dice"].iloc[1:].max()
    cases = read_cases(run, "last")
    assert cases.dice.mean() == pytest.approx(summary["last_target_dice"][0])
    last = details[(details["round"] == 2) & (details["quantity"] == "surface_distance")].set_index("name")["value"]
    assert last.to_dict() == pytest.approx(dict(zip(cases.structures, cases.surface_distance.mean(axis=0))))
    with pytest.raises(UserError, match="the predictions cannot be read"):
        read_predictions(run, "last")


def test_tables_figures_and_report(outputs, unrendered):
    runs = read_runs(outputs)
    table = compare(runs)
    assert "Dice on the unseen domain" in table.render("table").replace("\n", " ")
    assert table.cells["mean"].iloc[0] == runs.summary["best_validation_target_dice"][0]
    with pytest.raises(UserError, match="no auroc, a metric of another task; theirs are dice, surface_distance"):
        compare(runs, metric="auroc")
    assert 0 < compare(runs, metric="surface_distance").cells["mean"].iloc[0] < 1
    page = write_report(outputs).read_text()
    assert "core: Dice (%)" in page
    assert "Segmented images" in page
    (cases,) = unrendered
    assert "worst, middle and best images" in cases.get_suptitle()
    (experiment,) = embedded(page)["experiments"]
    assert experiment["curves"][0] == ["target_dice", "target Dice (%)"]


def test_cases_of_masks():
    truth = torch.zeros(2, 1, 6, 8, dtype=torch.uint8)
    truth[0, 0, 0, 0] = truth[1, 0, 3, 4] = 1
    predicted = truth.flip(0)
    predicted[1] = truth[1]
    images = np.arange(2, dtype=np.uint8)[:, None, None, None] * np.ones((2, 1, 6, 8), np.uint8)
    cases = Cases.of(np.array([7, 3]), truth, predicted, torch.from_numpy(images), ["spot"])
    assert cases.index.tolist() == [3, 7]
    assert cases.dice[:, 0].tolist() == [1.0, 0.0]
    assert cases.surface_distance[:, 0].tolist() == [0.0, 5.0]
    assert cases.details() == [("dice", "spot", 0.5), ("surface_distance", "spot", 2.5)]
    assert [image.max() for image in cases.images] == [0, 1]  # the worst first
