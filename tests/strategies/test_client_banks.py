"""The banks that merge what clients send, and FINCH, on numbers worked out by hand."""

import numpy as np
import pytest

from strategies.banks.amplitude import AmplitudeBank
from strategies.banks.checks import layout_of, odd_shapes
from strategies.banks.class_references import ClassReferences
from strategies.banks.feature_generator import FeatureGenerator
from strategies.banks.feature_styles import FeatureStyles, derangement
from strategies.banks.interpolation_style import InterpolationStyle
from strategies.banks.pixel_statistics import PixelStatistics
from strategies.banks.prototypes import Prototypes
from strategies.banks.style import StyleBank
from strategies.parts import SERVER, RefusedUpdateError, ServerRound, Update
from strategies.tools.finch import cluster_means, finch, first_neighbour_clusters, partitions, partitions_of_products

REFERENCES, GENERATOR, STYLES = ClassReferences(), FeatureGenerator(), FeatureStyles()
INTERPOLATION, PROTOTYPES, PIXELS = InterpolationStyle(), Prototypes(), PixelStatistics()


def round_of(**fields):
    fields = {"classes": 3, "feature_dim": 2, "weights": {"a": 0.25, "b": 0.75}, **fields}
    return ServerRound(fields.pop("round", 2), 3, fields.pop("clients", list("abcd")), {}, **fields)


def f32(values):
    return np.array(values, np.float32)


def i64(values):
    return np.array(values, np.int64)


def references(counts, *rows):
    """A contribution whose rows have one number each; r_rho is ten larger."""
    r_mu = f32(rows).reshape(len(rows), 1)
    return {"r_mu": r_mu, "r_rho": r_mu + 10, "counts": i64(counts)}


def generator(value, inputs=3, features=2):
    shapes = {"hidden.weight": (4, inputs), "hidden.bias": (4,), "out.weight": (features, 4), "out.bias": (features,)}
    return {name: np.full(shape, value, np.float32) for name, shape in shapes.items()}


def style(value):
    return {"style": np.full((4, 3), value, np.float32)}


def rows(count, value=0.5, channels=3):
    return {name: np.full((count, channels), each, np.float32) for name, each in (("mean", value), ("std", value / 2))}


def overall(*numbers):
    return dict(zip(("mean", "std"), np.split(f32([numbers]), 2, axis=1)))


def protos(**rows):
    """Vectors by class, as in `c0=(1, 2)`."""
    return {"protos": f32(list(rows.values())).reshape(len(rows), 2), "classes": i64([int(name[1:]) for name in rows])}


def test_class_references_are_averaged_by_counts_and_generators_by_weight():
    """{y0: 10}, {y0: 30, y1: 5} with rows 1 and 3 -> 2.5; y1 is the second client's; y2 stays."""
    entries = {"a": references([10, 0, 0], 1), "b": references([30, 5, 0], 3, 7)}
    old = {SERVER: {"r_mu": np.full((3, 1), 4, np.float32), "r_rho": np.full((3, 1), 5, np.float32)}}
    new = REFERENCES.merge(old, entries, round_of())[SERVER]
    assert (new["r_mu"].ravel().tolist(), new["r_rho"].ravel().tolist()) == ([2.5, 7, 4], [12.5, 17, 5])
    first = REFERENCES.merge({}, entries, round_of())[SERVER]
    assert (first["r_mu"][2], first["r_rho"][2]) == (0, 1)
    records = {REFERENCES.name: entries["a"]}
    assert REFERENCES.gather(Update("a", 10, {}, records=records), round_of())["counts"][0] == 10
    wrapping = {REFERENCES.name: references([2**63 - 1, 2**63 - 1, 2], 1, 1, 1)}  # their sum in int64 is 0
    for counted, counted_by in (("10", records), (str(2**64), wrapping)):
        with pytest.raises(RefusedUpdateError, match=f"counts {counted} of 9 images"):
            REFERENCES.gather(Update("a", 9, {}, records=counted_by), round_of())
    bank = GENERATOR.merge({}, {"a": generator(1), "b": generator(5)}, round_of())
    assert {float(value) for array in bank[SERVER].values() for value in array.ravel()} == {4.0}
    later = round_of(banks={GENERATOR.name: {SERVER: generator(1)}})
    assert GENERATOR.accept("a", generator(2), later) == ""
    assert "hidden.weight" in GENERATOR.accept("a", generator(2, inputs=9), later)


def test_every_style_goes_to_one_other_client_and_every_derangement_is_as_frequent():
    """Nothing goes to a client alone in a round, nor for a partner that has not trained yet."""
    rng = np.random.default_rng(0)
    drawn = [tuple(derangement(3, rng).tolist()) for _ in range(1000)]
    assert set(drawn) == {(1, 2, 0), (2, 0, 1)}
    assert 400 < drawn.count((1, 2, 0)) < 600
    assert derangement(2, rng).tolist() == [1, 0]
    bank, pairs = {name: style(number + 1) for number, name in enumerate("abcd")}, set()
    for number in range(1, 30):
        server = round_of(drawn=list("abd"), round=number)
        pairs.add(tuple(int(STYLES.hand_out(bank, name, server)["style"][0, 0]) for name in "abd"))
    assert pairs == {(2, 4, 1), (4, 1, 2)}
    for kept, drawn in (("ab", "a"), ("a", "ab"), ("", "abc"), ("ab", "bc")):
        assert STYLES.hand_out({name: style(1) for name in kept}, "a", round_of(drawn=list(drawn))) == {}


def merged(styles, bank=INTERPOLATION, server=None):
    """All numbers of the interpolation style of these contributions."""
    entries = {f"client{number}": overall(*numbers) for number, numbers in enumerate(styles)}
    made = bank.merge({}, entries, server or round_of())
    assert made.keys() == {SERVER}  # no client's own style is kept
    return np.concatenate(list(bank.hand_out(made, "client0", server).values()), axis=1)[0].tolist()


def test_the_style_is_the_median_of_the_cluster_means():
    """Pairs of equal styles are the clusters; an even number has two middles, of which `lower` takes the lower."""
    three = [(1, 5), (2, 9), (9, 1)]
    assert merged(three * 2) == [2, 5]
    assert merged([*three, (4, 2)] * 2) == [3, 3.5]
    assert merged([*three, (4, 2)] * 2, InterpolationStyle(median="lower")) == [2, 2]
    assert INTERPOLATION.merge({}, {}, round_of()) == {}
    # groups of very different sizes
    means, server = [(1, 9), (3, 7), (6, 5), (8, 1)], round_of()
    around = [mean for mean, size in zip(means, (2, 2, 2, 43)) for _ in range(size)]
    assert merged(around, server=server) == pytest.approx(np.median(means, axis=0))
    assert [(row["quantity"], row["value"]) for row in server.details] == [("style_clusters", 4)]
    assert server.notes == []
    for count in (1, 2, 3):
        server = round_of()
        assert merged(means[:count], server=server) == pytest.approx(np.mean(means[:count], axis=0))
        assert ["clients_per_domain" in note for note in server.notes] == [True]


def circle(*degrees):
    angles = np.radians(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def test_prototypes_are_the_means_of_finchs_clusters_where_clients_are_enough():
    """The clusters and J_c in the records; prototypes of earlier rounds are removed. Three clients never cluster."""
    server, points = round_of(), circle(0, 10, 25, 90, 100)
    entries = {f"client{number}": protos(c0=point) for number, point in enumerate(points)}
    entries["client1"] = protos(c0=points[1], c2=(5, 6))
    new = PROTOTYPES.merge({SERVER: protos(c1=(9, 9))}, entries, server)[SERVER]
    assert (new["classes"].tolist(), new["cluster_protos"][2].tolist()) == ([0, 0, 2], [5, 6])
    assert new["cluster_protos"][0] == pytest.approx([0.963705, 0.198755], abs=1e-6)
    assert new["cluster_protos"].dtype == np.float32
    recorded = {row["name"]: row["value"] for row in server.details if row["quantity"] == "prototype_clusters"}
    assert (recorded, server.notes) == ({"class 0": 2, "class 2": 1}, [])
    server, entries = round_of(), {name: protos(c1=point) for name, point in zip("abc", circle(0, 90, 180))}
    new, _ = (PROTOTYPES.merge({}, entries, server)[SERVER] for _ in range(2))
    assert new["classes"].tolist() == [1]
    assert new["cluster_protos"][0] == pytest.approx([0, 1 / 3], abs=1e-6)
    assert ["clients_per_domain" in note for note in server.notes] == [True]
    assert PROTOTYPES.merge({}, {"a": protos()}, server) == {}


def test_own_pixel_statistics_and_amplitudes_are_never_handed_back():
    """The others' come joined in the order of the domains; without rows of others the record is empty."""
    bank, server = {"a": rows(2, 0.25), "b": rows(1, 0.5), "c": rows(0)}, round_of(clients=["b", "a", "c"])
    handed = {client: PIXELS.hand_out(bank, client, server) for client in "abc"}
    means = {client: own["mean"][:, 0].tolist() for client, own in handed.items()}
    assert means == {"a": [0.5], "b": [0.25, 0.25], "c": [0.5, 0.25, 0.25]}
    assert handed["b"]["std"][:, 0].tolist() == [0.125, 0.125]
    assert PIXELS.hand_out({"a": rows(3), "b": rows(0)}, "a", server) == PIXELS.hand_out({}, "a", server) == {}
    assert PIXELS.compared(rows(4))["mean"].tolist() == [0.5] * 3  # the mean row
    assert PIXELS.compared(rows(0))["mean"].size == 0
    assert AmplitudeBank().hand_out({"a": WINDOWS, "b": WINDOWS}, "a", server).keys() == {"b"}


def test_an_odd_shape_is_refused_whoever_comes_first():
    usual, odd, longer = (layout_of({"mean": np.zeros(shape)}) for shape in ((1, 3), (1, 30), (9, 3)))
    assert odd_shapes({"a": odd, "b": usual, "c": longer}).keys() == {"a"}
    assert odd_shapes({"a": usual, "b": usual}) == odd_shapes({}) == {}


SEEN, GENERATED, GIVEN = references([4, 0, 0], 1), generator(1), overall(1, 2, 3, 1, 1, 1)
OWN, WINDOWS = protos(c0=(1, 2), c2=(3, 4)), {"amplitude": np.ones((2, 3, 5, 3), np.float32)}
STYLE = {"mean": np.zeros((2, 3), np.float32), "std": np.ones((2, 3), np.float32)}


@pytest.mark.parametrize(("bank", "good", "change", "reason"), [
    *((bank, good, {}, "") for bank, good in (
        (REFERENCES, SEEN), (GENERATOR, GENERATED), (STYLES, style(1)), (INTERPOLATION, GIVEN), (PROTOTYPES, OWN),
        (PROTOTYPES, protos()), (StyleBank(), STYLE), (AmplitudeBank(), WINDOWS), (PIXELS, rows(5)),
        (PIXELS, rows(0)))),
    *((REFERENCES, SEEN, *each) for each in (
        ({"extra": np.zeros(1)}, "it holds"), ({"counts": i64([1, 0])}, "expected int64[3]"),
        ({"counts": np.array([1.0, 0, 0])}, "float64"), ({"counts": i64([1, -1, 0])}, "negative"),
        ({"counts": i64([1, 1, 0])}, "2 rows"), ({"r_mu": np.zeros((1, 1))}, "r_mu is float64"),
        ({"r_rho": np.zeros((1, 1, 1), np.float32)}, "r_rho is"))),
    *((GENERATOR, GENERATED, *each) for each in (
        ({"discriminator": np.zeros(1)}, "it holds"), ({"hidden.bias": np.zeros(5, np.float32)}, "do not fit"),
        (generator(1, features=3), "width 3"), ({"out.bias": f32([1, np.nan])}, "NaN"))),
    *((STYLES, style(1), *each) for each in (
        ({"style": f32([[-2] * 3, *np.ones((3, 3))])}, ""), (style(0), "a deviation is 0"), (style(np.nan), "NaN"),
        ({"style": np.ones((3, 3), np.float32)}, "has 3 rows, expected 4"))),
    *((INTERPOLATION, GIVEN, *each) for each in (
        (dict.fromkeys(GIVEN, np.ones((2, 3), np.float32)), "it holds 2 styles, expected one"),
        ({"std": np.zeros((1, 3), np.float32)}, "not positive"))),
    *((PROTOTYPES, OWN, *each) for each in (
        ({"extra": np.zeros(1)}, "it holds"), ({"protos": np.zeros((2, 2))}, "float64"),
        ({"protos": np.zeros((3, 2), np.float32)}, "int64[3]"), ({"classes": np.array([0, 1], np.int32)}, "int32"),
        ({"classes": i64([1, 0])}, "ascend"), ({"classes": i64([1, 1])}, "ascend"),
        ({"classes": i64([0, 3])}, "beyond the 3"), ({"classes": i64([-1, 0])}, "beyond"),
        # differences in int64 are all positive
        ({"classes": i64([0, 2**63 - 1, -(2**63), -1, 1]), "protos": f32(np.ones((5, 2)))}, "beyond"))),
    *((StyleBank(), STYLE, *each) for each in (
        ({"extra": np.zeros(1)}, "it holds ['extra', 'mean', 'std']"),
        ({"mean": np.zeros((2, 3))}, "expected filled float32"), ({"mean": np.zeros(3, np.float32)}, "dimensions"),
        ({"mean": f32([[np.nan] * 3] * 2)}, "NaN"), ({"std": np.ones((2, 4), np.float32)}, "but std"),
        (dict.fromkeys(STYLE, np.ones((6, 3), np.float32)), "6 rows, for 5 images"),
        (dict.fromkeys(STYLE, np.zeros((0, 3), np.float32)), "filled"))),
    *((AmplitudeBank(), WINDOWS, *each) for each in (({"amplitude": -WINDOWS["amplitude"]}, "negative"),
        ({"amplitude": np.repeat(WINDOWS["amplitude"], 3, 0)}, "6 rows, for 5"))),
    *((PIXELS, rows(5), *each) for each in (
        (rows(6), "6 rows, for 5 images"), (rows(5, channels=0), "and channels"),
        ({"std": rows(4)["std"]}, "the same images"),
        ({"mean": np.zeros((5, 3))}, "float32 with 2"), ({"mean": np.full((5, 3), 1.1, np.float32)}, "that no image"),
        ({"std": np.zeros((5, 3), np.float32)}, "or a standard deviation"),
        ({"std": np.full((5, 3), 2.25, np.float32)}, "standard deviation that no image"))),
])  # fmt: skip
def test_what_is_refused(bank, good, change, reason):
    found = bank.accept("a", {**good, **change}, round_of(class_counts={"a": (3, 2)}))
    assert reason in found
    assert bool(found) == bool(reason)


def groups(labels):
    return {frozenset(np.flatnonzero(labels == label).tolist()) for label in set(labels.tolist())}


def test_finch_by_hand():
    """Directions make the clusters, means are of the vectors with their lengths; the coarsest partition with more
    than one cluster is chosen, and three points never make two. Every partition of the series, also with a zero
    vector and with equal points."""
    points = np.array([(2, 0), (4, 1), (3, 0.5), (0, 1), (0.2, 2)])
    labels = finch(points)
    assert labels.tolist() == finch(circle(0, 10, 25, 90, 100)).tolist() == [0, 0, 0, 1, 1]
    assert cluster_means(points, labels).tolist() == [pytest.approx([3, 0.5]), pytest.approx([0.1, 1.5])]
    rng = np.random.default_rng(0)
    for count in (1, 2, 3):
        assert finch(rng.normal(size=(count, 5))).tolist() == [0] * count
    assert groups(finch(circle(0, 10, 90, 100, 180, 190))) == {frozenset(p) for p in ((0, 1), (2, 3), (4, 5))}
    eight = partitions(circle(0, 3, 20, 24, 120, 125, 150, 156))
    assert [labels.max() + 1 for labels in eight] == [4, 2]
    assert groups(eight[-1]) == {frozenset({0, 1, 2, 3}), frozenset({4, 5, 6, 7})}
    assert finch(np.zeros((5, 2))).tolist() == [0] * 5
    # the first of equally near points is taken: cosines that are equal but for rounding are ties
    tied = np.array([(2, 1, 3), (2, 0.9, 3.1), (1, 2, 3), (0.9, 2, 3.1), (1, 1, 2)])
    for factor in np.arange(1, 50) / 7:
        found = first_neighbour_clusters(tied * [[factor], [1], [1], [1], [factor]])
        assert groups(found) == {frozenset({0, 1, 4}), frozenset({2, 3})}
    rng = np.random.default_rng(0)
    for count in (1, 2, 3, *rng.integers(4, 40, 20)):
        points = rng.normal(size=(count, 6)) + rng.normal(size=6)
        points[rng.random(count) < 0.1] = 0
        points[-1] = points[0]
        found, wanted = partitions_of_products(points @ points.T), partitions(points)
        assert [labels.tolist() for labels in found] == [labels.tolist() for labels in wanted]
    assert partitions_of_products(np.zeros((0, 0)))[-1].tolist() == []
