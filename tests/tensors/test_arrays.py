"""The wire format of tensors, and their kinds, by the type of the module that owns them."""

import io
import warnings
from typing import ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedsim.tensors.arrays import all_finite, load_arrays, nbytes, record_to_arrays, state_to_record, to_arrays
from fedsim.tensors.kinds import Kind, bn_scope, tensor_kinds
from fedsim.tensors.records import metric_record
from fedsim.testing.other_device import OTHER, other_device

DTYPES = st.sampled_from([np.float16, np.float32, np.float64, np.int64, np.int32, np.uint8, np.bool_])
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))


@settings(max_examples=60)
@given(ARRAYS)
def test_round_trip_equals_flower(array):
    record = state_to_record({"w": array})
    assert record["w"] == Array(array)  # byte for byte, with dtype and shape
    for source in (record, ArrayRecord({"w": Array(array)})):
        found = record_to_arrays(source)["w"]
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found, array)


def test_tensors_keep_dtype_and_shape():
    """Channels last is written in C order; only the payload is counted."""
    state = {"a": torch.ones(2, 3, dtype=torch.float16), "n": torch.tensor(7), "t": torch.arange(6).view(2, 3).T}
    record = state_to_record(state)
    arrays = record_to_arrays(record)
    assert [value.dtype for value in arrays.values()] == [np.float16, np.int64, np.int64]
    assert arrays["n"].shape == ()
    assert (arrays["a"].flags.writeable, arrays["a"].flags.owndata) == (False, False)  # a view of the record
    np.testing.assert_array_equal(arrays["t"], state["t"].numpy())
    view = np.arange(24.0).reshape(2, 3, 4)[::-1, :, ::2]
    np.testing.assert_array_equal(state_to_record({"w": view})["w"].numpy(), view)
    np.testing.assert_array_equal(record_to_arrays(ArrayRecord({"w": Array(view.T)}))["w"], view.T)
    assert list(record_to_arrays(state_to_record(state, ["t", "n"]))) == ["t", "n"]
    assert nbytes(record) == nbytes(state) == nbytes(arrays) == 6 * 2 + 8 + 6 * 8
    value = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5).float()
    other = state_to_record({"w": value.contiguous(memory_format=torch.channels_last)})["w"].data
    assert other == state_to_record({"w": value})["w"].data
    assert type(other) is bytes  # as Flower's messages need it


def test_encoding_refuses_what_cannot_travel():
    with pytest.raises(ValueError, match="'missing'"):
        state_to_record({"w": torch.ones(1)}, ["missing"])
    for value in (torch.ones(1, dtype=torch.bfloat16), np.array([object()])):
        with pytest.raises(ValueError, match="w"):
            state_to_record({"w": value})


GOOD = Array(np.arange(6, dtype=np.float32).reshape(2, 3))


@pytest.mark.parametrize("data", [
    b"", b"\x93NUMPY", b"PK\x03\x04" + bytes(100), GOOD.data[:40], GOOD.data[:-1], GOOD.data + b"x",
    GOOD.data.replace(b"'shape': (2, 3)", b"'shape': (2, 4)"), GOOD.data.replace(b"(2, 3)", b"(-2,3)"),
    GOOD.data.replace(b"<f4", b"<f8"), GOOD.data.replace(b"'descr'", b"'dexxr'"), GOOD.data.replace(b"{", b"("),
    b"\x93NUMPY\x09\x00" + GOOD.data[8:], b"pickled",
])  # fmt: skip
def test_malformed_bytes_name_the_array(data):
    if data == b"pickled":
        np.save(buffer := io.BytesIO(), np.array([{"a": 1}], dtype=object), allow_pickle=True)
        data = buffer.getvalue()
    bad = Array(dtype="float32", shape=(2, 3), stype="numpy.ndarray", data=data)
    with pytest.raises(ValueError, match=r"layer\.weight"):
        record_to_arrays(ArrayRecord({"layer.weight": bad}))


def test_load_copies_in_place_without_warning():
    source, model = (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)) for _ in range(2))
    model.to(memory_format=torch.channels_last)
    source[1].num_batches_tracked += 3
    pointers = {name: value.data_ptr() for name, value in model.state_dict().items()}
    bias = model[0].bias.clone()
    load_arrays(model, {"0.weight": np.zeros((4, 3, 3, 3), np.float32)}, ["0.weight"])  # a part
    assert not model[0].weight.any()
    assert torch.equal(model[0].bias, bias)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_arrays(model, record_to_arrays(state_to_record(source.state_dict())))
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
        assert model.state_dict()[name].data_ptr() == pointers[name]
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


class Crossings(TorchDispatchMode):
    """Counts the copies from one device to another, for each of which a host waits on a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.count += func._schema.name == "aten::_to_copy" and found.device != args[0].device
        return found


def test_a_state_crosses_to_another_device_once_for_each_type():
    source, model = (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)) for _ in range(2))
    source[1].num_batches_tracked += 3
    arrays = to_arrays(source.state_dict())
    with other_device(), Crossings() as crossings:
        there = model.to(memory_format=torch.channels_last).to(OTHER)
        crossings.count = 0
        load_arrays(there, arrays)
        back = to_arrays(there.state_dict())
        assert crossings.count == 4  # float32 and int64, there and back
    assert list(back) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array, strict=True)


@pytest.mark.parametrize(("arrays", "names", "message"), [
    ({"weight": np.zeros((2, 2), np.float32)}, None, "missing tensor 'bias'"),
    ({"weight": np.zeros((2, 2), np.float32), "x": np.zeros(2)}, ["weight"], "unexpected tensor 'x'"),
    ({"weight": np.zeros((2, 3), np.float32)}, ["weight"], "'weight': shape"),
    ({"weight": np.zeros((2, 2), np.float64)}, ["weight"], "'weight': dtype"),
    ({"x": np.zeros(2)}, ["x"], "no tensor 'x'"),
])  # fmt: skip
def test_load_checks_before_it_writes(arrays, names, message):
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(ValueError, match=message):
        load_arrays(model, arrays, names)
    assert torch.equal(model.weight, before)


@settings(max_examples=40)
@given(hnp.arrays(st.sampled_from([np.float16, np.float32, np.float64, np.int64]), hnp.array_shapes(min_dims=0)))
@example(np.full(10, 3e38, np.float32))  # whose square overflows
@example(np.empty(0, np.float32))
@example(np.array([1.0, np.nan]))
@example(np.array([1.0, -np.inf], np.float32))
def test_all_finite_agrees_with_numpy(array):
    assert all_finite(array) == bool(np.isfinite(array).all())


class Declares(nn.Module):
    tensor_kinds: ClassVar[dict[str, Kind]] = {"score": Kind.BN_AFFINE, "memory": Kind.BN_STATISTICS}
    bn_group: ClassVar[str] = "xan"

    def __init__(self):
        super().__init__()
        self.score = nn.Parameter(torch.ones(()))
        self.register_buffer("memory", torch.zeros(2))
        self.bn = nn.BatchNorm1d(2)


def test_kinds_and_scopes_come_from_module_types():
    model = nn.ModuleDict({
        "conv": nn.Conv2d(3, 4, 3), "downsample_1": nn.BatchNorm2d(4), "bn_named": nn.Linear(2, 2),
        "inorm": nn.InstanceNorm2d(4, affine=True), "own": Declares(),
    })  # fmt: skip
    kinds = tensor_kinds(model)
    assert list(kinds) == list(model.state_dict())
    expected = {
        "downsample_1.weight": Kind.BN_AFFINE, "downsample_1.running_var": Kind.BN_STATISTICS,
        "downsample_1.num_batches_tracked": Kind.COUNTER, "bn_named.weight": Kind.WEIGHT,
        "inorm.weight": Kind.WEIGHT, "conv.bias": Kind.WEIGHT, "own.score": Kind.BN_AFFINE,
        "own.memory": Kind.BN_STATISTICS,
    }  # fmt: skip
    assert {name: kinds[name] for name in expected} == expected
    own = ["own.score", "own.memory", *(f"own.bn.{name}" for name in nn.BatchNorm1d(2).state_dict())]
    assert bn_scope(model, "xan") == own
    assert bn_scope(model, "all") == [f"downsample_1.{name}" for name in nn.BatchNorm2d(4).state_dict()] + own
    assert bn_scope(nn.Linear(2, 2), "all") == bn_scope(nn.Linear(2, 2), "xan") == []
    with pytest.raises(ValueError, match="scope"):
        bn_scope(model, "some")


def test_metric_record():
    """Ints and floats travel as they are; of other values Flower accepts its own types alone."""
    assert dict(metric_record({"steps": 3, "loss": 0.5})) == {"steps": 3, "loss": 0.5}
    assert dict(metric_record({"sizes": [1, 2]})) == {"sizes": [1, 2]}
    for value in (True, "much", np.float32(0.5)):
        with pytest.raises(TypeError):
            metric_record({"loss": 0.5, "wrong": value})
