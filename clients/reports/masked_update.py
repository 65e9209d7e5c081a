"""The client's half of secure aggregation: it hides its update under masks that cancel in the sum of all."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from clients.identity import Identity
from clients.parts import LocalRound, Report
from fedsim.common.errors import UserError
from fedsim.common.tasks import ANY_TASK
from fedsim.common.values import JsonTable
from strategies.banks.secure_exchange import COMMITMENT, KEY, KEYS, LINE, OPENED, SELF, SHARES, TO, as_array
from strategies.fuse.secure_mean import threshold_of
from strategies.server_round import Arrays
from strategies.tools import masking

ENTRY = "secure-mean"  # what is kept from message to message of a round


@dataclass(frozen=True)
class MaskedUpdate(Report):
    """y_u = round(S w_u delta_u) + masks, modulo 2^bits; the formulas are those of `strategies.tools.masking`.

    Bonawitz et al., CCS 2017. This client uses each of one round's secrets for one purpose and once. It masks one
    update. It tells its shares for one list of clients that delivered, which is then the list of the round. The secrets
    are made anew in every round and kept in the client's folder from message to message, in a file that its owner alone
    can read. They are removed when the sum is unmasked.

    limit, bits, threshold: as in `secure_mean`, to which this part belongs
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    limit: Annotated[float, Field(gt=0)] = 16.0
    bits: Literal[32, 64] = 32
    threshold: Annotated[int, Field(ge=0)] = 0
    banks: ClassVar[tuple[str, ...]] = (KEYS, SHARES, OPENED)
    belongs_to: ClassVar[str] = "secure_mean"

    def collect(self, round: LocalRound) -> dict[str, np.ndarray]:
        """What one of the three exchanges asks for."""
        return {KEYS: self._keys, SHARES: self._shares, OPENED: self._opened}[round.asked](round)

    def _least(self, round: LocalRound, lines: Mapping[str, object]) -> int:
        """t of the round with this list of keys."""
        return threshold_of(self.threshold, len(round.clients), round.train.clients_per_round, len(lines))

    def _keys(self, round: LocalRound) -> dict[str, np.ndarray]:
        """New keys, whatever was there before."""
        cipher, mask = masking.new_key(), masking.new_key()
        keep(round, {"cipher": cipher.hex(), "mask": mask.hex()})
        line = masking.entry(cipher, mask, round.data.examples)
        if round.store.peers:
            text = masking.signed_text(round.store.run, round.round, round.client, line)
            line += Identity.read(round.store.peers).signature(text)
        return {LINE: as_array(line)}

    def _shares(self, round: LocalRound) -> dict[str, np.ndarray]:
        """A new b_u; shares of it and of s_u for the others. Asked again for the same list, the same ones."""
        secrets, lines = kept(round), {name: bytes(line) for name, line in round.records[KEYS].items()}
        listed = {name: line.hex() for name, line in sorted(lines.items())}
        if "lines" in secrets and secrets["lines"] != listed:
            raise UserError("the server changed the list of public keys within a round")
        if "sent" not in secrets:
            secrets |= self._shared(round, secrets, lines) | {"lines": listed}
            keep(round, secrets)
        return {name: as_array(bytes.fromhex(text)) for name, text in secrets["sent"].items()}

    def _shared(self, round: LocalRound, own: JsonTable, lines: Mapping[str, bytes]) -> JsonTable:
        cipher, mask = bytes.fromhex(own["cipher"]), bytes.fromhex(own["mask"])
        least, me = self._least(round, lines), round.client
        refuse_list(round, lines, masking.entry(cipher, mask, round.data.examples), least)
        common, secret, names = masking.transcript(round.round, least, lines), os.urandom(masking.SECRET), sorted(lines)
        of_secret, of_mask = (masking.shares_of(value, least, len(names)) for value in (secret, mask))
        pairs = [first + second for first, second in zip(of_secret, of_mask, strict=True)]
        sent = {COMMITMENT: masking.commitment(secret).hex()}
        for name, pair in zip(names, pairs, strict=True):
            if name != me:
                key = masking.agreed(cipher, masking.cipher_key(lines[name]), "share", common)
                sent[TO + name] = masking.sealed(key, me, name, pair).hex()
        return {"self": secret.hex(), "shares": {me: pairs[names.index(me)].hex()}, "sent": sent}

    def leave(self, round: LocalRound, trained: Arrays, received: Arrays) -> Arrays:
        """The update under its masks; integer tensors as they are. UserError for a change above the limit."""
        secrets = kept(round)
        lines = {name: bytes.fromhex(line) for name, line in secrets["lines"].items()}
        least = self._least(round, lines)
        common = masking.transcript(round.round, least, lines)
        shares = {round.client: secrets["shares"][round.client]} | self._received(round, secrets, lines, common)
        if len(shares) < least:
            raise UserError(f"shares of {len(shares)} clients came, {least} are needed to hide an update")
        weight = own_weight(round, {name: lines[name] for name in shares})
        floats = {name: array for name, array in trained.items() if array.dtype.kind == "f"}
        masked = {name: self._quantised(name, array, received, weight) for name, array in floats.items()}
        keep(round, secrets | only_once(secrets, {"update": digest_of(masked), "shares": shares}))
        masking.add_mask(masked, bytes.fromhex(secrets["self"]), 1)
        own_key = bytes.fromhex(secrets["mask"])
        for name in sorted(shares.keys() - {round.client}):
            seed = masking.pair_seed(own_key, masking.mask_key(lines[name]), common)
            masking.add_mask(masked, seed, masking.pair_sign(round.client, name))
        return {**trained, **masked}

    def _received(self, round: LocalRound, own: JsonTable, lines: Mapping[str, bytes], common: bytes) -> dict[str, str]:
        """The shares that the others sealed for this client, by sender."""
        masked = {}
        for sender, text in round.records[SHARES].items():
            line = lines.get(sender)
            key = line and masking.agreed(bytes.fromhex(own["cipher"]), masking.cipher_key(line), "share", common)
            pair = key and masking.opened(key, sender, round.client, bytes(text))
            if not pair:
                raise UserError(f"the shares that the server forwards are not those that {sender!r} sealed")
            masked[sender] = pair.hex()
        return masked

    def _quantised(self, name: str, array: np.ndarray, received: Arrays, weight: float) -> np.ndarray:
        change = array.astype(np.float64) - received[name] if name in received else array.astype(np.float64)
        largest = float(np.abs(change).max(initial=0.0))
        if not largest <= self.limit:
            raise UserError(
                f"{name!r} changed by {largest:.4g}, more than method.secure_mean.limit = {self.limit:g}; raise it "
                "(method.secure_mean.bits = 64 keeps the precision), or lower the learning rate"
            )
        return masking.quantised(change, weight, self.bits, self.limit)

    def _opened(self, round: LocalRound) -> dict[str, np.ndarray]:
        """A share of b_u of those who delivered, of s_u of the others; for one list only."""
        secrets, delivered = kept(round), sorted(set(round.delivered))
        if secrets.get("answered", delivered) != delivered:
            raise UserError("the server names a second list of clients that delivered")
        if "answer" not in secrets:
            if (
                "update" not in secrets
                or round.client not in delivered
                or not set(delivered) <= secrets["shares"].keys()
            ):
                raise UserError("the server's list of clients that delivered is not one of this round")
            least = self._least(round, secrets["lines"])
            if len(delivered) < least:
                raise UserError(f"the sum of {len(delivered)} updates stays masked; {least} are needed")
            half = 2 * masking.SECRET  # hexadecimal digits of a share
            answer = {
                (SELF if name in delivered else KEY) + name: pair[:half] if name in delivered else pair[half:]
                for name, pair in secrets["shares"].items()
            }
            secrets = {"answered": delivered, "answer": answer}
            keep(round, secrets)  # and nothing else: the secrets are gone
        return {name: as_array(bytes.fromhex(share)) for name, share in secrets["answer"].items()}


def refuse_unsigned(round: LocalRound, identity: Identity, lines: Mapping[str, bytes]) -> None:
    """UserError for a line that the site of that client has not signed for this round."""
    for name, line in lines.items():
        text = masking.signed_text(round.store.run, round.round, name, line)
        if not identity.verifies(name, text, line[masking.ENTRY :]):
            raise UserError(
                f"the public keys of client {name!r} are not signed by its site: the server replaced them, or the "
                "file `peers` of this kit or of that site's kit lacks a key (SECURITY-DETAILS.md, Secure aggregation)"
            )


def kept(round: LocalRound) -> JsonTable:
    """What the earlier messages of this round kept; UserError when there is nothing."""
    text = round.store.passed_on(round.round, ENTRY)
    if not text:
        raise UserError(
            f"this client has no keys of round {round.round}: its state was lost, or the server never asked"
        )
    return json.loads(text)


def keep(round: LocalRound, values: JsonTable) -> None:
    """Keep values for the next messages of this round."""
    round.store.pass_on(round.round, ENTRY, json.dumps(values))


def refuse_list(round: LocalRound, lines: Mapping[str, bytes], own_line: bytes, least: int) -> None:
    """UserError when the server's list of public keys is not one with which this client may hide its update.

    lines: by client. own_line: what this client sent. least: how many clients the list must have
    """
    keys = [key for line in lines.values() for key in (masking.cipher_key(line), masking.mask_key(line))]
    if lines.get(round.client, b"")[: masking.ENTRY] != own_line or len(set(keys)) < len(keys):
        raise UserError("the server's list of public keys has others for this client, or one key twice")
    if len(lines) < least or not set(lines) <= set(round.clients):
        raise UserError(f"the server's list has {len(lines)} clients of this run, {least} are needed")
    if round.store.peers:
        refuse_unsigned(round, Identity.read(round.store.peers), lines)


def only_once(secrets: JsonTable, sent: JsonTable) -> JsonTable:
    """What a client sends under its masks of a round; UserError when it has already sent something else."""
    if "update" in secrets and any(secrets[key] != value for key, value in sent.items()):
        raise UserError("the server asks for a second update under the same masks, which would show the difference")
    return sent


def own_weight(round: LocalRound, lines: Mapping[str, bytes]) -> float:
    """The weight of this client among those with these lines, each of which says a number of examples."""
    weights = round.known_weights({name: masking.examples_of(line) for name, line in lines.items()})
    assert weights is not None  # Fact.KNOWN_WEIGHTS
    return weights[round.client]


def digest_of(arrays: Arrays) -> str:
    """SHA-256 of the values of these tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()
