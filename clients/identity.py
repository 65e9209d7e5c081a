"""A site's registered key and the other sites' public keys, by which sites notice that a server replaced their keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP384R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedsim.common.errors import UserError
from fedsim.data.names import matching
from strategies.tools.masking import SIGNATURE


@dataclass(frozen=True)
class Identity:
    """This site's private key, and the public keys of all source sites by their domains."""

    key: EllipticCurvePrivateKey
    peers: Mapping[str, EllipticCurvePublicKey]

    @classmethod
    def read(cls, peers: Path) -> "Identity":
        """From the kit's file `peers` (lines `TYPE KEY DOMAIN`), and `key` next to it."""
        file = peers.with_name("key")
        try:
            key, public_keys = load_ssh_private_key(file.read_bytes(), None), {}
            if not isinstance(key, EllipticCurvePrivateKey):
                raise ValueError("it is not on P-384")
            on_p384(key.public_key())
            file = peers
            for line in filter(str.strip, file.read_text().splitlines()):
                kind, public, domain = line.split(None, 2)
                public_keys[domain.strip()] = on_p384(load_ssh_public_key(f"{kind} {public}".encode()))
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise UserError(
                f"this kit has a file `peers`, so that secure_mean signs its keys, and cannot read {file}: {error}"
            ) from None
        return cls(key, public_keys)

    def signature(self, text: bytes) -> bytes:
        """ECDSA with SHA-384, as two numbers of 48 bytes."""
        pair = decode_dss_signature(self.key.sign(text, ECDSA(SHA384())))
        return b"".join(number.to_bytes(SIGNATURE // 2, "big") for number in pair)

    def verifies(self, client: str, text: bytes, signature: bytes) -> bool:
        """Whether the site that holds this client's domain signed the text."""
        name = matching(client, list(self.peers))
        if name is None or len(signature) != SIGNATURE:
            return False
        half = SIGNATURE // 2
        first, second = (int.from_bytes(number, "big") for number in (signature[:half], signature[half:]))
        try:
            self.peers[name].verify(encode_dss_signature(first, second), text, ECDSA(SHA384()))
        except InvalidSignature:
            return False
        return True


def on_p384(key: object) -> EllipticCurvePublicKey:
    """The key; ValueError when it is not of the kind that a kit has."""
    if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP384R1):
        raise ValueError("it has a key that is not on P-384")
    return key
