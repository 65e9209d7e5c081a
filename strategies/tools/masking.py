"""The mathematics of secure aggregation: pairwise masks that cancel in a sum, and the secrets that generate them.

Bonawitz et al., CCS 2017, for one round. Client u of the n clients that sent their keys (U1) has a pair of mask keys
(s_u, S_u), a pair of cipher keys (c_u, C_u) and a random b_u. U2 are the clients whose shares arrived; u then sends,
modulo 2^bits,

    y_u = x_u + PRG(b_u) + sum_{v in U2, v > u} PRG(s_uv) - sum_{v in U2, v < u} PRG(s_uv)

U3 are the clients whose vectors arrived. In the sum of these vectors the masks between them cancel. The server
computes b_u from t shares and subtracts PRG(b_u). A client of U2 that is not in U3 has left masks in the others'
vectors; they are removed with its s_u. Of one client the server gets either b_u or s_u, and never both.

Keys are of X25519. s_uv and the keys that encrypt shares are HKDF-SHA256 of the agreed secret, with a hash of all
public keys and numbers of examples of U1 (`transcript`). If clients received different ones, their masks do not cancel.
PRG is AES-256 in counter mode. Shares are Shamir's, over GF(2^128), each secret in two blocks; ChaCha20-Poly1305
encrypts them. Secrets come from the operating system and never from the run's seed, which the server knows.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, islice

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

SECRET = 32  # bytes of a key, of b_u and of a share of one of them
BLOCK = 16  # bytes that Shamir's scheme shares at a time
ENTRY = 2 * SECRET + 8  # bytes of a client's line in the list of public keys
SIGNATURE = 96  # bytes that follow a line where sites sign with their registered keys
SEALED = 12 + 2 * SECRET + 16  # bytes of a sealed pair of shares: nonce, shares, tag
SPARE = 2**16  # rounding may add 1/2 for each client
PIECE = 1 << 22  # values of a mask that are made at a time
COMBINATIONS = 200  # so many combinations of shares are tried when some shares are false


# --- numbers ----------------------------------------------------------------------------------------------------------


def scale_of(bits: int, limit: float) -> float:
    """S, by which values are multiplied before they are rounded: sums up to `limit` fit into `bits` bits with sign."""
    return (2.0 ** (bits - 1) - SPARE) / limit


def quantised(values: np.ndarray, weight: float, bits: int, limit: float) -> np.ndarray:
    """round(w x S) modulo 2^bits, as unsigned integers; |x| must be at most `limit` and w at most 1.

    The sum over n clients differs from that of w x by at most n / (2 S).
    """
    integers = np.asarray(np.rint(np.asarray(values, np.float64) * (weight * scale_of(bits, limit))))
    return integers.astype(np.int64).astype(f"u{bits // 8}")


def decoded(total: np.ndarray, bits: int, limit: float) -> np.ndarray:
    """The sum of w x, computed from the sum modulo 2^bits of quantised values."""
    return total.view(f"i{bits // 8}").astype(np.float64) / scale_of(bits, limit)


def stream(seed: bytes, sizes: Sequence[int], bits: int) -> Iterator[Iterator[np.ndarray]]:
    """PRG(seed): for each size a mask with that many values, in pieces, which must be read in order and completely."""
    cipher = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    for size in sizes:
        yield (
            np.frombuffer(cipher.update(bytes(min(PIECE, size - start) * bits // 8)), f"<u{bits // 8}")
            for start in range(0, size, PIECE)
        )


def add_mask(arrays: Mapping[str, np.ndarray], seed: bytes, sign: int) -> None:
    """Add PRG(seed) to unsigned arrays in place, or subtract it (sign -1), with tensors in the order of their names.

    Raises ValueError for an array that is not in C order, because its mask would be added to a copy and so be lost.
    """
    names = sorted(arrays)
    if not names:
        return
    if odd := [name for name in names if not arrays[name].flags.c_contiguous]:
        raise ValueError(f"{odd[0]!r} is not in C order, so that its mask would be lost")
    bits = 8 * arrays[names[0]].dtype.itemsize
    for name, pieces in zip(names, stream(seed, [arrays[name].size for name in names], bits)):
        flat, start = arrays[name].reshape(-1), 0
        for piece in pieces:
            part = flat[start : start + piece.size]
            (np.add if sign > 0 else np.subtract)(part, piece, out=part)
            start += piece.size


def pair_sign(client: str, other: str) -> int:
    """The sign with which a client adds the mask that it shares with another client; the two masks cancel."""
    return 1 if client < other else -1


# --- keys -------------------------------------------------------------------------------------------------------------


def new_key() -> bytes:
    """A private key of X25519."""
    return X25519PrivateKey.generate().private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())


def public_key(private: bytes) -> bytes:
    """The public key of a private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def entry(cipher: bytes, mask: bytes, examples: int) -> bytes:
    """A client's line in the list of public keys, from its private keys: C_u, S_u and its number of examples."""
    return public_key(cipher) + public_key(mask) + examples.to_bytes(8, "little")


def cipher_key(line: bytes) -> bytes:
    """C_u of a line."""
    return line[:SECRET]


def mask_key(line: bytes) -> bytes:
    """S_u of a line."""
    return line[SECRET : 2 * SECRET]


def examples_of(line: bytes) -> int:
    """The number of examples in a line of that list."""
    return int.from_bytes(line[2 * SECRET : ENTRY], "little")


def signed_text(run: str, round: int, client: str, line: bytes) -> bytes:
    """What a site signs of its line: it counts for this client in this round of this run."""
    return f"fedsim secure keys {round} {len(run)} {run} {client} ".encode() + line[:ENTRY]


def transcript(round: int, threshold: int, lines: Mapping[str, bytes]) -> bytes:
    """A hash of all that the clients of a round must agree on: U1 with keys and numbers of examples, t, the round."""
    digest = hashlib.sha256(f"fedsim secure mean {round} {threshold} {len(lines)}".encode())
    for name in sorted(lines):
        digest.update(hashlib.sha256(name.encode()).digest() + lines[name][:ENTRY])
    return digest.digest()


def agreed(private: bytes, public: bytes, purpose: str, common: bytes) -> bytes:
    """The secret that two clients share for a purpose, from one's private and the other's public key."""
    secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(SHA256(), SECRET, None, purpose.encode() + common).derive(secret)


def pair_seed(private: bytes, public: bytes, common: bytes) -> bytes:
    """s_uv, from which both clients of a pair compute their mask."""
    return agreed(private, public, "mask", common)


# --- shares -----------------------------------------------------------------------------------------------------------


def shares_of(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares of a secret of 32 bytes for the clients 1 to `count`; any `threshold` of them determine it."""
    blocks = [secret[start : start + BLOCK] for start in range(0, SECRET, BLOCK)]
    shares = [dict(Shamir.split(threshold, count, block, False)) for block in blocks]
    return [b"".join(block[number] for block in shares) for number in range(1, count + 1)]


def restored(shares: Mapping[int, bytes]) -> bytes:
    """The secret of exactly `threshold` shares, which are given by the number of their client."""
    blocks = range(0, SECRET, BLOCK)
    parts = ([(number, share[start : start + BLOCK]) for number, share in shares.items()] for start in blocks)
    return b"".join(Shamir.combine(part, False) for part in parts)


def restored_as(
    shares: Mapping[int, bytes], threshold: int, mark: bytes, mark_of: Callable[[bytes], bytes]
) -> bytes | None:
    """The secret whose mark (its public key or hash) is known, without false shares; None when it cannot be found."""
    for chosen in islice(combinations(sorted(shares), threshold), COMBINATIONS):
        secret = restored({number: shares[number] for number in chosen})
        if mark_of(secret) == mark:
            return secret
    return None


def commitment(secret: bytes) -> bytes:
    """A hash by which b_u can be recognized. It discloses nothing, because b_u is random and as long as the hash."""
    return hashlib.sha256(b"fedsim self mask" + secret).digest()


def sealed(key: bytes, sender: str, receiver: str, shares: bytes) -> bytes:
    """A client's shares of b_u and s_u for another client, encrypted with the key that the two agreed on."""
    nonce = os.urandom(12)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, shares, direction(sender, receiver))


def opened(key: bytes, sender: str, receiver: str, text: bytes) -> bytes | None:
    """The shares that `sealed` encrypted; None when they were changed, or are not from that sender to that receiver."""
    try:
        return ChaCha20Poly1305(key).decrypt(text[:12], text[12:], direction(sender, receiver))
    except InvalidTag:
        return None


def direction(sender: str, receiver: str) -> bytes:
    """Sender and receiver as unambiguous bytes."""
    return hashlib.sha256(sender.encode()).digest() + hashlib.sha256(receiver.encode()).digest()
