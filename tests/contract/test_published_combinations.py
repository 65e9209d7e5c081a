"""Combinations that papers report, run on the small federation: each trains, and no two of a table are the same."""

from itertools import combinations

import numpy as np
import pytest

from fedsim.commands.contract import run_watched, small_plan
from fedsim.sweep.tables import find_table, read_table

FEW = ["data.fraction=0.05"]  # half of the images and steps of the small federation
TABLES = {"fedig-a-table-3": 1, "gperxan-regulariser": 1, "gperxan-table-2": 3}  # rounds: FedDG-GA's weights move late


@pytest.mark.parametrize("name", TABLES)
def test_rows_of_a_table_train_and_differ(name, tmp_path):
    """FedIG-A's Table 3; the guiding regularizer on FedAvg, ELCFS and CCST; gPerXAN's Table 2 with MixStyle and RSC."""
    rows = {}
    for block in read_table(find_table(f"tables/{name}.toml")).blocks:
        for row in block.rows:
            key = (row.method, *row.settings)
            if key not in rows:
                changes = [*FEW, f"train.rounds={TABLES[name]}", *row.settings]
                rows[key] = run_watched(small_plan(row.method, tmp_path / str(len(rows)), changes))
    for found in rows.values():
        assert np.isfinite(found.rounds.iloc[-1][["train_loss", "target_loss"]].astype(float)).all()
    for (a, one), (b, other) in combinations(rows.items(), 2):
        same_losses = one.rounds.iloc[-1]["target_loss"] == other.rounds.iloc[-1]["target_loss"]
        assert not (same_losses and one.last.keys() == other.last.keys() and equal(one.last, other.last)), (a, b)


def equal(a, b):
    """Two models, bit for bit."""
    return all(np.array_equal(a[key], b[key]) for key in a)


# own batch norm shows in the shared model from the second round on, FedDG-GA's weights from the third
PAIRS = {"elcfs+gfedavg": 1, "ccst+gfedavg": 1, "randaugment+gperxan": 1, "selfreg+fedbn": 2, "rsc+feddg-ga": 3}


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_train_and_differ_from_both_halves(pair, tmp_path):
    """The regularizer as a pair of rows, and methods of this kind on other servers and norms."""
    names, changes = [pair, *pair.split("+")], [*FEW, f"train.rounds={PAIRS[pair]}"]
    models = [run_watched(small_plan(name, tmp_path / str(i), changes)).last for i, name in enumerate(names)]
    for half in models[1:]:
        assert models[0].keys() != half.keys() or not equal(models[0], half)
