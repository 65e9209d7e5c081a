"""Secure aggregation on tensors: the sum is the weighted mean's, also when clients are lost."""

import dataclasses
import os

import numpy as np
import pytest
from secure_federation import PREVIOUS, Federation, models, plain

from fedsim.tensors.kinds import Kind
from strategies.banks.secure_exchange import KEYS, OPENED, SHARES
from strategies.fuse.secure_mean import SecureMean
from strategies.parts import LostRoundError, Update
from strategies.tools import masking
from strategies.weights.by_examples import ByExamples
from strategies.weights.uniform import Uniform

# --- numbers ----------------------------------------------------------------------------------------------------------


def test_quantisation_by_hand():
    """With 32 bits and limit 16, S = (2^31 - 2^16) / 16 = 134213632; 0.5 becomes S/2, and -0.5 becomes 2^32 - S/2."""
    assert masking.scale_of(32, 16.0) == 134213632
    found = masking.quantised(np.array([0.5, -0.5, 0.0]), 1.0, 32, 16.0)
    assert found.dtype == np.uint32
    assert found.tolist() == [67106816, 2**32 - 67106816, 0]
    assert masking.decoded(found, 32, 16.0).tolist() == [0.5, -0.5, 0.0]
    assert masking.quantised(np.array([16.0]), 0.25, 32, 16.0)[0] == 4 * 134213632  # weighted before rounding


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_sum_fits(bits, sign):
    """The sum of a thousand clients at the limit has no overflow in either direction."""
    one = masking.quantised(np.array([sign * 16.0]), 1e-3, bits, 16.0)
    total = np.sum([one] * 1000, axis=0, dtype=one.dtype)
    assert masking.decoded(total, bits, 16.0)[0] == pytest.approx(sign * 16.0, abs=1e-4)


def whole_round(federation):
    """(updates, trained models) of a round in which nobody is lost."""
    federation.begin()
    trained = models(federation.names)
    return [federation.reply(name, trained[name]) for name in federation.names], trained


def near(found, wanted):
    np.testing.assert_allclose(found["w"], wanted["w"], atol=2e-7)


@pytest.mark.parametrize("weights", [ByExamples(), Uniform()], ids=["by_examples", "uniform"])
@pytest.mark.parametrize("bits", [32, 64])
def test_the_fused_model_is_fedavgs(weights, bits):
    """They agree up to n limit / (2^bits - 2^17) / W and rounding of float32; counters are exactly FedAvg's."""
    federation = Federation([30, 50, 20], weights, bits=bits)
    updates, trained = whole_round(federation)
    result, wanted = federation.end(updates), plain(updates, trained, weights)
    bound = 3 * 16.0 / (2.0**bits - 2**17)
    for name in ("w", "b"):
        assert (result[name].dtype, np.shape(result[name])) == (np.float32, np.shape(PREVIOUS[name]))
        ulp = np.spacing(np.abs(wanted[name]))
        assert (np.abs(result[name].astype(np.float64) - wanted[name]) <= bound + ulp).all()
    assert (result["n"], result["n"].dtype) == (9, np.int64)


def test_a_tensor_that_only_goes_up():
    """For a tensor that no client received (FedBN's batch norm) it is the mean of the values themselves."""
    federation = Federation([30, 50, 20]).begin()
    trained, received = models(federation.names), {"w": PREVIOUS["w"]}
    updates = [
        Update(name, federation.examples[name], federation.part.leave(federation.local(name), trained[name], received))
        for name in federation.names
    ]
    federation.ask(OPENED, federation.names, federation.names)
    server = dataclasses.replace(federation.server(), places={"w": "shared", "b": "upload", "n": "shared"})
    result, wanted = federation.fuse.fuse(updates, {}, server), plain(updates, trained, ByExamples())
    np.testing.assert_allclose(result["b"], wanted["b"], atol=2e-7)
    near(result, wanted)


def test_a_variance_does_not_fall_below_zero():
    """For a channel that is always zero, rounding could give a negative sum."""
    names = ["a.running_var", "w"]
    zeros, kinds = dict.fromkeys(names, np.zeros(2, np.float32)), dict.fromkeys(names, Kind.BN_STATISTICS)
    server = dataclasses.replace(Federation([1]).server(), previous=zeros, kinds=kinds)
    total = np.array([2**32 - 3, 3], np.uint32)
    assert SecureMean()._moved("w", total, 1.0, server)[0] < 0
    assert SecureMean()._moved("a.running_var", total, 1.0, server)[0] == 0


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_a_mask_is_never_added_to_a_copy():
    update = {"w": np.arange(12, dtype=np.uint32).reshape(3, 4).T}
    with pytest.raises(ValueError, match="'w' is not in C order"):
        masking.add_mask(update, bytes(32), 1)


@pytest.mark.parametrize("lost", ["b", "ae"])
def test_clients_that_fail_after_the_shares(lost):
    """Of five clients, with t = 3, the result is the mean of the others, weighted by examples."""
    federation = Federation([30, 50, 20, 10, 90])
    updates, trained = whole_round(federation)
    updates = [update for update in updates if update.client not in lost]
    near(federation.end(updates), plain(updates, trained, federation.weights))


def test_clients_that_fail_between_keys_and_shares_are_in_no_mask():
    federation, trained = Federation([30, 50, 20]), models("ac")
    federation.ask(KEYS, "abc")
    federation.ask(SHARES, "ac")
    updates = [federation.reply(name, trained[name]) for name in "ac"]
    near(federation.end(updates), plain(updates, trained, ByExamples()))


def test_a_client_that_fails_after_its_update():
    """Its update is used; t answers are enough to unmask the sum."""
    federation = Federation([30, 50, 20])
    updates, trained = whole_round(federation)
    federation.ask(OPENED, ["a", "c"], federation.names)
    near(federation.fused(updates), plain(updates, trained, federation.weights))
    federation.ask(OPENED, ["c"], federation.names)
    with pytest.raises(LostRoundError, match="only 1 clients helped to unmask the sum, 2 are needed"):
        federation.fused(updates)


def test_false_shares_are_left_out():
    """One of four clients (t = 3) sends shares that fit no commitment. With two such clients there is no model."""
    federation = Federation([1, 1, 1, 1])
    updates, trained = whole_round(federation)
    federation.ask(OPENED, federation.names, federation.names)
    said = federation.entries[OPENED]
    said["a"] = {name: np.frombuffer(os.urandom(32), np.uint8) for name in said["a"]}
    near(federation.fused(updates), plain(updates, trained, ByExamples()))
    said["b"] = said["a"]
    with pytest.raises(LostRoundError, match="do not give its secret"):
        federation.fused(updates)
