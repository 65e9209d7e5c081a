"""The bank of FedSR's class references."""

import re

import numpy as np
import pytest

from strategies.banks.class_references import ClassReferences
from strategies.parts import SERVER, RefusedUpdateError, ServerRound, Update

BANK = ClassReferences()
SERVER_ROUND = ServerRound(2, 3, ["a", "b", "c"], {}, classes=3)


def contribution(counts, *rows):
    r_mu = np.array(rows, np.float32).reshape(len(rows), 1)
    return {"r_mu": r_mu, "r_rho": r_mu + 10, "counts": np.array(counts, np.int64)}


def test_rows_are_averaged_by_counts():
    """{y0: 10}, {y0: 30, y1: 5} with rows 1 and 3 -> 2.5; y1 is the second client's; y2 stays."""
    entries = {"a": contribution([10, 0, 0], 1), "b": contribution([30, 5, 0], 3, 7)}
    old = {SERVER: {"r_mu": np.full((3, 1), 4, np.float32), "r_rho": np.full((3, 1), 5, np.float32)}}
    new = BANK.merge(old, entries, SERVER_ROUND)[SERVER]
    assert new["r_mu"].ravel().tolist() == [2.5, 7, 4]
    assert new["r_rho"].ravel().tolist() == [12.5, 17, 5]
    first = BANK.merge({}, entries, SERVER_ROUND)[SERVER]
    assert (first["r_mu"][2], first["r_rho"][2]) == (0, 1)


def test_what_is_handed_out():
    bank = BANK.merge({}, {"a": contribution([1, 1, 1], 1, 2, 3)}, SERVER_ROUND)
    assert BANK.hand_out({}, "a", SERVER_ROUND) == {}
    assert BANK.hand_out(bank, "a", SERVER_ROUND) is BANK.hand_out(bank, "b", SERVER_ROUND)
    silent = ClassReferences(shared=False)
    assert not silent.contributed
    assert silent.hand_out(bank, "a", SERVER_ROUND) is None
    assert silent.gather(Update("a", 1, {}), SERVER_ROUND) == {}
    assert silent.merge({}, {"a": {}}, SERVER_ROUND) == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"extra": np.zeros(1)}, "it holds"),
        ({"counts": np.array([1, 0], np.int64)}, r"expected int64\[3\]"),
        ({"counts": np.array([1.0, 0, 0])}, "float64"),
        ({"counts": np.array([1, -1, 0], np.int64)}, "negative"),
        ({"counts": np.array([1, 1, 0], np.int64)}, "2 rows"),
        ({"r_mu": np.zeros((1, 1))}, "r_mu is float64"),
        ({"r_rho": np.zeros((1, 1, 1), np.float32)}, "r_rho is"),
    ],
)
def test_what_is_refused(change, reason):
    good = contribution([4, 0, 0], 1)
    assert BANK.accept("a", good, SERVER_ROUND) == ""
    assert re.search(reason, BANK.accept("a", {**good, **change}, SERVER_ROUND))


def test_counts_cannot_exceed_the_images():
    records = {BANK.name: contribution([4, 0, 0], 1)}
    assert BANK.gather(Update("a", 4, {}, records=records), SERVER_ROUND)["counts"][0] == 4
    with pytest.raises(RefusedUpdateError, match="4 of 3 images"):
        BANK.gather(Update("a", 3, {}, records=records), SERVER_ROUND)
