"""Updates in fewer bytes: numbers by hand, bounds, what is on the wire and refused, the same on all runtimes."""

import io

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of_any_size
from support import interrupt, numbers, run_small, tiny_experiment

from fedsim.common.errors import UserError
from fedsim.methods.any_client import of_our_client
from fedsim.methods.assembly import assemble, build_net, build_recipe
from fedsim.records.callbacks import RunCallback
from fedsim.runs.plan import resolve
from fedsim.runs.traffic import traffic
from fedsim.runtime.launch import launch
from fedsim.tensors.arrays import record_to_arrays, state_to_record
from fedsim.tensors.records import arrays_of, config_of
from fedsim.testing.contract import findings
from strategies.compress.half_precision import HalfPrecision
from strategies.compress.quantized import RANGES, Quantized
from strategies.compress.top_k import INDICES, VALUES, TopK, largest
from strategies.stored import heads_of
from strategies.wire.compression import decode_update, encode_update, reply_form
from strategies.wire.packing import pack_record, unpack_record

PARTS = (HalfPrecision(), Quantized(), Quantized(4), Quantized(2), TopK(0.1), TopK(0.5))
NAMES = ("half_precision", "quantized", "top_k")


class Halves:
    """A generator whose every draw is 0.5."""

    def random(self, shape):
        return np.full(shape, 0.5)


def float32(*values):
    return np.array(values, np.float32)


# --- numbers by hand --------------------------------------------------------------------------------------------------


def test_a_move_in_half_precision():
    """0.1 has the neighbours 1638 and 1639 / 2^14; 2^-25 lies between 0 and 2^-24 and is rounded to 0."""
    moves = {"w": float32(0.1, -2.0, 2**-25, 3 * 2**-25)}
    sent = HalfPrecision().encode(moves, None)
    assert (sent["w"].dtype, sent["w"].nbytes) == (np.float16, 8)
    decoded = HalfPrecision().decode(sent, heads_of(moves))["w"]
    assert (decoded.dtype, decoded.tolist()) == (np.float32, [1638 / 2**14, -2.0, 0.0, 2**-23])
    assert np.isinf(HalfPrecision().encode({"w": float32(65520)}, None)["w"]).all()


def test_levels_and_their_bytes():
    """With 2 bits, a = 0 and s = (3 - 0) / 3 = 1: floor(1.25 + 0.5) = 1, floor(0.5 + 0.5) = 1. The byte is
    0 + 3 * 4 + 1 * 16 + 1 * 64 = 92; a fifth value begins another one."""
    moves = {"w": float32(0, 3, 1.25, 0.5), "v": float32(-1, 2, 2, 2, -1)}
    sent = Quantized(2).encode(moves, Halves())
    assert {name: array.tolist() for name, array in sent.items()} == {
        "w": [92],
        "v": [0 + 3 * 4 + 3 * 16 + 3 * 64, 0],
        RANGES: [[0.0, 1.0], [-1.0, 1.0]],
    }
    decoded = Quantized(2).decode(sent, heads_of(moves))
    assert decoded["w"].tolist() == [0, 3, 1, 1]
    assert decoded["v"].tolist() == [-1, 2, 2, 2, -1]


def test_stochastic_rounding_is_right_on_average():
    """With 8 bits, a = 0 and s = 1, 1.25 is 1 in three of four draws: its mean is 1.25, its variance 3/16."""
    moves = {"w": np.full(40_002, 1.25, np.float32)}
    moves["w"][:2] = 0, 255
    sent = Quantized().encode(moves, np.random.default_rng(1))
    decoded = Quantized().decode(sent, heads_of(moves))["w"][2:]
    assert set(decoded.tolist()) == {1.0, 2.0}
    assert decoded.mean() == pytest.approx(1.25, abs=4 * np.sqrt(3 / 16 / 40_000))


def test_equal_and_missing_values_have_a_scale_of_zero():
    moves = {"a": float32(7, 7), "empty": float32()}
    sent = Quantized().encode(moves, np.random.default_rng(1))
    assert sent[RANGES].tolist() == [[7, 0], [0, 0]]
    assert Quantized().decode(sent, heads_of(moves))["a"].tolist() == [7, 7]


def test_the_error_of_top_k_is_carried_over_three_rounds():
    """Every round moves by (1, 0.5, -0.25, 0), and one of four entries is sent.

    round 1: p = (1, 0.5, -0.25, 0), 1 is sent at 0;  round 2: p = (1, 1, -0.5, 0), the first of the equal ones is sent;
    round 3: p = (1, 1.5, -0.75, 0), 1.5 is sent at 1, and e = (1, 0, -0.75, 0) remains.
    """
    move, start = float32(1, 0.5, -0.25, 0), {"w": float32(10, 10, 10, 10), "n": np.array([3])}
    error, sent_of_rounds = None, []
    for _ in range(3):
        trained = {"w": start["w"] + move, "n": np.array([4])}
        sent, error = encode_update(TopK(0.25), trained, start, {"w"}, error, None)
        sent_of_rounds.append((sent[INDICES].tolist(), sent[VALUES].tolist()))
        start = decode_update(TopK(0.25), sent, start, {"w"})
        assert start["n"].tolist() == [4]
    assert sent_of_rounds == [([0], [1.0]), ([0], [1.0]), ([1], [1.5])]
    assert start["w"].tolist() == [12.0, 11.5, 10.0, 10.0]
    assert error["w"].tolist() == [1.0, 0.0, -0.75, 0.0]


def test_the_largest_entries_of_all_tensors_together():
    assert largest(float32(1, 3, 3, 2, 3), 2).tolist() == [1, 2]
    moves = {"a": float32(1, -5), "b": np.array([[2, 0], [0, 4]], np.float32)}
    sent = TopK(0.5).encode(moves, None)
    assert (sent[INDICES].tolist(), sent[VALUES].tolist()) == ([1, 2, 5], [-5, 2, 4])
    assert TopK(0.5).decode(sent, heads_of(moves))["b"].tolist() == [[2, 0], [0, 4]]


def test_only_moves_of_shared_parameters_are_compressed():
    """Statistics, counters, and what a client keeps but uploads, travel as they are."""
    trained = {"w": float32(1.1), "mean": float32(0.3), "n": np.array(7), "own": float32(0.1)}
    sent, _ = encode_update(HalfPrecision(), trained, {"w": float32(1)}, {"w"}, None, None)
    assert {name: array.dtype.name for name, array in sent.items()} == {
        "w": "float16", "mean": "float32", "n": "int64", "own": "float32",
    }  # fmt: skip
    assert sent["own"] is trained["own"]
    model = decode_update(HalfPrecision(), sent, {**trained, "w": float32(1)}, {"w"})
    assert list(model) == list(trained)
    assert model["w"] == pytest.approx(1.1, abs=0.1 / 2**11)


# --- bounds -----------------------------------------------------------------------------------------------------------

VALUES_OF_MOVES = st.floats(-1000, 1000, width=32)
TENSORS = arrays_of_any_size.arrays(np.float32, arrays_of_any_size.array_shapes(max_dims=3), elements=VALUES_OF_MOVES)


@pytest.mark.parametrize("part", PARTS, ids=repr)
@given(moves=st.dictionaries(st.sampled_from("abc"), TENSORS, min_size=1), seed=st.integers(0, 2**32))
def test_what_is_decoded_is_within_the_bound(part, moves, seed):
    heads = heads_of(moves)
    sent = part.encode(moves, np.random.default_rng(seed))
    assert heads_of(sent) == part.form(heads)
    decoded = part.decode(sent, heads)
    assert heads_of(decoded) == heads
    error = {name: np.abs(decoded[name].astype(np.float64) - moves[name]) for name in moves}
    if isinstance(part, TopK):
        p, left = (np.concatenate([each[name].ravel() for name in moves]).astype(np.float64) for each in (moves, error))
        share = len(sent[INDICES]) / len(p)
        assert np.square(left).sum() <= (1 - share) * np.square(p).sum() * (1 + 1e-9)
        return
    for place, name in enumerate(moves):
        rounding = np.spacing(np.abs(moves[name]).max(initial=0).astype(np.float32))
        if isinstance(part, HalfPrecision):
            bound = np.maximum(np.abs(moves[name]) / 2**11, 2.0**-25)
        else:
            bound = sent[RANGES][place, 1] + rounding
        assert (error[name] <= bound).all()


# --- on the wire ------------------------------------------------------------------------------------------------------


def payload(array):
    """The bytes of one array on the wire, without its header."""
    return np.load(io.BytesIO(bytes(array.data))).nbytes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["fedavg", "fedbn", "feddrop"])
def test_the_bytes_on_the_wire_are_those_that_are_counted(method, name, tmp_path):
    settings = {"name": method, "compress": name}
    if (method, name) == ("feddrop", "top_k"):
        with pytest.raises(UserError, match=r"top_k keeps an error of every weight, and random_subnet sends others"):
            build_recipe(tiny_experiment(tmp_path, settings))
        return
    experiment = tiny_experiment(tmp_path, settings)
    folder, grid = run_small(experiment)
    clients = pd.read_csv(folder / "clients.csv").set_index(["round", "client"])
    count = 0
    for message, reply in grid.seen:
        config = config_of(message.content)
        if config["phase"] != "train":
            continue
        record = arrays_of(reply.content)["arrays"]
        size = sum(payload(array) for array in record.values())
        row = clients.loc[(config["round"], config["client"])]
        assert size == row["bytes_up"] == row["bytes_up_arrays"]
        assert unpack_record(pack_record(record)) == record  # as a site sends it
        count += 1
    assert count == 6
    up = sum(row.up or 0 for row in traffic(resolve(experiment)))
    assert up == (0 if method == "feddrop" else clients["bytes_up"].loc[1].iloc[0])


def test_how_many_bytes_a_method_sends():
    """n = 1000 weights in one tensor, 10 numbers next to it."""
    heads = {"w": ((10, 100), np.dtype(np.float32)), "mean": ((10,), np.dtype(np.float32))}
    sizes = []
    for part in (HalfPrecision(), Quantized(), Quantized(4), Quantized(2), TopK(0.1), TopK(0.01)):
        form = reply_form(part, heads, {"w"})
        sizes.append(sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in form.values()) - 40)
    assert sizes == [2000, 1000 + 16, 500 + 16, 250 + 16, 800, 80]


# --- runs -------------------------------------------------------------------------------------------------------------


def same_run(folder, other):
    for name in ("rounds", "clients"):
        pd.testing.assert_frame_equal(numbers(folder / f"{name}.csv"), numbers(other / f"{name}.csv"))
    assert (folder / "last.safetensors").read_bytes() == (other / "last.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["quantized", "top_k"])
def test_draws_and_errors_are_the_same_in_other_processes_and_after_a_resume(name, tmp_path):
    method = {"name": "fedbn", "compress": name}
    one, _ = run_small(tiny_experiment(tmp_path / "one", method, rounds=3))
    two = launch(tiny_experiment(tmp_path / "two", method, rounds=3, run={"processes": 2}))
    same_run(two, one)
    experiment = tiny_experiment(tmp_path / "resumed", method, rounds=3)
    interrupt(experiment, 2)
    resumed, _ = run_small(experiment)
    same_run(resumed, one)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quantized", "top_k"])
def test_they_are_the_same_on_ray(name, tmp_path):
    pytest.importorskip("ray")
    method = {"name": "fedavg", "compress": name}
    folders = []
    for runtime in ("inline", "ray"):
        experiment = tiny_experiment(tmp_path / runtime, method, rounds=3, run={"runtime": runtime, "workers": 2})
        folders.append(launch(experiment))
    same_run(*folders)


def test_a_method_has_its_properties_beside_it():
    """It trains, resumes in another process, answers alone and survives failures; its replies have the form it says."""
    settings = ["data.fraction=0.05", "train.rounds=2", "train.iterations=2", "method.compress=top_k"]
    assert {text: reason for text, reason in findings("fedbn", settings) if reason} == {}


def test_a_client_whose_update_was_refused_keeps_its_error_of_before(tmp_path):
    """What it left out of the refused update is not left out of an update that counts."""
    method = {"name": "fedavg", "compress": "top_k"}
    experiment = tiny_experiment(tmp_path, method, rounds=3, run={"on_client_failure": "continue"})
    plan = resolve(experiment)

    def tamper(message, reply):
        config = config_of(message.content)
        if (config["phase"], config["round"], config["client"]) == ("train", 2, "rot0"):
            arrays = arrays_of(reply.content)
            indices = np.zeros(arrays["arrays"][INDICES].shape, np.uint32)
            arrays["arrays"][INDICES] = state_to_record({INDICES: indices})[INDICES]
        return reply

    versions = []

    class Look(RunCallback):
        def on_round(self, row, clients):
            files = plan.folder.rglob("compression-*.safetensors")
            versions.append(sorted(int(path.stem[-6:]) for path in files if path.parent.name == "rot0"))

    folder, _ = run_small(experiment, Look(), tamper=tamper)
    status = pd.read_csv(folder / "clients.csv").set_index(["round", "client"])["status"]
    assert status[2, "rot0"] == ("reply refused: the positions of its entries do not rise, or lie outside of the model")
    assert (status.drop((2, "rot0")) == "ok").all()
    assert versions[-1] == [1, 3]


@pytest.mark.parametrize(("part", "change", "said"), [
    ("half_precision", lambda arrays: {"head.weight": arrays["head.weight"] * np.float16(np.inf)}, "has NaN or inf"),
    ("half_precision", lambda arrays: {"head.weight": arrays["head.weight"].astype(np.float32)}, "is float32"),
    ("quantized", lambda arrays: {RANGES: -arrays[RANGES]}, "a scale of its levels is negative"),
    ("quantized", lambda arrays: {RANGES: arrays[RANGES] * 1e300}, "has NaN or infinite values"),
    ("top_k", lambda arrays: {INDICES: arrays[INDICES] + np.uint32(10**9)}, "lie outside of the model"),
    ("top_k", lambda arrays: {VALUES: arrays[VALUES][:-1]}, "is float32"),
])  # fmt: skip
def test_what_no_client_can_have_encoded_is_refused(part, change, said, tmp_path):
    def tamper(message, reply):
        if config_of(message.content)["phase"] == "train":
            record = arrays_of(reply.content)["arrays"]
            with np.errstate(invalid="ignore"):
                record.update(state_to_record(change(record_to_arrays(record))))
        return reply

    experiment = tiny_experiment(tmp_path, {"name": "fedavg", "compress": part}, rounds=1)
    with pytest.raises(Exception, match=rf"reply refused: .*{said}"):
        run_small(experiment, tamper=tamper)


# --- what does not go together ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "said"), [
    ({"fuse": "secure_mean"}, "may look at what a single client sends, which does not hold with secure_mean"),
    ({"fuse": "private_mean"}, "may look at what a single client sends, which does not hold with private_mean"),
    ({"name": "deepall"}, "all data pooled on one client"),
    ({"fuse": "coordinate_median"}, "says of every weight how far it moved, which does not hold with top_k"),
    ({"fuse": "trimmed_mean"}, "says of every weight how far it moved, which does not hold with top_k"),
    ({"fuse": "bulyan"}, "says of every weight how far it moved, which does not hold with top_k"),
    ({"fuse": "gradient_mask"}, "says of every weight how far it moved, which does not hold with top_k"),
    ({"name": "fedheal", "compress": "quantized"}, "has a move of exactly 0, which does not hold with quantized"),
    ({"top_k": {"fraction": 0.6}}, "fraction: Input should be less than or equal to 0.5"),
    ({"compress": "quantized", "quantized": {"bits": 3}}, "bits: Input should be 2, 4 or 8"),
])  # fmt: skip
def test_what_they_break_is_refused_in_one_line(method, said, tmp_path):
    settings = {"name": "fedavg", "compress": "top_k", **method}
    with pytest.raises(UserError, match=said) as error:
        build_recipe(tiny_experiment(tmp_path, settings))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_perturbed_model_is_not_compressed(name, tmp_path):
    experiment = tiny_experiment(tmp_path, {"name": "fedavg", "compress": name}, train={"dp_clip": 1.0})
    with pytest.raises(UserError, match=f"which {name} would compress before the noise; use one of the two"):
        build_net(experiment, build_recipe(experiment))


@pytest.mark.parametrize("fuse", ["krum", "geometric_median", "centered_clipping"])
def test_rules_that_compare_whole_updates_stay(fuse, tmp_path):
    run_small(tiny_experiment(tmp_path, {"name": "fedavg", "compress": "top_k", "fuse": fuse}, rounds=1))


def test_a_client_of_somebody_else_sends_whole_tensors():
    assert of_our_client(assemble({"name": "fedavg", "compress": "top_k"}, {})) == "top_k acts on the client"
