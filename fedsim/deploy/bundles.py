"""Which app bundles a site runs: those whose hash its kit allows, and those that the operator's key signed.

An app bundle (FAB) is what an operator submits. The bundles of `fedsim run` and `fedsim deploy check` hold no code:
they name the apps of the fedsim that is installed on the site. Their hashes are the same for every run, and
`apps/allowed` in a kit lists them. Another bundle needs a line in `apps/allowed`, or a file `apps/<hash>.sig` with the
operator's signature (`fedsim deploy sign`). The public half of the operator's key is the kit's `operator.pub`.

The kit pins bundles when it has the file `apps/allowed`. Signatures are Ed25519 over `fedsim app <hash>`.
"""

import hashlib
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_public_key

from fedsim.common.errors import UserError
from fedsim.common.values import JsonTable
from fedsim.flower.private import private
from fedsim.flower.processes import APP, write_app


def _app(server: str, client: str, **changes: JsonTable) -> JsonTable:
    """A run's app with other components."""
    app = {**APP["tool"]["flwr"]["app"], "components": {"serverapp": server, "clientapp": client}, **changes}
    return {**APP, "tool": {"flwr": {"app": app}}}


RUN = _app("fedsim.deploy.server_app:app", "fedsim.apps.client:app")
CHECK = {
    **_app(
        "fedsim.deploy.check_app:server",
        "fedsim.deploy.check_app:client",
        config={"experiment": "", "report": "", "wait": 0.0, "packages": "", "statistics": 0},
    ),
    "project": {"name": "fedsim-check", "version": "0.1.0", "description": "Asks the sites", "license": "Apache-2.0"},
}
ALLOWED, OPERATOR = Path("apps/allowed"), Path("operator.pub")

logger = logging.getLogger("fedsim")


@dataclass(frozen=True)
class Pins:
    """The bundles that a kit allows."""

    kit: Path

    @classmethod
    def read(cls, kit: Path) -> "Pins | None":
        """Returns the bundles that the kit allows; None when it allows every bundle."""
        return cls(kit) if (kit / ALLOWED).is_file() else None

    def allows(self, fab: Any, trusted_entities: object = None) -> bool:
        """Whether a bundle with this content is allowed. This replaces Flower's own check of a bundle."""
        digest = hashlib.sha256(fab.content).hexdigest()
        if digest in self.hashes() or self.signed(digest):
            return True
        print(f"refused: the app bundle {digest} is not allowed here; see apps/ in the kit", flush=True)
        return False

    def hashes(self) -> set[str]:
        """Returns the hashes in `apps/allowed`; text after a hash on its line is a remark."""
        hashes: set[str] = set()
        for line in (self.kit / ALLOWED).read_text().splitlines():
            if line.strip() and not line.startswith("#"):
                hashes.add(line.split()[0].lower())
        return hashes

    def signed(self, digest: str) -> bool:
        """Whether the operator's key has signed that hash."""
        signature = self.kit / "apps" / f"{digest}.sig"
        operator = self.kit / OPERATOR
        if not signature.is_file() or not operator.is_file():
            return False
        key = load_ssh_public_key(operator.read_bytes())
        try:
            assert isinstance(key, Ed25519PublicKey)
            key.verify(bytes.fromhex(signature.read_text().strip()), text(digest))
        except (InvalidSignature, ValueError, AssertionError):
            return False
        return True


def text(digest: str) -> bytes:
    """Returns the text that is signed for a bundle with this hash."""
    return f"fedsim app {digest}".encode()


def sign(app: Path, private: Path) -> tuple[str, str]:
    """Returns (hash, signature) of an app folder's bundle.

    Raises UserError when the bundle cannot be built, and for a file without the key.
    """
    try:
        key = load_pem_private_key(private.read_bytes(), None)
        assert isinstance(key, Ed25519PrivateKey)
    except (OSError, ValueError, TypeError, AssertionError):
        raise UserError(f"{private} is not the operator's signing key (operator/apps.key in the kits)") from None
    digest = bundle_hash(app)
    return digest, key.sign(text(digest)).hex()


def bundle_hash(app: Path) -> str:
    """Returns the SHA-256 of the bundle that `flwr run` would submit for an app folder.

    Raises UserError when Flower cannot build it.
    """
    build = private("flwr.cli.build:build_fab_from_disk")
    try:
        return hashlib.sha256(build(app)).hexdigest()
    except Exception as error:  # Flower's errors have the text that its command would print
        raise UserError(f"{app} is not an app that Flower can build: {error}") from None


def own_bundles() -> dict[str, str]:
    """Returns the hashes of fedsim's own bundles by name: what `fedsim run` and `fedsim deploy check` submit."""
    bundles: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="fedsim-bundles-") as folder:
        for name, app in (("run", RUN), ("check", CHECK)):
            written = write_app(Path(folder) / name, app)
            bundles[f"fedsim-{name}"] = bundle_hash(written)
    return bundles
