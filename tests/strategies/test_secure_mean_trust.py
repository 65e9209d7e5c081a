"""Secure aggregation on tensors: single replies are noise, and what clients and banks refuse."""

import dataclasses
import os

import numpy as np
import pytest
from scipy.stats import chisquare
from secure_federation import PREVIOUS, Federation, models, plain

from fedsim.common.errors import UserError
from fedsim.settings import TrainSettings
from strategies.banks.secure_exchange import KEY, KEYS, OPENED, SELF, SHARES
from strategies.fuse.secure_mean import threshold_of
from strategies.tools import masking
from strategies.weights.by_examples import ByExamples

# --- what the server sees ---------------------------------------------------------------------------------------------


def masked_once(value: float, count: int = 60_000) -> np.ndarray:
    federation = Federation([10, 10, 10]).begin()
    previous = {"w": np.zeros(count, np.float32)}
    trained = {"w": np.full(count, value, np.float32)}
    return federation.part.leave(federation.local("b"), trained, previous)["w"]


def uniform(numbers):
    """Whether all 256 values of a byte are equally frequent."""
    return chisquare(np.bincount(numbers, minlength=256)).pvalue > 1e-8


def test_replies_are_noise():
    """In a masked constant update all 256 values of each byte are equally frequent, and neighbours are independent; so
    is the difference of two such replies. Without masks the reply would have one value everywhere."""
    reply, same, other = masked_once(0.25), masked_once(0.25), masked_once(-3.0)
    assert all(uniform((reply >> np.uint32(8 * place)) & np.uint32(255)) for place in range(4))
    assert abs(np.corrcoef(reply[:-1], reply[1:])[0, 1]) < 0.02
    assert uniform((reply - same) >> np.uint32(24))
    assert uniform((reply - other) >> np.uint32(24))
    assert len(np.unique(masking.quantised(np.full(1000, 0.25), 1 / 3, 32, 16.0))) == 1


# --- what a client refuses --------------------------------------------------------------------------------------------


def test_a_second_list_of_those_that_delivered_is_refused():
    """Another list would give the server both secrets of a client; the same list gets the same answer again."""
    federation = Federation([1] * 5).begin()
    trained = models(federation.names)
    for name in federation.names:
        federation.reply(name, trained[name])
    first, again = (federation.part.collect(federation.local("a", OPENED, "abc")) for _ in range(2))
    assert set(first) == {SELF + "a", SELF + "b", SELF + "c", KEY + "d", KEY + "e"}  # one secret of each client
    assert all(np.array_equal(first[name], again[name]) for name in first)
    for name, delivered, said in (
        ("a", "abcd", "second list of clients that delivered"),
        ("b", "ab", "the sum of 2 updates stays masked; 3 are needed"),
        ("b", "acd", "not one of this round"),
    ):
        with pytest.raises(UserError, match=said):
            federation.part.collect(federation.local(name, OPENED, delivered))


def test_a_list_of_keys_longer_than_a_round_raises_the_threshold():
    """With two of four drawn t would be 2, and each half of a list of four could tell one of a client's secrets."""
    federation = Federation([1] * 4)
    federation.train = TrainSettings(clients_per_round=2)
    federation.begin()
    trained = models(federation.names)
    updates = [federation.reply(name, trained[name]) for name in federation.names]
    for name, half in (("a", "ab"), ("c", "cd")):
        with pytest.raises(UserError, match="the sum of 2 updates stays masked; 3 are needed"):
            federation.part.collect(federation.local(name, OPENED, half))
    assert np.allclose(federation.end(updates[:3])["w"], plain(updates[:3], trained, ByExamples())["w"], atol=1e-5)


def test_a_second_update_under_the_same_masks_is_refused():
    federation = Federation([1, 1]).begin()
    trained = models("ab")
    first, again = (federation.reply("a", trained["a"]) for _ in range(2))
    assert np.array_equal(first.arrays["w"], again.arrays["w"])
    with pytest.raises(UserError, match="second update under the same masks"):
        federation.reply("a", trained["b"])


def test_a_list_of_keys_that_is_not_honest_is_refused():
    federation = Federation([1, 1, 1])
    federation.ask(KEYS, federation.names)
    lines = federation.banks[KEYS].hand_out(federation.entries[KEYS], "a", federation.server())
    for wrong, said in (
        ({**lines, "a": lines["b"]}, "others for this client"),
        ({**lines, "b": lines["c"]}, "one key twice"),
        ({"a": lines["a"]}, "has 1 clients of this run, 2 are needed"),
        ({**lines, "x": masking.np.frombuffer(os.urandom(72), np.uint8)}, "clients of this run"),
    ):
        with pytest.raises(UserError, match=said):
            federation.part.collect(federation.local("a", SHARES, records={KEYS: wrong}))
    federation.part.collect(federation.local("a", SHARES, records={KEYS: lines}))
    with pytest.raises(UserError, match="changed the list of public keys"):
        federation.part.collect(federation.local("a", SHARES, records={KEYS: {name: lines[name] for name in "ab"}}))


def test_clients_that_were_told_different_lists_do_not_fit_together():
    federation = Federation([10, 10, 10])
    federation.ask(KEYS, "abc")
    honest = federation.entries[KEYS]
    for name in "abc":
        lines = {client: own["line"] for client, own in honest.items()}
        if name == "b":
            lines["c"] = np.concatenate([lines["c"][:64], np.frombuffer((10**9).to_bytes(8, "little"), np.uint8)])
        federation.entries.setdefault(SHARES, {})[name] = federation.part.collect(
            federation.local(name, SHARES, records={KEYS: lines})
        )
    with pytest.raises(UserError, match="not those that 'b' sealed"):
        federation.reply("a", models("a")["a"])


def test_shares_that_the_server_changed_are_refused():
    federation = Federation([1, 1, 1]).begin()
    good = federation.entries[SHARES]["b"]["to:a"]
    flipped = good.copy()
    flipped[20] ^= 1
    for wrong in (flipped, federation.entries[SHARES]["b"]["to:c"]):
        federation.entries[SHARES]["b"] = {**federation.entries[SHARES]["b"], "to:a": wrong}
        with pytest.raises(UserError, match="not those that 'b' sealed"):
            federation.reply("a", models("a")["a"])


def test_a_change_above_the_limit_fails_by_name():
    federation = Federation([1, 1], limit=0.5).begin()
    trained = {**PREVIOUS, "w": PREVIOUS["w"] + 2}
    with pytest.raises(UserError, match=r"'w' changed by 2, more than method.secure_mean.limit = 0.5"):
        federation.reply("a", trained)
    with pytest.raises(UserError, match="changed by nan"):
        federation.reply("a", {**PREVIOUS, "w": PREVIOUS["w"] * np.nan})


def test_the_secrets_of_a_round_survive_a_new_process_and_then_go(tmp_path):
    federation = Federation([1, 2], folder=tmp_path).begin()
    file = tmp_path / "a" / "secure-mean.json"
    assert file.stat().st_mode & 0o777 == 0o600
    trained = models("ab")
    updates = [federation.reply(name, trained[name]) for name in "ab"]
    assert '\\"mask\\"' in file.read_text()
    np.testing.assert_allclose(federation.end(updates)["w"], plain(updates, trained, ByExamples())["w"], atol=2e-7)
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


def test_more_than_half():
    assert [threshold_of(0, count) for count in (2, 3, 4, 5, 10)] == [2, 2, 3, 3, 6]
    assert threshold_of(0, 100, 4) == 3
    assert threshold_of(9, 10) == 9
    assert [threshold_of(0, 4, 2, 4), threshold_of(2, 4, 2, 4), threshold_of(0, 4, 2, 2)] == [3, 3, 2]
