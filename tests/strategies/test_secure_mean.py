"""Secure aggregation on tensors: the sum is the weighted mean's, single replies are noise, and what is refused."""

import dataclasses
import os
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import chisquare

from clients.local_round import LocalRound
from clients.reports.masked_update import MaskedUpdate
from clients.store import ClientStore
from fedsim.arrays import Kind
from fedsim.errors import UserError
from fedsim.settings import TrainSettings
from strategies import masking
from strategies.banks.secure_exchange import KEY, KEYS, OPENED, SELF, SHARES, SecureKeys, SecureShares, SecureUnmasking
from strategies.fuse.secure_mean import SecureMean, threshold_of
from strategies.fuse.weighted_mean import WeightedMean
from strategies.parts import LostRoundError, ServerRound, Update
from strategies.weights.by_examples import ByExamples
from strategies.weights.uniform import Uniform

PREVIOUS = {"w": np.full((40, 3), 0.5, np.float32), "b": np.float32(-1.0), "n": np.array(7, np.int64)}


class Images:
    """A client's data, of which only the number of examples matters."""

    def __init__(self, examples: int) -> None:
        self.examples = examples


class Federation:
    """Clients a, b, c, ... with so many examples each, and the server's banks: one round, exchange by exchange."""

    def __init__(self, examples, weights=None, folder=None, **fields) -> None:
        self.names = list("abcdefgh"[: len(examples)])
        self.examples = dict(zip(self.names, examples))
        self.fuse, self.part = SecureMean(**fields), MaskedUpdate(**fields)
        self.weights = weights or ByExamples()
        self.stores = {name: ClientStore(folder and folder / name, name) for name in self.names}
        self.banks = {KEYS: SecureKeys(), SHARES: SecureShares(), OPENED: SecureUnmasking()}
        self.entries = {}

    def server(self) -> ServerRound:
        """The round as a server part sees it."""
        counts = {name: (count,) for name, count in self.examples.items()}
        return ServerRound(1, 3, self.names, PREVIOUS, banks=self.entries, class_counts=counts,
                           known_weights=self.weights.known, places=dict.fromkeys(PREVIOUS, "shared"))  # fmt: skip

    def local(self, name: str, asked: str = "", delivered=(), records=None) -> LocalRound:
        """The round of a client, which may be another process each time."""
        if records is None:
            records = {
                bank: self.banks[bank].hand_out(self.entries[bank], name, self.server()) or {} for bank in self.entries
            }
        if (folder := self.stores[name]._folder) is not None:
            self.stores[name] = ClientStore(folder, name)
        return LocalRound(
            name, None, TrainSettings(), 3, 1, 3, "train", 0, None, self.stores[name], Images(self.examples[name]),
            clients=tuple(self.names), asked=asked, delivered=tuple(delivered), records=records,
            known_weights=self.weights.known,
        )  # fmt: skip

    def ask(self, bank: str, names, delivered=()) -> None:
        """One exchange: what the clients contribute and the bank accepts."""
        found = {name: self.part.collect(self.local(name, bank, delivered)) for name in names}
        for name, arrays in found.items():
            assert self.banks[bank].accept(name, arrays, self.server()) == ""
        self.entries[bank] = self.banks[bank].merge({}, found, self.server())

    def reply(self, name: str, trained) -> Update:
        """A client's masked update."""
        return Update(name, self.examples[name], self.part.leave(self.local(name), trained, PREVIOUS))

    def begin(self) -> "Federation":
        """Keys and shares of all."""
        self.ask(KEYS, self.names)
        self.ask(SHARES, self.names)
        return self

    def end(self, updates) -> dict[str, np.ndarray]:
        """The sum of the updates that came."""
        delivered = [update.client for update in updates]
        self.ask(OPENED, delivered, delivered)
        return self.fused(updates)

    def fused(self, updates) -> dict[str, np.ndarray]:
        """The server's fusion."""
        return self.fuse.fuse(updates, self.weights.weigh(updates, self.server()), self.server())


def models(names, seed=0) -> dict[str, dict[str, np.ndarray]]:
    """A trained model of each client."""
    rng = np.random.default_rng(seed)
    return {
        name: {
            "w": (PREVIOUS["w"] + rng.normal(0, 1.5, (40, 3))).astype(np.float32),
            "b": np.float32(rng.normal()),
            "n": np.array(7 + place, np.int64),
        }
        for place, name in enumerate(names)
    }


def plain(updates, trained, weights) -> dict[str, np.ndarray]:
    """What FedAvg makes of the same clients."""
    open_updates = [Update(update.client, update.examples, trained[update.client]) for update in updates]
    server = ServerRound(1, 3, [], PREVIOUS)
    return WeightedMean().fuse(open_updates, weights.weigh(open_updates, server), server)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_quantisation_by_hand():
    """32 bits, limit 16: S = (2^31 - 2^16) / 16 = 134213632. A half becomes S/2, minus a half 2^32 - S/2."""
    assert masking.scale_of(32, 16.0) == 134213632
    found = masking.quantised(np.array([0.5, -0.5, 0.0]), 1.0, 32, 16.0)
    assert found.dtype == np.uint32
    assert found.tolist() == [67106816, 2**32 - 67106816, 0]
    assert masking.decoded(found, 32, 16.0).tolist() == [0.5, -0.5, 0.0]
    assert masking.quantised(np.array([16.0]), 0.25, 32, 16.0)[0] == 4 * 134213632  # weighted before rounding


@pytest.mark.parametrize("bits", [32, 64])
def test_the_largest_sum_fits(bits):
    """A thousand clients at the limit do not wrap around, in either direction."""
    for sign in (1.0, -1.0):
        one = masking.quantised(np.array([sign * 16.0]), 1e-3, bits, 16.0)
        total = np.array([0], one.dtype)
        for _ in range(1000):
            total += one
        assert masking.decoded(total, bits, 16.0)[0] == pytest.approx(sign * 16.0, abs=1e-4)


@pytest.mark.parametrize("weights", [ByExamples(), Uniform()], ids=["by_examples", "uniform"])
@pytest.mark.parametrize("bits", [32, 64])
def test_the_fused_model_is_fedavgs(weights, bits):
    """Up to n limit / (2^bits - 2^17) / W and a rounding of float32; counters are FedAvg's exactly."""
    federation = Federation([30, 50, 20], weights, bits=bits).begin()
    trained = models(federation.names)
    updates = [federation.reply(name, trained[name]) for name in federation.names]
    result, wanted = federation.end(updates), plain(updates, trained, weights)
    bound = 3 * 16.0 / (2.0**bits - 2**17)
    for name in ("w", "b"):
        assert result[name].dtype == np.float32
        assert np.shape(result[name]) == np.shape(PREVIOUS[name])
        ulp = np.spacing(np.abs(wanted[name]))
        assert (np.abs(result[name].astype(np.float64) - wanted[name]) <= bound + ulp).all()
    assert result["n"] == 9
    assert result["n"].dtype == np.int64


def test_a_tensor_that_only_goes_up():
    """No client got it (FedBN's batch norm): the mean of the values themselves."""
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
    np.testing.assert_allclose(result["w"], wanted["w"], atol=2e-7)


def test_a_variance_does_not_fall_below_zero():
    """A channel that is always off: rounding may leave a negative sum."""
    server = dataclasses.replace(
        Federation([1]).server(), kinds=dict.fromkeys(["a.running_var", "w"], Kind.BN_STATISTICS)
    )
    server = dataclasses.replace(
        server, previous={"a.running_var": np.zeros(2, np.float32), "w": np.zeros(2, np.float32)}
    )
    total = np.array([2**32 - 3, 3], np.uint32)
    assert SecureMean()._moved("w", total, 1.0, server)[0] < 0
    assert SecureMean()._moved("a.running_var", total, 1.0, server)[0] == 0


def test_the_bound_is_not_loose():
    """Two clients that both lie a half step off: the error of the sum is one step, 2 limit / (2^32 - 2^17)."""
    step = 1 / masking.scale_of(32, 16.0)
    total = sum(masking.quantised(np.array([0.4999999 * step]), 1.0, 32, 16.0) for _ in range(2))
    error = abs(masking.decoded(total, 32, 16.0)[0] - 2 * 0.4999999 * step)
    assert 0.99 * step < error <= 2 * 16.0 / (2**32 - 2**17)


# --- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [["b"], ["a", "e"]])
def test_clients_that_fail_after_the_shares(lost):
    """Five clients, t = 3: the sum over the others is their weighted mean, by examples."""
    federation = Federation([30, 50, 20, 10, 90]).begin()
    trained = models(federation.names)
    updates = [federation.reply(name, trained[name]) for name in federation.names if name not in lost]
    result, wanted = federation.end(updates), plain(updates, trained, federation.weights)
    np.testing.assert_allclose(result["w"], wanted["w"], atol=2e-7)


def test_a_client_that_fails_after_its_update():
    """Its update counts; t answers are enough to unmask the sum."""
    federation = Federation([30, 50, 20]).begin()
    trained = models(federation.names)
    updates = [federation.reply(name, trained[name]) for name in federation.names]
    federation.ask(OPENED, ["a", "c"], federation.names)
    np.testing.assert_allclose(
        federation.fused(updates)["w"], plain(updates, trained, federation.weights)["w"], atol=2e-7
    )
    federation.ask(OPENED, ["c"], federation.names)
    with pytest.raises(LostRoundError, match="only 1 clients helped to unmask the sum, 2 are needed"):
        federation.fused(updates)


def test_clients_that_fail_between_keys_and_shares():
    """They have no part in the masks."""
    federation = Federation([30, 50, 20])
    federation.ask(KEYS, "abc")
    federation.ask(SHARES, "ac")
    trained = models("ac")
    updates = [federation.reply(name, trained[name]) for name in "ac"]
    np.testing.assert_allclose(federation.end(updates)["w"], plain(updates, trained, ByExamples())["w"], atol=2e-7)


def test_false_shares_are_left_out():
    """Four clients, t = 3, one of which lies: its shares fit no commitment. With two liars there is no model."""
    federation = Federation([1, 1, 1, 1]).begin()
    trained = models(federation.names)
    updates = [federation.reply(name, trained[name]) for name in federation.names]
    federation.ask(OPENED, federation.names, federation.names)
    said = federation.entries[OPENED]
    said["a"] = {name: np.frombuffer(os.urandom(32), np.uint8) for name in said["a"]}
    np.testing.assert_allclose(federation.fused(updates)["w"], plain(updates, trained, ByExamples())["w"], atol=2e-7)
    said["b"] = said["a"]
    with pytest.raises(LostRoundError, match="do not give its secret"):
        federation.fused(updates)


# --- what the server sees ---------------------------------------------------------------------------------------------


def masked_once(value: float, count: int = 60_000) -> np.ndarray:
    """One client's reply to a whole round, whose update is the same number everywhere."""
    federation = Federation([10, 10, 10]).begin()
    previous = {"w": np.zeros(count, np.float32)}
    trained = {"w": np.full(count, value, np.float32)}
    return federation.part.leave(federation.local("b"), trained, previous)["w"]


def test_a_single_reply_is_uniform():
    """A constant update under its masks: all 256 values of each byte alike (chi-square), no two neighbours related."""
    reply = masked_once(0.25)
    for place in range(4):
        counts = np.bincount((reply >> np.uint32(8 * place)) & np.uint32(255), minlength=256)
        assert chisquare(counts).pvalue > 1e-8
    assert len(np.unique(reply)) > 59_000
    assert abs(np.corrcoef(reply[:-1], reply[1:])[0, 1]) < 0.02


def test_replies_of_equal_and_of_different_updates_cannot_be_told_apart():
    """The difference of two rounds' replies is uniform, whether the updates were equal or not."""
    first, same, other = masked_once(0.25), masked_once(0.25), masked_once(-3.0)
    for difference in (first - same, first - other):
        counts = np.bincount(difference >> np.uint32(24), minlength=256)
        assert chisquare(counts).pvalue > 1e-8


def test_masks_are_the_only_thing_between_reply_and_update():
    """The counterexample to the two tests above: without the masks, one value everywhere."""
    plain_reply = masking.quantised(np.full(1000, 0.25), 1 / 3, 32, 16.0)
    assert len(np.unique(plain_reply)) == 1


def test_fewer_than_t_shares_tell_nothing():
    """Any 2 of 3 shares give the secret back, one alone is the same for another secret of the same share."""
    secret = os.urandom(32)
    shares = dict(enumerate(masking.shares_of(secret, 2, 3), start=1))
    for chosen in combinations(shares, 2):
        assert masking.restored({number: shares[number] for number in chosen}) == secret
    assert masking.restored({1: shares[1]}) != secret
    assert secret not in shares.values()


def test_the_server_gets_one_secret_of_each_client():
    """Shares of b_u of those that delivered, of s_u of the one that did not, and never both."""
    federation = Federation([1, 1, 1]).begin()
    trained = models("ab")
    updates = [federation.reply(name, trained[name]) for name in "ab"]
    federation.end(updates)
    for said in federation.entries[OPENED].values():
        assert set(said) == {SELF + "a", SELF + "b", KEY + "c"}


# --- what a client refuses --------------------------------------------------------------------------------------------


def test_a_second_list_of_those_that_delivered_is_refused():
    """It would give the server both secrets of a client; the same list again gets the same answer."""
    federation = Federation([1] * 5).begin()
    trained = models(federation.names)
    for name in federation.names:
        federation.reply(name, trained[name])
    first = federation.part.collect(federation.local("a", OPENED, "abc"))
    again = federation.part.collect(federation.local("a", OPENED, "abc"))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    with pytest.raises(UserError, match="second list of clients that delivered"):
        federation.part.collect(federation.local("a", OPENED, "abcd"))
    with pytest.raises(UserError, match="the sum of 2 updates stays masked; 3 are needed"):
        federation.part.collect(federation.local("b", OPENED, "ab"))
    with pytest.raises(UserError, match="not one of this round"):
        federation.part.collect(federation.local("b", OPENED, "acd"))


def test_a_second_update_under_the_same_masks_is_refused():
    """The very same update may be asked for again (its reply was lost), and looks the same."""
    federation = Federation([1, 1]).begin()
    trained = models("ab")
    first, again = (federation.reply("a", trained["a"]) for _ in range(2))
    assert np.array_equal(first.arrays["w"], again.arrays["w"])
    with pytest.raises(UserError, match="second update under the same masks"):
        federation.reply("a", trained["b"])


def test_a_list_of_keys_that_is_not_honest_is_refused():
    """Another key for this client, one key twice, too few clients, strangers, a second list in one round."""
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
    """The server gave b another number of examples for c: what the three seal and mask is of no use to it."""
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
    """One bit in a sealed share, and a share that was meant for another one."""
    federation = Federation([1, 1, 1]).begin()
    good = federation.entries[SHARES]["b"]["to:a"]
    flipped = good.copy()
    flipped[20] ^= 1
    for wrong in (flipped, federation.entries[SHARES]["b"]["to:c"]):
        federation.entries[SHARES]["b"] = {**federation.entries[SHARES]["b"], "to:a": wrong}
        with pytest.raises(UserError, match="not those that 'b' sealed"):
            federation.reply("a", models("a")["a"])


def test_a_change_above_the_limit_fails_by_name():
    """In place of a wrong number."""
    federation = Federation([1, 1], limit=0.5).begin()
    trained = {**PREVIOUS, "w": PREVIOUS["w"] + 2}
    with pytest.raises(UserError, match=r"'w' changed by 2, more than method.secure_mean.limit = 0.5"):
        federation.reply("a", trained)
    with pytest.raises(UserError, match="changed by nan"):
        federation.reply("a", {**PREVIOUS, "w": PREVIOUS["w"] * np.nan})


def test_the_secrets_of_a_round_survive_a_new_process_and_then_go(tmp_path):
    """Every message may be another process; the file can be read by its owner alone and is empty of secrets after."""
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
    """Other records, other lengths, and another number of examples than in the handshake."""
    federation = Federation([10, 10])
    federation.ask(KEYS, "ab")
    server, line = federation.server(), federation.entries[KEYS]["a"]["line"]
    keys, shares = federation.banks[KEYS], federation.banks[SHARES]
    assert "weighs its update by 10 examples, the handshake said 5" in keys.accept(
        "a", {"line": line}, dataclasses.replace(server, class_counts={"a": (2, 3)})
    )
    assert keys.accept("a", {"line": line[:-1]}, server)
    assert shares.accept("a", {"commitment": line[:32]}, server)
    assert shares.accept("a", {"commitment": line[:32], "to:b": line}, server)
    assert federation.banks[OPENED].accept("a", {}, dataclasses.replace(server, banks={SHARES: {"a": {}}}))


def test_more_than_half():
    """t: two of two and of three, three of four and five; drawn clients count; what is set stays."""
    assert [threshold_of(0, count) for count in (2, 3, 4, 5, 10)] == [2, 2, 3, 3, 6]
    assert threshold_of(0, 100, 4) == 3
    assert threshold_of(9, 10) == 9
