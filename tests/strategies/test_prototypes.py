"""FINCH and the bank of prototypes."""

import re
from fractions import Fraction

import numpy as np
import pytest

from strategies.banks.prototypes import Prototypes
from strategies.parts import SERVER, ServerRound
from strategies.tools.finch import cluster_means, finch, first_neighbour_clusters, partitions

BANK = Prototypes()


def round_of(classes=3):
    return ServerRound(2, 3, [], {}, classes=classes)


def circle(*degrees):
    angles = np.radians(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def contribution(**protos):
    """Vectors by class, as in `c0=(1, 2)`."""
    classes = np.array([int(name[1:]) for name in protos], np.int64)
    return {"protos": np.array(list(protos.values()), np.float32).reshape(len(classes), 2), "classes": classes}


def groups(labels):
    return {frozenset(np.flatnonzero(labels == label).tolist()) for label in set(labels.tolist())}


def test_finch_on_a_circle():
    points = circle(0, 10, 25, 90, 100)
    labels = finch(points)
    assert labels.tolist() == [0, 0, 0, 1, 1]
    means = cluster_means(points, labels)
    assert means == pytest.approx(np.array([[0.963705, 0.198755], [-0.086824, 0.992404]]), abs=1e-6)
    assert means.mean(0) == pytest.approx([0.438441, 0.595580], abs=1e-6)
    assert points.mean(0) == pytest.approx([0.543493, 0.516215], abs=1e-6)


def test_finch_looks_at_directions():
    """Vectors of other lengths have the same clusters; means are of the vectors with their lengths."""
    points = np.array([(2, 0), (4, 1), (3, 0.5), (0, 1), (0.2, 2)])
    labels = finch(points)
    assert labels.tolist() == [0, 0, 0, 1, 1]
    assert cluster_means(points, labels).tolist() == [pytest.approx([3, 0.5]), pytest.approx([0.1, 1.5])]


def test_finch_partitions():
    rng = np.random.default_rng(0)
    for count in (1, 2, 3):
        for _ in range(20):
            assert finch(rng.normal(size=(count, 5))).tolist() == [0] * count
    assert groups(finch(circle(0, 10, 90, 100, 180, 190))) == {frozenset(p) for p in ((0, 1), (2, 3), (4, 5))}
    eight = partitions(circle(0, 3, 20, 24, 120, 125, 150, 156))
    assert [labels.max() + 1 for labels in eight] == [4, 2]
    assert groups(eight[-1]) == {frozenset({0, 1, 2, 3}), frozenset({4, 5, 6, 7})}


def test_finch_does_not_see_order_or_length():
    """A permutation permutes the labels, a factor changes nothing, and a zero vector is not an error."""
    rng = np.random.default_rng(1)
    points = rng.normal(size=(12, 4))
    found, order = groups(finch(points)), rng.permutation(12)
    assert {frozenset(order[list(group)].tolist()) for group in groups(finch(points[order]))} == found
    points[3] *= 7
    assert groups(finch(points)) == found
    assert len(finch(np.concatenate([points, np.zeros((1, 4))]))) == 13
    assert finch(np.zeros((5, 2))).tolist() == [0] * 5


def exact_groups(points):
    cluster = list(range(len(points)))
    for i, p in enumerate(points):
        # The sign and the square of cos(p, q) |p|, which puts the other points in the order of their cosines.
        dots = [sum(a * b for a, b in zip(p, q)) for q in points]
        signed = [Fraction(dot * abs(dot), sum(b * b for b in q) or 1) for dot, q in zip(dots, points)]
        nearest = max((j for j in range(len(points)) if j != i), key=lambda j: (signed[j], -j))
        cluster = [cluster[i] if label == cluster[nearest] else label for label in cluster]
    return groups(np.array(cluster))


def test_the_first_of_equally_near_points_is_taken():
    points = [(0, -1), (-2, -2), (1, 1), (2, 2), (2, -2), (-2, 0), (1, -1)]
    longer = [*points[:6], (7, -7)]
    found = groups(first_neighbour_clusters(np.array(points, float)))
    assert groups(first_neighbour_clusters(np.array(longer, float))) == found == exact_groups(points)
    pairs = {frozenset({0, 2}), frozenset({1, 3})}
    assert groups(finch(np.array([(2, 1), (-2, 0), (1, -2), (-2, -1)], float))) == pairs
    rng = np.random.default_rng(0)
    for _ in range(60):
        points = rng.integers(-2, 3, (rng.integers(2, 9), 2)).tolist()
        assert groups(first_neighbour_clusters(np.array(points, float))) == exact_groups(points), points


def test_merge():
    server = round_of()
    points = circle(0, 10, 25, 90, 100)
    entries = {f"client{number}": contribution(c0=point) for number, point in enumerate(points)}
    entries["client1"] = contribution(c0=points[1], c2=(5, 6))
    old = {SERVER: contribution(c1=(9, 9))}
    merged = BANK.merge(old, entries, server)
    new = merged[SERVER]
    assert new["classes"].tolist() == [0, 0, 2]
    assert new["cluster_protos"][2].tolist() == [5, 6]
    assert new["cluster_protos"][0] == pytest.approx([0.963705, 0.198755], abs=1e-6)
    assert new["cluster_protos"].dtype == np.float32
    recorded = {row["name"]: row["value"] for row in server.details if row["quantity"] == "prototype_clusters"}
    assert recorded == {"class 0": 2, "class 2": 1}
    assert server.notes == []
    assert BANK.hand_out(merged, "client0", server) is BANK.hand_out(merged, "client1", server) is new
    assert BANK.hand_out({}, "client0", server) == {}


def test_three_clients_never_cluster_and_the_log_says_so_once():
    server = round_of()
    entries = {name: contribution(c1=point) for name, point in zip("abc", circle(0, 90, 180))}
    new = BANK.merge({}, entries, server)[SERVER]
    assert new["classes"].tolist() == [1]
    assert new["cluster_protos"][0] == pytest.approx([0, 1 / 3], abs=1e-6)
    BANK.merge({}, entries, server)
    assert len(server.notes) == 1
    assert "clients_per_domain" in server.notes[0]
    assert BANK.merge({}, {"a": contribution()}, server) == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"extra": np.zeros(1)}, "it holds"),
        ({"protos": np.zeros((2, 2))}, "float64"),
        ({"protos": np.zeros((3, 2), np.float32)}, r"int64\[3\]"),
        ({"classes": np.array([0, 1], np.int32)}, "int32"),
        ({"classes": np.array([1, 0], np.int64)}, "ascend"),
        ({"classes": np.array([1, 1], np.int64)}, "ascend"),
        ({"classes": np.array([0, 3], np.int64)}, "beyond the 3"),
        ({"classes": np.array([-1, 0], np.int64)}, "beyond"),
    ],
)
def test_what_is_refused(change, reason):
    good = contribution(c0=(1, 2), c2=(3, 4))
    assert BANK.accept("a", good, round_of()) == ""
    none = {"protos": np.zeros((0, 2), np.float32), "classes": np.zeros(0, np.int64)}
    assert BANK.accept("a", none, round_of()) == ""
    assert re.search(reason, BANK.accept("a", {**good, **change}, round_of()))
