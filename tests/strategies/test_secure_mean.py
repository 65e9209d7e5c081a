"""Secure aggregation on tensors: the sum is the weighted mean's, also when clients are lost; a reply is noise."""

import dataclasses
import os

import numpy as np
import pytest
from scipy.stats import chisquare
from secure_federation import PREVIOUS, Federation, models, plain

from fedsim.common.errors import UserError
from fedsim.deploy.certificates import write_site_key
from fedsim.settings import TrainSettings
from fedsim.tensors.kinds import Kind
from strategies.banks.secure_exchange import KEY, KEYS, OPENED, SELF, SHARES
from strategies.fuse.secure_mean import SecureMean, threshold_of
from strategies.parts import LostRoundError, Update
from strategies.tools import masking
from strategies.weights.by_examples import ByExamples
from strategies.weights.uniform import Uniform


def test_quantisation_and_thresholds_by_hand():
    """With 32 bits and limit 16, S = (2^31 - 2^16) / 16 = 134213632; 0.5 becomes S/2, and -0.5 becomes 2^32 - S/2."""
    assert masking.scale_of(32, 16.0) == 134213632
    found = masking.quantised(np.array([0.5, -0.5, 0.0]), 1.0, 32, 16.0)
    assert (found.dtype, found.tolist()) == (np.uint32, [67106816, 2**32 - 67106816, 0])
    assert masking.decoded(found, 32, 16.0).tolist() == [0.5, -0.5, 0.0]
    assert masking.quantised(np.array([16.0]), 0.25, 32, 16.0)[0] == 4 * 134213632  # weighted before rounding
    for bits, value in ((32, 16.0), (32, -16.0), (64, 16.0), (64, -16.0)):  # a thousand clients at the limit
        one = masking.quantised(np.array([value]), 1e-3, bits, 16.0)
        total = np.sum([one] * 1000, axis=0, dtype=one.dtype)
        assert masking.decoded(total, bits, 16.0)[0] == pytest.approx(value, abs=1e-4)
    asked = [(0, 2), (0, 3), (0, 4), (0, 5), (0, 10), (0, 100, 4), (9, 10), (0, 4, 2, 4), (2, 4, 2, 4), (0, 4, 2, 2)]
    assert [threshold_of(*each) for each in asked] == [2, 2, 3, 3, 6, 3, 9, 3, 3, 2]


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
    for name in ("w", "b"):
        assert (result[name].dtype, np.shape(result[name])) == (np.float32, np.shape(PREVIOUS[name]))
        bound = 3 * 16.0 / (2.0**bits - 2**17) + np.spacing(np.abs(wanted[name]))
        assert (np.abs(result[name].astype(np.float64) - wanted[name]) <= bound).all()
    assert (result["n"], result["n"].dtype) == (9, np.int64)


def test_a_tensor_that_only_goes_up_and_a_variance():
    """For a tensor that no client received (FedBN's batch norm) it is the mean of the values themselves. For a
    channel that is always zero, rounding could give a negative sum."""
    federation = Federation([30, 50, 20]).begin()
    trained, received = models(federation.names), {"w": PREVIOUS["w"]}
    updates = [Update(name, count, federation.part.leave(federation.local(name), trained[name], received))
               for name, count in federation.examples.items()]  # fmt: skip
    federation.ask(OPENED, federation.names, federation.names)
    server = dataclasses.replace(federation.server(), places={"w": "shared", "b": "upload", "n": "shared"})
    result, wanted = federation.fuse.fuse(updates, {}, server), plain(updates, trained, ByExamples())
    np.testing.assert_allclose(result["b"], wanted["b"], atol=2e-7)
    near(result, wanted)
    names = ["a.running_var", "w"]
    zeros, kinds = dict.fromkeys(names, np.zeros(2, np.float32)), dict.fromkeys(names, Kind.BN_STATISTICS)
    server = dataclasses.replace(Federation([1]).server(), previous=zeros, kinds=kinds)
    total = np.array([2**32 - 3, 3], np.uint32)
    assert SecureMean()._moved("w", total, 1.0, server)[0] < 0
    assert SecureMean()._moved("a.running_var", total, 1.0, server)[0] == 0


# --- clients that are lost --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["b", "ae"])
def test_clients_that_fail_after_the_shares(lost):
    """Of five clients, with t = 3, the result is the mean of the others, weighted by examples."""
    federation = Federation([30, 50, 20, 10, 90])
    updates, trained = whole_round(federation)
    updates = [update for update in updates if update.client not in lost]
    near(federation.end(updates), plain(updates, trained, federation.weights))


def test_lost_answers_and_false_shares():
    """Its update is used; t answers are enough to unmask the sum. One of four clients (t = 3) sends shares that
    fit no commitment. With two such clients there is no model."""
    federation = Federation([30, 50, 20])
    updates, trained = whole_round(federation)
    federation.ask(OPENED, ["a", "c"], federation.names)
    near(federation.fused(updates), plain(updates, trained, federation.weights))
    federation.ask(OPENED, ["c"], federation.names)
    with pytest.raises(LostRoundError, match="only 1 clients helped to unmask the sum, 2 are needed"):
        federation.fused(updates)
    federation = Federation([1, 1, 1, 1])
    updates, trained = whole_round(federation)
    federation.ask(OPENED, federation.names, federation.names)
    said = federation.entries[OPENED]
    said["a"] = {name: np.frombuffer(os.urandom(32), np.uint8) for name in said["a"]}
    near(federation.fused(updates), plain(updates, trained, ByExamples()))
    said["b"] = said["a"]
    with pytest.raises(LostRoundError, match="do not give its secret"):
        federation.fused(updates)


# --- what the server sees, and what clients and banks refuse ----------------------------------------------------------


def masked_once(value: float, count: int = 60_000) -> np.ndarray:
    federation = Federation([10, 10, 10]).begin()
    zeros, trained = ({"w": np.full(count, each, np.float32)} for each in (0, value))
    return federation.part.leave(federation.local("b"), trained, zeros)["w"]


def test_replies_are_noise():
    """In a masked constant update all 256 values of each byte are equally frequent, and neighbours are independent; so
    is the difference of two such replies. Without masks the reply would have one value everywhere."""
    reply, same, other = masked_once(0.25), masked_once(0.25), masked_once(-3.0)
    for numbers in (*((reply >> np.uint32(8 * place)) & np.uint32(255) for place in range(4)),
                    (reply - same) >> np.uint32(24), (reply - other) >> np.uint32(24)):  # fmt: skip
        assert chisquare(np.bincount(numbers, minlength=256)).pvalue > 1e-8
    assert abs(np.corrcoef(reply[:-1], reply[1:])[0, 1]) < 0.02
    assert len(np.unique(masking.quantised(np.full(1000, 0.25), 1 / 3, 32, 16.0))) == 1


def test_a_second_list_or_update_and_a_long_list_are_refused():
    """Another list would give the server both secrets of a client; the same list gets the same answer again.
    With two of four drawn t would be 2, and each half of a list of four could tell one of a client's secrets."""
    federation = Federation([1] * 5)
    whole_round(federation)
    first, again = (federation.part.collect(federation.local("a", OPENED, "abc")) for _ in range(2))
    assert set(first) == {SELF + "a", SELF + "b", SELF + "c", KEY + "d", KEY + "e"}  # one secret of each client
    np.testing.assert_equal(first, again)
    for name, delivered, said in (
        ("a", "abcd", "second list of clients that delivered"),
        ("b", "ab", "the sum of 2 updates stays masked; 3 are needed"),
        ("b", "acd", "not one of this round"),
    ):
        with pytest.raises(UserError, match=said):
            federation.part.collect(federation.local(name, OPENED, delivered))
    federation = Federation([1] * 4)
    federation.train = TrainSettings(clients_per_round=2)
    updates, trained = whole_round(federation)
    for name, half in (("a", "ab"), ("c", "cd")):
        with pytest.raises(UserError, match="the sum of 2 updates stays masked; 3 are needed"):
            federation.part.collect(federation.local(name, OPENED, half))
    near(federation.end(updates[:3]), plain(updates[:3], trained, ByExamples()))
    federation = Federation([1, 1]).begin()
    trained = models("ab")
    first, again = (federation.reply("a", trained["a"]) for _ in range(2))
    assert np.array_equal(first.arrays["w"], again.arrays["w"])
    with pytest.raises(UserError, match="second update under the same masks"):
        federation.reply("a", trained["b"])
    federation = Federation([1, 1, 1])
    federation.ask(KEYS, federation.names)
    lines = federation.banks[KEYS].hand_out(federation.entries[KEYS], "a", federation.server())
    for wrong, said in (
        ({**lines, "a": lines["b"]}, "others for this client"),
        ({**lines, "b": lines["c"]}, "one key twice"),
        ({"a": lines["a"]}, "has 1 clients of this run, 2 are needed"),
        ({**lines, "x": np.frombuffer(os.urandom(72), np.uint8)}, "clients of this run"),
    ):
        with pytest.raises(UserError, match=said):
            federation.part.collect(federation.local("a", SHARES, records={KEYS: wrong}))
    federation.part.collect(federation.local("a", SHARES, records={KEYS: lines}))
    with pytest.raises(UserError, match="changed the list of public keys"):
        federation.part.collect(federation.local("a", SHARES, records={KEYS: {name: lines[name] for name in "ab"}}))


def test_other_lists_and_changed_shares_do_not_fit():
    federation = Federation([10, 10, 10])
    federation.ask(KEYS, "abc")
    for name in "abc":
        lines = {client: own["line"] for client, own in federation.entries[KEYS].items()}
        if name == "b":
            lines["c"] = np.concatenate([lines["c"][:64], np.frombuffer((10**9).to_bytes(8, "little"), np.uint8)])
        local = federation.local(name, SHARES, records={KEYS: lines})
        federation.entries.setdefault(SHARES, {})[name] = federation.part.collect(local)
    with pytest.raises(UserError, match="not those that 'b' sealed"):
        federation.reply("a", models("a")["a"])
    federation = Federation([1, 1, 1]).begin()
    sealed = federation.entries[SHARES]["b"]
    flipped = sealed["to:a"].copy()
    flipped[20] ^= 1
    for wrong in (flipped, sealed["to:c"]):
        federation.entries[SHARES]["b"] = {**sealed, "to:a": wrong}
        with pytest.raises(UserError, match="not those that 'b' sealed"):
            federation.reply("a", models("a")["a"])


@pytest.mark.parametrize(("factor", "said"), [
    (5, r"'w' changed by 2, more than method.secure_mean.limit = 0.5"), (np.nan, "changed by nan"),
])  # fmt: skip
def test_a_change_above_the_limit_fails_by_name(factor, said):
    with pytest.raises(UserError, match=said):
        Federation([1, 1], limit=0.5).begin().reply("a", {**PREVIOUS, "w": PREVIOUS["w"] * np.float32(factor)})


def test_the_secrets_of_a_round_survive_a_new_process_and_then_go(tmp_path):
    federation = Federation([1, 2], folder=tmp_path)
    updates, trained = whole_round(federation)
    file = tmp_path / "a" / "secure-mean.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert '\\"mask\\"' in file.read_text()
    near(federation.end(updates), plain(updates, trained, ByExamples()))
    assert not any(word in file.read_text() for word in ("cipher", "mask", "self\\", "shares"))
    with pytest.raises(UserError, match="no keys of round 2"):
        federation.part.leave(dataclasses.replace(federation.local("a"), round=2), trained["a"], PREVIOUS)


def test_the_bank_refuses_what_is_not_of_its_form():
    federation = Federation([10, 10])
    federation.ask(KEYS, "ab")
    server, line = federation.server(), federation.entries[KEYS]["a"]["line"]
    keys, shares = federation.banks[KEYS], federation.banks[SHARES]
    for said in (5, 15):
        other = dataclasses.replace(server, class_counts={"a": (2, said - 2)})
        found = keys.accept("a", {"line": line}, other)
        assert f"weighs its update by 10 examples, the handshake said {said}" in found
    assert keys.accept("a", {"line": line[:-1]}, server)
    assert shares.accept("a", {"commitment": line[:32]}, server)
    assert shares.accept("a", {"commitment": line[:32], "to:b": line}, server)
    assert federation.banks[OPENED].accept("a", {}, dataclasses.replace(server, banks={SHARES: {"a": {}}}))


# --- sites that have each other's public keys sign the keys of secure aggregation ----------------------------------


@pytest.fixture
def signing(tmp_path):
    """Three clients whose kits have the public keys of all, with their keys exchanged."""
    federation = Federation([1, 1, 1])
    for name in federation.names:
        (tmp_path / name).mkdir()
        write_site_key(name, tmp_path / name / "key", tmp_path / f"{name}.pub")
        federation.stores[name].peers = tmp_path / name / "peers"
    for name in federation.names:  # the key's comment stands where the domain does
        (tmp_path / name / "peers").write_text("".join((tmp_path / f"{each}.pub").read_text() for each in "abc"))
    federation.ask(KEYS, federation.names)
    return federation


def test_signed_keys_give_fedavgs_model(signing):
    signing.ask(SHARES, signing.names)
    trained = models(signing.names)
    updates = [signing.reply(name, trained[name]) for name in signing.names]
    near(signing.end(updates), plain(updates, trained, ByExamples()))


def test_a_server_that_replaces_a_sites_keys_is_noticed(signing):
    """Keys of its own with the site's, another site's or no signature, keys of another round, and a site of its own."""
    lines = signing.banks[KEYS].hand_out(signing.entries[KEYS], "a", signing.server())
    own = np.frombuffer(masking.entry(masking.new_key(), masking.new_key(), 1), np.uint8)
    late = signing.part.collect(dataclasses.replace(signing.local("b", KEYS), round=2))["line"]
    cases = [own, late, *(np.concatenate([own, lines[name][masking.ENTRY :]]) for name in "bc")]
    (signing.stores["c"].peers).write_text("".join(signing.stores["c"].peers.read_text().splitlines(True)[1:]))
    for asked, wrong, named in (*(("a", {**lines, "b": line}, "b") for line in cases), ("c", lines, "a")):
        with pytest.raises(UserError, match=f"client '{named}' are not signed by its site"):
            signing.part.collect(signing.local(asked, SHARES, records={KEYS: wrong}))
    signing.part.collect(signing.local("a", SHARES, records={KEYS: lines}))
    signing.stores["a"].peers.with_name("key").unlink()
    with pytest.raises(UserError, match="so that secure_mean signs its keys, and cannot read"):
        signing.part.collect(signing.local("a", KEYS))
