"""FISC's bank, and FINCH where only inner products are known."""

import numpy as np
import pytest

from strategies.banks.interpolation_style import InterpolationStyle
from strategies.parts import SERVER, ServerRound
from strategies.tools.finch import partitions, partitions_of_products

BANK = InterpolationStyle()


def style(*numbers):
    mean, std = np.split(np.array([numbers], np.float32), 2, axis=1)
    return {"mean": mean, "std": std}


def merged(styles, bank=BANK, server=None):
    entries = {f"client{number}": style(*numbers) for number, numbers in enumerate(styles)}
    record = bank.hand_out(bank.merge({}, entries, server or ServerRound(0, 3, [], {})), "client0", server)
    return np.concatenate([record["mean"], record["std"]], axis=1)[0].tolist()


def groups_of(*means, sizes, spread=0.0):
    rng = np.random.default_rng(0)
    return [np.array(mean) + spread * rng.normal(size=2) for mean, size in zip(means, sizes) for _ in range(size)]


def test_t2_median_of_the_cluster_means():
    three = [(1, 5), (2, 9), (9, 1)]
    assert merged([each for each in three for _ in range(2)]) == [2, 5]
    four = [*three, (4, 2)]
    twice = [each for each in four for _ in range(2)]
    assert merged(twice) == [3, 3.5]
    assert merged(twice, InterpolationStyle(median="lower")) == [2, 2]


def test_t8_every_group_counts_the_same():
    means = [(1, 9), (3, 7), (6, 5), (8, 1)]
    wanted = np.median(means, axis=0)
    for sizes in ((2, 2, 2, 3), (3, 2, 2, 2), (2, 3, 2, 2)):
        server = ServerRound(0, 3, [], {})
        styles = groups_of(*means, sizes=sizes, spread=0.005)
        assert merged(styles, server=server) == pytest.approx(wanted, abs=0.02)
        assert [(row["quantity"], row["value"]) for row in server.details] == [("style_clusters", 4)]
    tight = groups_of(*means, sizes=(2, 2, 2, 3))
    assert merged([*tight, *[tight[0]] * 40]) == merged(tight) == pytest.approx(wanted)


def test_few_clients():
    for styles in ([(1, 4)], [(1, 4), (3, 1)], [(1, 4), (3, 1), (8, 1)]):
        server = ServerRound(0, 3, [], {})
        assert merged(styles, server=server) == pytest.approx(np.mean(styles, axis=0))
        assert len(server.notes) == 1
        assert "clients_per_domain" in server.notes[0]
    server = ServerRound(0, 3, [], {})
    merged([(1, 4), (1, 4), (3, 1), (3, 1)], server=server)
    assert server.notes == []
    assert BANK.hand_out(BANK.merge({}, {}, server), "client0", server) == {}


def test_t9_the_same_2c_numbers_for_every_client():
    entries = {name: style(*np.arange(1, 7) * factor) for name, factor in (("a", 1), ("b", 2))}
    bank = BANK.merge({}, entries, ServerRound(0, 3, [], {}))
    assert bank.keys() == {SERVER}  # no client's own style is kept
    first, second, late = (BANK.hand_out(bank, client, ServerRound(1, 3, [], {})) for client in ("a", "b", "late"))
    assert first is second is late
    assert {name: (array.shape, array.dtype) for name, array in first.items()} == dict.fromkeys(
        ("mean", "std"), ((1, 3), np.float32)
    )


@pytest.mark.parametrize(("change", "reason"), [
    ({"mean": np.zeros((2, 3), np.float32), "std": np.ones((2, 3), np.float32)}, "it holds 2 styles, expected one"),
    ({"std": np.zeros((1, 3), np.float32)}, "not positive"),
    ({"mean": np.zeros((1, 3))}, "float64"),
])  # fmt: skip
def test_what_is_refused(change, reason):
    good, server = style(1, 2, 3, 1, 1, 1), ServerRound(0, 3, [], {})
    assert BANK.accept("a", good, server) == ""
    assert reason in BANK.accept("a", {**good, **change}, server)


def test_finch_of_inner_products_is_finch_of_the_points():
    rng = np.random.default_rng(0)
    for count in (1, 2, 3, *rng.integers(4, 40, 30)):
        points = rng.normal(size=(count, 6)) + rng.normal(size=6)
        points[rng.random(count) < 0.1] = 0
        points[-1] = points[0]
        found, wanted = partitions_of_products(points @ points.T), partitions(points)
        assert [labels.tolist() for labels in found] == [labels.tolist() for labels in wanted]
    assert partitions_of_products(np.zeros((0, 0)))[-1].tolist() == []
