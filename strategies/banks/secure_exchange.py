"""Secure aggregation's three exchanges of a round: public keys, shares of secrets, and shares that unmask the sum."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedsim.parts.facts import Fact
from strategies.parts import Arrays, Bank, Entries, ServerRound, When
from strategies.tools.masking import ENTRY, SEALED, SECRET, SIGNATURE, examples_of

KEYS, SHARES, OPENED = "secure_keys", "secure_shares", "secure_unmasking"
LINE, COMMITMENT, TO = "line", "commitment", "to:"  # names of arrays; TO is followed by the receiver's name
SELF, KEY = "self:", "key:"  # a share of a client's b_u, or of its s_u; followed by its name


class OneRound(Bank):
    """What is true for one round only: entries of earlier rounds are forgotten."""

    with_model: ClassVar[bool] = False
    uniform: ClassVar[bool] = False
    assumes = (Fact.SEVERAL_CLIENTS,)

    def merge(self, bank: Entries, entries: Entries, server: ServerRound) -> dict[str, Arrays]:
        """The entries of this round."""
        return dict(entries)

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays | None:
        """Nothing."""
        return None


@dataclass(frozen=True)
class SecureKeys(OneRound):
    """Public keys and the number of examples of every drawn client, which all of them get (AdvertiseKeys).

    Every drawn client gets one more message in each round, without the model. See `strategies.tools.masking`.
    A site whose kit has the other sites' public keys adds its signature to its line.
    """

    name: ClassVar[str] = KEYS
    when: ClassVar[When] = "before"
    requires: ClassVar[dict[str, str]] = {"banks": "secure_shares"}

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """Refuses what is not one line of keys, with the number of examples that the client said in the handshake."""
        if arrays.keys() != {LINE} or not any(is_bytes(arrays[LINE], size) for size in (ENTRY, ENTRY + SIGNATURE)):
            return "it is not one line of public keys"
        claimed, counted = examples_of(bytes(arrays[LINE])), sum(server.class_counts.get(client, ()))
        return (
            f"it weighs its update by {claimed} examples, the handshake said {counted}"
            if counted not in (0, claimed)
            else ""
        )

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays:
        """The whole list, by client."""
        return {name: entry[LINE] for name, entry in bank.items()}

    def traffic(self, server: ServerRound) -> tuple[int, int]:
        """A line of each drawn client comes with two messages; one line goes up."""
        return 2 * ENTRY * (len(server.drawn) or len(server.clients)), ENTRY


@dataclass(frozen=True)
class SecureShares(OneRound):
    """Of every client, shares of its two secrets for each other client, sealed for it; and b_u's hash (ShareKeys).

    Every drawn client gets one more message in each round, without the model. It gets the shares that are meant for it
    with the model. See `strategies.tools.masking`.
    """

    name: ClassVar[str] = SHARES
    when: ClassVar[When] = "before"
    reads: ClassVar[tuple[str, ...]] = (KEYS,)
    requires: ClassVar[dict[str, str]] = {"banks": "secure_unmasking"}

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """Refuses what is not a hash and one sealed pair of shares for each other client of the list."""
        others = {TO + name for name in server.banks[KEYS] if name != client}
        if arrays.keys() != {COMMITMENT, *others} or not is_bytes(arrays[COMMITMENT], SECRET):
            return "it has not a hash and one pair of shares for each other client"
        return "" if all(is_bytes(arrays[name], SEALED) for name in others) else "its shares have a wrong length"

    def hand_out(self, bank: Entries, client: str, server: ServerRound) -> Arrays:
        """What the others sealed for this client, by sender."""
        return {
            sender: entry[TO + client] for sender, entry in bank.items() if sender != client and TO + client in entry
        }

    def traffic(self, server: ServerRound) -> tuple[int, int]:
        """One sealed pair for each other client, in both directions, and the hash."""
        size = SEALED * ((len(server.drawn) or len(server.clients)) - 1)
        return size, size + SECRET


@dataclass(frozen=True)
class SecureUnmasking(OneRound):
    """Of every client that delivered, shares of the b_u of those that did, and of the s_u of the others (Unmasking).

    Every client that delivered gets one more message in each round, without the model. See `strategies.tools.masking`.
    """

    name: ClassVar[str] = OPENED
    when: ClassVar[When] = "after"

    def accept(self, client: str, arrays: Arrays, server: ServerRound) -> str:
        """Refuses what is not one share of each client that sent shares."""
        named = sorted(name.partition(":")[2] for name in arrays)
        if named != sorted(server.banks[SHARES]) or not all(name.startswith((SELF, KEY)) for name in arrays):
            return "it has not one share of each client"
        return "" if all(is_bytes(array, SECRET) for array in arrays.values()) else "its shares have a wrong length"

    def traffic(self, server: ServerRound) -> tuple[int, int]:
        """A share of each drawn client goes up."""
        return 0, SECRET * (len(server.drawn) or len(server.clients))


def is_bytes(array: np.ndarray, length: int) -> bool:
    """Whether the array is one row of `length` bytes."""
    return array.dtype == np.uint8 and array.shape == (length,)


def as_array(data: bytes) -> np.ndarray:
    """Bytes as they travel in a record."""
    return np.frombuffer(data, np.uint8)
