"""The federation's own CA, the server's certificate and the sites' keys, all on NIST curves; the operator's key.

Private key files are created with the mode 0600 and never have another.
"""

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedsim.common.errors import UserError
from fedsim.deploy.federation import is_ip

CA_DAYS = 3650  # the CA outlives its certificates, which are renewed without it
CLOCK_SKEW = timedelta(hours=1)  # certificates are valid from this time before now, because clocks may be behind


def write_ca(name: str, days: int, key_file: Path, certificate_file: Path) -> None:
    """Writes a new CA that may sign certificates but no further CAs; its key with mode 0600."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = _subject(name, "CA")
    builder = _builder(subject, subject, key, max(days, CA_DAYS), ca=True)
    certificate = builder.sign(key, hashes.SHA384())
    write_private(key_file, _pem(key))
    certificate_file.write_bytes(certificate.public_bytes(Encoding.PEM))


def write_server_certificate(
    name: str,
    hosts: Sequence[str],
    days: int,
    ca: tuple[Path, Path],
    files: tuple[Path, Path],
) -> None:
    """Writes the server's key (0600) and certificate for all its host names and IP addresses.

    `ca` and `files` are (key file, certificate file); the certificate ends with the CA's at the latest.
    """
    ca_key, issuer = read_ca(*ca)
    key = ec.generate_private_key(ec.SECP256R1())
    names = [_general_name(host) for host in hosts]
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    subject = _subject(name, "server")
    certificate = (
        _builder(subject, issuer.subject, key, days, ca=False, latest=issuer.not_valid_after_utc)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(authority, critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    write_private(files[0], _pem(key))
    files[1].write_bytes(certificate.public_bytes(Encoding.PEM))


def write_site_key(site: str, key_file: Path, public_file: Path) -> None:
    """Writes a site's own P-384 key in OpenSSH format (0600), by which the SuperLink knows it, and its public half."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(key_file, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    public_file.write_bytes(public + b" " + site.encode() + b"\n")


def write_operator_key(key_file: Path, public_file: Path) -> None:
    """Writes a new Ed25519 key that signs app bundles (0600), and its public half for the kits."""
    key = Ed25519PrivateKey.generate()
    write_private(key_file, _pem(key))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    public_file.write_bytes(public + b" operator\n")


def read_ca(key_file: Path, certificate_file: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Returns the CA's key and certificate; raises UserError when they cannot be read or do not belong together."""
    try:
        key = load_pem_private_key(key_file.read_bytes(), None)
        certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"cannot read the CA in {key_file} and {certificate_file}: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise UserError(f"{key_file} is not the key of {certificate_file}; renew all kits with --force")
    return key, certificate


def write_private(file: Path, content: bytes) -> None:
    """Writes a new file that only its owner can read, from the moment of its creation."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)


def _general_name(host: str) -> x509.GeneralName:
    """Returns a host name or an IP address as a certificate has it."""
    if is_ip(host):
        return x509.IPAddress(ipaddress.ip_address(host))
    return x509.DNSName(host)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    days: int,
    ca: bool,
    latest: datetime | None = None,
) -> x509.CertificateBuilder:
    """Returns what all certificates have in common; one with `latest` ends then at the latest."""
    now = datetime.now(UTC)
    end = now + timedelta(days=days)
    if latest:
        end = min(end, latest)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(_key_usage(signs_certificates=ca), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _subject(name: str, role: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, f"fedsim {name}"[:64]),
            x509.NameAttribute(NameOID.COMMON_NAME, f"{name} {role}"[-64:]),
        ]
    )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
