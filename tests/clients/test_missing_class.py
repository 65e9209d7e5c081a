"""Clients that lack classes: banks_and_representation.md 8.6 for the methods with class-wise records."""

import numpy as np
import pytest
from support import numbers, run_small, small_experiment

from fedsim.arrays import record_to_arrays

SKEWED = {"clients_per_domain": 2, "partition": "dirichlet", "alpha": 0.1, "split": "random"}
SMALL = {"adversarial_reference": {"d_noise": 4, "width": 8, "r": 6, "hidden": 5}}


@pytest.mark.parametrize(
    ("method", "bank", "classes_of"),
    [
        ({"name": "fedsr"}, "class_reference", lambda sent: np.flatnonzero(sent["counts"])),
        ({"name": "fpl"}, "prototypes", lambda sent: sent["classes"]),
        ({"name": "fedadg", **SMALL}, "generator", None),
    ],
    ids=["fedsr", "fpl", "fedadg"],
)
def test_a_class_is_missing_on_a_client(method, bank, classes_of, tmp_path):
    """The run goes on with finite losses; a client has rows for its own classes, and the next round holds the rest."""
    folder, grid = run_small(small_experiment(tmp_path, method, data=SKEWED, train={"rounds": 2}))
    assert np.isfinite(numbers(folder / "rounds.csv")["train_loss"][1:]).all()
    if classes_of is None:
        return
    held = {}
    for message, reply in grid.seen:
        if message.metadata.message_type == "train":
            client = message.content.config_records["config"]["client"]
            found = set(classes_of(record_to_arrays(reply.content.array_records[bank])).tolist())
            assert held.setdefault(client, found) >= found
    assert any(len(classes) < 10 for classes in held.values())
    assert len(set.union(*held.values())) > max(map(len, held.values()))
