"""Refining parts on hand-computed numbers: the server's step, the average over rounds, PLAN's rows and the cache."""

import numpy as np
import pytest
from replies import model
from safetensors.numpy import load_file
from support import Interrupt, numbers, run_small, small_experiment

from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe, find_recipe
from fedsim.models.inserts.prompt_sets import ROWS
from fedsim.run.workspace import close_workspaces
from fedsim.settings.experiment import Experiment
from strategies.parts import ServerRound, Update
from strategies.refine.own_rows import OwnRows
from strategies.refine.server_average import ServerAverage
from strategies.refine.server_step import ServerStep
from strategies.refine.upload_cache import UploadCache
from strategies.server_parts import ServerParts
from strategies.state import ServerState
from strategies.weights.by_examples import ByExamples


def server(previous, round=1, arrays=None, state=None):
    """The round that a refining part gets; `w` is the only parameter."""
    found = ServerRound(round, 5, ["a"], previous, {} if state is None else state, parameters=frozenset({"w"}))
    found.arrays = {} if arrays is None else arrays
    return found


def test_server_step_by_hand():
    """1 + 0.5 (3 - 1) = 2; buffers take the fused value."""
    moved = ServerStep(0.5).refine(model(3, mean=7, count=4), server(model(1, mean=5, count=2)))
    assert [moved[name].item() for name in ("w", "mean", "count")] == [2.0, 7.0, 4]
    assert [moved[name].dtype for name in moved] == [np.float32, np.float32, np.int64]
    assert ServerStep(2.0).refine(model(3), server(model(1)))["w"].item() == 5.0


def test_average_over_rounds_by_hand():
    """beta = 0.5 on 2, 4, 8 gives 2, 3, 5.5; the running mean is 2, 3, 14/3. The clients train on 2, 4, 8."""
    for part, means in ((ServerAverage(0.5), [2, 3, 5.5]), (ServerAverage(running=True), [2, 3, 14 / 3])):
        arrays, state = {}, {}
        for round, (theta, mean) in enumerate(zip([2.0, 4.0, 8.0], means), start=1):
            seen = server(model(0), round, arrays, state)
            average = part.refine(model(theta, mean=theta + 1, count=round), seen)
            assert average["w"].item() == np.float32(mean)
            assert average["mean"].item() == pytest.approx(mean + 1, rel=1e-6)
            assert average["count"].item() == round
            start = part.start(average, seen)
            assert [start[name].item() for name in ("w", "mean", "count")] == [theta, theta + 1, round]


def test_average_begins_when_it_is_told():
    """Before `first_round` it is the newest model; with beta = 0 it always is, as with a step of eta = 1."""
    arrays, state = {}, {}
    part = ServerAverage(0.5, first_round=2)
    seen = [server(model(0), round, arrays, state) for round in (1, 2, 3)]
    found = [part.refine(model(theta), each)["w"].item() for theta, each in zip([1, 3, 5], seen)]
    assert found == [1.0, 3.0, 4.0]
    for neutral in (ServerAverage(0.0), ServerStep(1.0)):
        seen = server(model(0))
        assert [neutral.refine(model(theta), seen)["w"].item() for theta in (3, 0.1)] == [3.0, np.float32(0.1)]


def test_clients_train_on_beside_the_average_and_a_resumed_run_has_it(tmp_path):
    """Training losses are FedAvg's, but the evaluated model differs; after a kill and a resume the tables are equal."""

    def run(folder, method, *callbacks):
        method = {"name": "fedavg", "refine": method}
        return run_small(small_experiment(tmp_path / folder, method, train={"iterations": 1}), *callbacks)[0]

    whole = run("whole", ["server_average"])
    ours, theirs = numbers(whole / "rounds.csv"), numbers(run("plain", []) / "rounds.csv")
    assert ours["train_loss"].equals(theirs["train_loss"])
    assert (ours["target_loss"].iloc[2:] != theirs["target_loss"].iloc[2:]).all()
    with pytest.raises(KeyboardInterrupt):
        run("cut", ["server_average"], Interrupt(2))
    close_workspaces()
    assert numbers(run("cut", ["server_average"]) / "rounds.csv").equals(ours)


def test_the_state_of_parts_in_another_order_is_not_lost_without_a_word(tmp_path):
    """A version that put the refining parts in another order saved their state under other places."""
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


@pytest.mark.parametrize("optimizer", ["fedavgm", "fedyogi"])
def test_server_optimizers_do_not_move_rows(optimizer):
    """Client b sends nothing in round 2: its row stays, whatever the moments of round 1. Others are what was sent."""
    recipe, names = find_recipe(f"plan+{optimizer}"), (*ROWS, "w")
    after, memory = {name: np.zeros((2, 1), np.float32) for name in names}, [{} for _ in recipe.refine]
    for number, senders in ((1, "ab"), (2, "a")):
        before = after
        updates = [Update(c, 4, {name: array + number for name, array in before.items()}) for c in senders]
        seen = ServerRound(number, 2, ["a", "b"], before, updates=updates, parameters=frozenset(names))
        after = recipe.fuse.fuse(updates, dict.fromkeys(senders, 1 / len(senders)), seen)
        for part, arrays in zip(recipe.refine, memory):
            after = part.refine(after, seen.of_part({}, arrays))
        assert not np.array_equal(after["w"], before["w"])
        moved = [(after[name] - before[name]).ravel().tolist() for name in ROWS]
        assert moved == [[number, number if "b" in senders else 0]] * 2


@pytest.mark.parametrize("method", [{"name": "plan"}, {"name": "fedavg", "add": ["ensemble_distillation"]}])
@pytest.mark.parametrize("fuse", ["krum", "bulyan", "coordinate_median", "trimmed_mean"])
def test_a_fusion_that_leaves_clients_out_is_refused(method, fuse):
    """Their rows, or their models as teachers, would be in the model that predicts all the same."""
    with pytest.raises(UserError, match=f"assumes that no client is left out .* not hold with {fuse}"):
        build_recipe(Experiment(method={**method, "fuse": fuse}))


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


def trained(folder, *callbacks, **method):
    train = {"rounds": 2, "iterations": 1, "clients_per_round": 1}
    folder, _ = run_small(small_experiment(folder, {"name": "gperxan", **method}, train=train), *callbacks)
    return load_file(folder / "last.safetensors"), numbers(folder / "rounds.csv")


def test_drawn_clients_train_alike_and_a_resumed_run_has_the_cache(tmp_path):
    """Only the BN side of the model for the unseen domain changes; after a kill and a resume the model is equal."""
    plain, ours = (trained(tmp_path / str(len(add)), add=add) for add in ([], ["upload_cache"]))
    assert plain[1]["train_loss"].equals(ours[1]["train_loss"])
    changed = {name for name in plain[0] if not np.array_equal(plain[0][name], ours[0][name])}
    assert changed
    assert all(".bn." in name or name.endswith(".s_bn") for name in changed)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "cut", Interrupt(1), add=["upload_cache"])
    close_workspaces()
    cut = trained(tmp_path / "cut", add=["upload_cache"])
    assert all(np.array_equal(cut[0][name], ours[0][name]) for name in cut[0])


@pytest.mark.parametrize(("name", "words"), [
    ("fedavg", "clients upload tensors that they keep"),
    ("feddg-ga+fedbn", "examples, which does not hold with generalization_adjustment"),
    ("fedbn+krum", "weighted mean .* not hold with krum"),
])  # fmt: skip
def test_what_has_nothing_to_keep_or_no_weights_is_refused(name, words):
    with pytest.raises(UserError, match=words):
        build_recipe(Experiment(method={"name": name, "add": ["upload_cache"]}))
