"""Refining parts, generalization adjustment and FedDrop by hand: steps, averages, rows, weights, silent units."""

import math
import re

import numpy as np
import pytest
import torch
from replies import model
from safetensors.numpy import load_file
from support import Interrupt, numbers, run_small, small_experiment, tiny_experiment
from torch import nn

from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe
from fedsim.models.cnns import DigitsCNN
from fedsim.models.hidden import hidden_layers
from fedsim.models.inserts.kept_scale import KeptScale
from fedsim.models.inserts.projection_head import ProjectionHead
from fedsim.models.inserts.prompt_sets import ROWS
from fedsim.models.net import Net
from fedsim.runs.workspace import close_workspaces
from fedsim.settings.experiment import Experiment
from strategies.parts import ServerRound, Update
from strategies.refine.own_rows import OwnRows
from strategies.refine.server_average import ServerAverage
from strategies.refine.server_step import ServerStep
from strategies.refine.upload_cache import UploadCache
from strategies.server_parts import ServerParts
from strategies.share.random_subnet import RandomSubnet
from strategies.state import ServerState
from strategies.weights.by_examples import ByExamples
from strategies.weights.generalization_adjustment import VARIANTS, adjust_weights, step_size
from strategies.wire.cuts import crop, uncrop


def refined(part, *thetas):
    """[(w, mean, count, the start of the next round)] of rounds whose fused model has these w, and means one larger."""
    arrays, state, found = {}, {}, []
    for round, theta in enumerate(thetas, start=1):
        server = ServerRound(round, 5, ["a"], model(1, mean=5), state, parameters=frozenset({"w"}), arrays=arrays)
        new = part.refine(model(theta, mean=theta + 1, count=round), server)
        assert [new[name].dtype for name in new] == [np.float32, np.float32, np.int64]
        start = part.start(new, server)
        found.append((*(new[name].item() for name in ("w", "mean", "count")), start["w"].item(), start["mean"].item()))
    return found


@pytest.mark.parametrize(("part", "thetas", "expected"), [
    (ServerStep(0.5), [3.0], [(2, 4, 1, 2, 4)]),  # 1 + 0.5 (3 - 1) = 2; buffers take the fused value
    (ServerStep(2.0), [3.0], [(5, 4, 1, 5, 4)]),
    (ServerStep(1.0), [0.1], [(np.float32(0.1), np.float32(1.1), 1, np.float32(0.1), np.float32(1.1))]),
    # beta = 0.5 on 2, 4, 8 gives 2, 3, 5.5; the clients train on 2, 4, 8
    (ServerAverage(0.5), [2.0, 4.0, 8.0], [(2, 3, 1, 2, 3), (3, 4, 2, 4, 5), (5.5, 6.5, 3, 8, 9)]),
    (ServerAverage(running=True), [2.0, 4.0, 8.0], [(2, 3, 1, 2, 3), (3, 4, 2, 4, 5), (14 / 3, 17 / 3, 3, 8, 9)]),
    (ServerAverage(0.5, first_round=2), [1.0, 3.0, 5.0], [(1, 2, 1, 1, 2), (3, 4, 2, 3, 4), (4, 5, 3, 5, 6)]),
    # 5 rounds: the average begins after floor(.4 * 5) = 2 of them, and takes the rounds 4, 6, ...
    (ServerAverage(running=True, after=0.4, cycle=2), [9.0, 9.0, 8.0, 2.0, 7.0, 4.0],
     [(9, 10, 1, 9, 10), (9, 10, 2, 9, 10), (8, 9, 3, 8, 9), (2, 3, 4, 2, 3), (2, 3, 5, 7, 8), (3, 4, 6, 4, 5)]),
    (ServerAverage(running=True), [2.0, 4.0, 9.0], [(2, 3, 1, 2, 3), (3, 4, 2, 4, 5), (5, 6, 3, 9, 10)]),
    (ServerAverage(0.0), [3.0, 0.5], [(3, 4, 1, 3, 4), (0.5, 1.5, 2, 0.5, 1.5)]),
])  # fmt: skip
def test_steps_and_averages_by_hand(part, thetas, expected):
    assert refined(part, *thetas) == [pytest.approx(each, rel=1e-6) for each in expected]


def run(folder, method, *callbacks, rounds=3, **train):
    folder, _ = run_small(tiny_experiment(folder, method, rounds, train=train), *callbacks)
    return load_file(folder / "last.safetensors"), numbers(folder / "rounds.csv")


@pytest.mark.parametrize(("method", "train", "changed"), [
    ({"name": "fedavg", "refine": ["server_average"]}, {}, r""),
    # only the batch-norm side of the model for the unseen domain
    ({"name": "gperxan", "add": ["upload_cache"]}, {"rounds": 2, "clients_per_round": 1}, r"\.bn\.|\.s_bn$"),
])  # fmt: skip
def test_clients_train_on_as_without_the_part_and_a_resumed_run_has_its_state(method, train, changed, tmp_path):
    """Training losses are the same and the evaluated model differs; after a kill and a resume the tables are equal."""
    plain, losses = run(tmp_path / "plain", method["name"], **train)
    ours, rounds = run(tmp_path / "ours", method, **train)
    assert losses["train_loss"].equals(rounds["train_loss"])
    assert (losses["target_loss"] != rounds["target_loss"])[2:].all()
    different = [name for name in plain if not np.array_equal(plain[name], ours[name])]
    assert different
    assert all(re.search(changed, name) for name in different)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", method, Interrupt(1), **train)
    close_workspaces()
    model_again, rounds_again = run(tmp_path / "cut", method, **train)
    np.testing.assert_equal(model_again, ours)
    assert rounds_again.equals(rounds)


def test_the_state_of_parts_in_another_order_is_not_lost_without_a_word(tmp_path):
    experiment = small_experiment(tmp_path, {"name": "feddyn", "add": ["server_average"]})
    recipe = build_recipe(experiment)
    parts = ServerParts(recipe, experiment, {}, ServerState())
    first, second = (f"refine.{place}.{type(part).__name__}" for place, part in enumerate(recipe.refine))
    parts.require_places(ServerState(parts={first: {}, "weights": {}}, tensors={second: {}}))
    with pytest.raises(UserError, match=r"state of refine\.1\.DynamicCorrection, which has another place"):
        parts.require_places(ServerState(tensors={"refine.1.DynamicCorrection": {}}))


def test_the_server_keeps_the_row_of_each_client():
    """Client b sent nothing: its row stays. Aggregators are as fused."""
    previous = {name: np.zeros((3, 1), np.float32) for name in ROWS} | {"w": np.zeros(1, np.float32)}
    sent = {client: {**{name: np.full((3, 1), value, np.float32) for name in ROWS}, "w": np.ones(1, np.float32)}
            for client, value in (("a", 1.0), ("c", 5.0))}  # fmt: skip
    seen = ServerRound(2, 6, ["a", "b", "c"], previous, updates=[Update(c, 4, own) for c, own in sent.items()])
    found = OwnRows().refine({name: array + 3 for name, array in previous.items()}, seen)
    assert all(found[name].ravel().tolist() == [1, 0, 5] for name in ROWS)
    assert found["w"].tolist() == [3.0]
    assert all(not previous[name].any() for name in ROWS)


def update(client, examples, variance, batches):
    arrays = {"w": np.ones(1), "bn.running_var": np.full(1, variance), "bn.num_batches_tracked": np.array(batches)}
    return Update(client, examples, arrays)


def test_the_newest_personal_tensors_of_each_client_count():
    """Variances 1 and 5 of 1 and 3 images give 4; when b comes alone with 9, a still counts: (1 + 27) / 4 = 7."""
    state, arrays, means = {}, {}, []
    places = {"w": "shared", "bn.running_var": "upload", "bn.num_batches_tracked": "upload"}
    for updates in (
        [update("a", 1, 1.0, 8), update("b", 3, 5.0, 2)], [update("b", 3, 9.0, 4)], [update("c", 4, 1.0, 1)]
    ):  # fmt: skip
        seen = ServerRound(1, 3, ["a", "b", "c"], {}, state, updates=updates, places=places, arrays=arrays,
                           known_weights=ByExamples().known)  # fmt: skip
        fused = UploadCache().refine(dict(updates[0].arrays), seen)
        assert fused["w"] is updates[0].arrays["w"]
        assert fused["bn.num_batches_tracked"] == 8  # counters take the maximum
        means.append(fused["bn.running_var"].item())
    assert means == [4.0, 7.0, 4.0]


THIRD, OFFICIAL = 1 / 3, {"variant": "official"}


EQUAL, UNEVEN, RISING = [THIRD] * 3, [0.1, 0.4, 0.5], [0.1, 0.2, 0.3]
UNIFORM = step_size(0.2, 2, 40, "official")


@pytest.mark.parametrize(("variant", "step", "weights", "gaps", "options", "expected"), [
    # the sixth round of forty: 0.2 times 35/40, official 36/40
    ("centred", 0.175, EQUAL, RISING, {}, [0.158333, 0.333333, 0.508333]),
    ("paper", 0.175, EQUAL, RISING, {}, [0.158333, 0.333333, 0.508333]),
    ("official", 0.18, EQUAL, RISING, {}, [0.315476, 0.333333, 0.351190]),
    ("paper", 0.175, EQUAL, [-1, 0.2, 0.2], {}, [0.0, 0.5, 0.5]),  # one gap is very negative
    ("centred", 0.175, UNEVEN, RISING, {}, [0, 0.372093, 0.627907]),  # clipped, then renormalised
    ("centred", 0.175, UNEVEN, RISING, {"a_min": 0.025}, [0.025 / 1.1, 0.4 / 1.1, 0.675 / 1.1]),
    ("centred", 0.175, [0.0, 0.5, 0.5], [0.3, 0.1, 0.2], {}, [0.175, 0.325, 0.5]),  # who is at zero can come back
    # equal gaps leave centred weights and draw official ones to uniform
    *((variant, 0.2, UNEVEN, [gap] * 3, {}, UNEVEN) for variant in ("centred", "paper") for gap in (0.1, 1e7, -3.0)),
    *(("official", UNIFORM, [0.5, 0.3, 0.2], [gap] * 3, {}, [0.472222, 0.305556, 0.222222]) for gap in (0.1, 1e7)),
    *((variant, 0.2, [0.7, 0.3], gaps, {}, [0.7, 0.3]) for variant in VARIANTS  # no usable gaps
      for gaps in ([0, 0], [math.nan, 0.1], [math.nan, math.nan], [math.inf, 1.0])),
])  # fmt: skip
def test_weights_by_hand(variant, step, weights, gaps, options, expected):
    found = adjust_weights(dict(zip("ABC", weights)), dict(zip("ABC", gaps)), step, variant, **options)
    assert list(found.values()) == pytest.approx(expected, abs=1e-6)
    assert expected != weights or list(found.values()) == weights


@pytest.mark.parametrize(("weights", "gaps", "expected"), [
    # partial participation keeps the mass of the subset
    ({"A": 0.5, "B": 0.3, "C": 0.2}, {"A": 0.1, "B": 0.3}, {"A": 0.4, "B": 0.4, "C": 0.2}),
    # new clients enter with a fair share
    ({"A": 0.5, "B": 0.5}, {"C": math.nan}, {"A": THIRD, "B": THIRD, "C": THIRD}),
    ({}, {"A": math.nan, "B": math.nan}, {"A": 0.5, "B": 0.5}),
    ({"A": 0.5, "B": 0.5}, {"A": 0.1, "B": 0.2, "C": 0.3}, {"A": THIRD - 0.1, "B": THIRD, "C": THIRD + 0.1}),
])  # fmt: skip
def test_who_is_absent_or_new(weights, gaps, expected):
    assert adjust_weights(weights, gaps, 0.1) == pytest.approx(expected)


def test_schedule():
    assert [step_size(0.2, round, 40) for round in (1, 6, 40)] == pytest.approx([0.2, 0.175, 0.005])
    assert [step_size(0.2, round, 40, "official") for round in (1, 6, 40)] == pytest.approx([0.205, 0.18, 0.01])
    for round in (0, 41):
        with pytest.raises(ValueError, match="outside"):
            step_size(0.2, round, 40)
    with pytest.raises(ValueError, match="unknown variant"):
        adjust_weights({"A": 1.0}, {"A": 1.0}, 0.1, "x")


@pytest.mark.parametrize(("settings", "metric"), [
    ({}, "train_loss"),
    ({"generalization_adjustment": OFFICIAL}, "validation_accuracy"),
    ({"generalization_adjustment": OFFICIAL, "generalization_gap": {"metric": "train_loss"}}, "train_loss"),
])  # fmt: skip
def test_official_variant_measures_validation_accuracy_unless_it_is_told(settings, metric):
    (report,) = build_recipe(Experiment(method={"name": "feddg-ga", **settings})).reports
    assert report.metric == metric


class Pool(nn.Module):
    """A backbone without fully connected layers: 512 pooled channels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 512, 1)

    def forward(self, x):
        return self.conv(x).mean((2, 3))


def test_hidden_layers_and_what_is_drawn_of_them():
    (bottleneck,) = hidden_layers(Net(Pool(), 512, 7, bottleneck=256))
    assert bottleneck.units == 256
    assert bottleneck.rows == ("bottleneck.0.weight", "bottleneck.0.bias", "bottleneck.1.weight", "bottleneck.1.bias",
                               "bottleneck.1.running_mean", "bottleneck.1.running_var")  # fmt: skip
    assert (bottleneck.columns, bottleneck.reader) == ("head.weight", "head")
    both = hidden_layers(Net(DigitsCNN(batch_norm=True), 50, 10, bottleneck=16))
    assert [(layer.units, layer.columns) for layer in both] == [(50, "bottleneck.0.weight"), (16, "head.weight")]
    projected = Net(Pool(), 512, 7)
    ProjectionHead(256).apply(projected)
    assert [layer.units for layer in hidden_layers(projected)] == [512, 256]
    assert hidden_layers(Net(Pool(), 512, 7)) == []  # pooled features
    scaled, x = Net(nn.Flatten(), 6, 3, bottleneck=8), torch.randn(16, 1, 2, 3)
    KeptScale(0.5).apply(scaled)
    for scale in (2, 1):  # in training and in eval mode
        scaled.train(scale == 2)
        logits = nn.functional.linear(scale * scaled.features(x), scaled.head.weight, scaled.head.bias)
        assert torch.allclose(scaled(x), logits, atol=1e-6)
    with pytest.raises(UserError, match="nothing to drop"):
        KeptScale(0.5).apply(Net(Pool(), 512, 7))
    net, rule = Net(Pool(), 512, 7, bottleneck=256), RandomSubnet(0.5)
    drawn = (("a", 1), ("a", 1), ("b", 1), ("a", 2))
    first, *others = (rule.cut(net, client, round, 0)["head.weight"][1] for client, round in drawn)
    assert [np.array_equal(first, other) for other in others] == [True, False, False]
    few = len(RandomSubnet(0.9).cut(net, "a", 1, 0)["head.weight"][1])
    assert 5 < few < 60  # a tenth of 256
    assert len(RandomSubnet(0.999).cut(Net(DigitsCNN(), 50, 10), "a", 1, 0)["backbone.fc.bias"][0]) >= 1
    assert RandomSubnet(0.0).cut(net, "a", 1, 0) == {}


def test_average_by_hand():
    """The old values are 4, 4, 1; one client keeps the first and reaches 6, the other drops it: (6 + 4) / 2 = 5."""
    base = {"w": np.array([4.0, 4.0, 1.0], np.float32)}
    kept = (([0, 2], [6.0, 2.0]), ([2], [3.0]))
    first, second = (uncrop({"w": np.float32(new)}, {"w": (np.array(at),)}, base)["w"] for at, new in kept)
    np.testing.assert_array_equal((first + second) / 2, [5.0, 4.0, 2.5])
    narrow = crop({"w": np.arange(6.0).reshape(2, 3), "b": np.arange(2.0)}, {"w": (np.array([1]), np.array([0, 2]))})
    assert (narrow["w"].tolist(), narrow["b"].tolist()) == ([[3, 5]], [0, 1])


def test_silobn_without_the_upload_sends_no_statistics(tmp_path):
    method = {"name": "silobn", "infer": "recompute", "without_statistics": {"upload": False}}
    sections = {"model": {"bottleneck": 16}, "train": {"rounds": 1, "iterations": 1}}
    _, grid = run_small(small_experiment(tmp_path, method, **sections))
    sent = [set(reply.content["arrays"]) for message, reply in grid.seen if message.metadata.message_type == "train"]
    assert len(sent) == 3
    assert not [name for name in set.union(*sent) if "running" in name or "num_batches" in name]
