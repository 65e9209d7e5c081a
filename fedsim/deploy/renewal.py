"""`fedsim deploy renew`: a new server certificate from the same CA. Keys and kits stay, and running sites continue.

nginx reads it on a signal and keeps its connections; the SuperLink takes it for new connections within seconds.
"""

from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from fedsim.common.errors import UserError
from fedsim.deploy.certificates import write_server_certificate
from fedsim.deploy.control import reload_proxy
from fedsim.deploy.federation import Federation

WARN_DAYS, MOST_DAYS = 30, 3650


def valid_until(certificate: Path) -> datetime:
    """End of a certificate's validity."""
    try:
        return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the certificate {certificate}: {error}") from None


def warnings(federation: Federation, now: datetime | None = None) -> list[str]:
    """Which certificates have expired, or will within WARN_DAYS, and what to do; empty when none."""
    now, lines = now or datetime.now(UTC), []
    server = federation.kit("server")
    for file, what, remedy in (
        (server / "server.pem", "the server's certificate", "call `fedsim deploy renew`"),
        (server / "ca.crt", "the CA's certificate", "stop all and call `fedsim deploy init --force`"),
    ):
        left = (valid_until(file) - now).total_seconds() / 86_400
        if left < 0:
            lines.append(f"{what} has expired ({valid_until(file):%Y-%m-%d}): {remedy}")
        elif left < WARN_DAYS:
            lines.append(f"{what} expires in {left:.0f} days: {remedy}")
    return lines


def renew(federation: Federation, days: int = 0) -> datetime:
    """Replace the server's key and certificate; returns the end of its validity, which is the CA's at the latest.

    UserError without the CA's key, and for days out of range.
    """
    if not 0 <= days <= MOST_DAYS:
        raise UserError(
            f"--days {days}: a certificate is valid for 1 to {MOST_DAYS} days (0: as in the federation file)"
        )
    server, ca_key = federation.kit("server"), federation.kit("operator") / "ca.key"
    if not ca_key.is_file():
        raise UserError(
            f"no CA key at {ca_key}: renew on the machine with the operator's kit, then copy server.key and server.pem"
        )
    files = (server / "server.key", server / "server.pem")
    new = tuple(file.with_suffix(f"{file.suffix}.new") for file in files)
    for file in new:
        file.unlink(missing_ok=True)
    names, ca = federation.server_names, (ca_key, federation.ca_certificate)
    write_server_certificate(federation.name, names, days or federation.days, ca, (new[0], new[1]))
    for fresh, file in zip(new, files, strict=True):
        fresh.replace(file)
    reload_proxy(federation)
    return valid_until(files[1])
