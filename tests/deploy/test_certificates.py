"""Certificates as OpenSSL and Flower read them; private keys that nobody else can read."""

import datetime
import ipaddress
import os
import stat

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from fedsim.common.errors import UserError
from fedsim.deploy.certificates import read_ca, write_ca, write_private, write_server_certificate, write_site_key

HOSTS = ["fl.example.org", "10.1.2.3", "localhost", "127.0.0.1", "2001:db8::1"]


@pytest.fixture
def authority(tmp_path):
    """(key file, certificate file) of a CA."""
    files = (tmp_path / "ca.key", tmp_path / "ca.crt")
    write_ca("demo", 30, *files)
    return files


@pytest.fixture
def server(authority, tmp_path):
    """(key file, certificate file) of a server."""
    files = (tmp_path / "server.key", tmp_path / "server.pem")
    write_server_certificate("demo", HOSTS, 30, authority, files)
    return files


def verifier(authority, host):
    """A TLS client that trusts this CA only and wants to reach that host."""
    store = Store([x509.load_pem_x509_certificate(authority[1].read_bytes())])
    try:
        subject = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        subject = x509.DNSName(host)
    return PolicyBuilder().store(store).build_server_verifier(subject)


@pytest.mark.parametrize("host", HOSTS)
def test_the_server_is_trusted_under_each_of_its_names(authority, server, host):
    """The chain has two certificates, and ends at the federation's CA."""
    certificate = x509.load_pem_x509_certificate(server[1].read_bytes())
    assert len(verifier(authority, host).verify(certificate, [])) == 2


def test_other_names_and_other_authorities_are_refused(authority, server, tmp_path):
    """A name that was not asked for; the same name under a CA of equal name."""
    certificate = x509.load_pem_x509_certificate(server[1].read_bytes())
    with pytest.raises(VerificationError):
        verifier(authority, "evil.example.org").verify(certificate, [])
    other = (tmp_path / "other.key", tmp_path / "other.crt")
    write_ca("demo", 30, *other)
    with pytest.raises(VerificationError):
        verifier(other, "localhost").verify(certificate, [])


def test_the_server_cannot_sign_and_the_authority_cannot_serve(authority, server):
    """Constraints, key usage, extended key usage, validity."""
    ca = x509.load_pem_x509_certificate(authority[1].read_bytes())
    leaf = x509.load_pem_x509_certificate(server[1].read_bytes())
    constraints = [cert.extensions.get_extension_for_class(x509.BasicConstraints).value for cert in (ca, leaf)]
    assert [(value.ca, value.path_length) for value in constraints] == [(True, 0), (False, None)]
    usages = [cert.extensions.get_extension_for_class(x509.KeyUsage).value for cert in (ca, leaf)]
    assert [usage.key_cert_sign for usage in usages] == [True, False]
    assert list(leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.SERVER_AUTH
    ]
    days = (leaf.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).total_seconds() / 86400
    assert 29.9 < days <= 30
    assert leaf.not_valid_after_utc <= ca.not_valid_after_utc


def test_private_keys_belong_to_their_owner_alone(authority, server, tmp_path):
    """0600 whatever the umask says, and never written over."""
    old = os.umask(0)
    try:
        write_site_key("alpha", tmp_path / "key", tmp_path / "alpha.pub")
    finally:
        os.umask(old)
    for file in (authority[0], server[0], tmp_path / "key"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "key", b"")


def test_a_sites_key_is_what_flower_wants(tmp_path):
    """OpenSSH format, P-384, and a public half that belongs to it."""
    write_site_key("alpha", tmp_path / "key", tmp_path / "alpha.pub")
    key = load_ssh_private_key((tmp_path / "key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(key.curve, ec.SECP384R1)
    public = (tmp_path / "alpha.pub").read_bytes()
    assert load_ssh_public_key(public) == key.public_key()
    assert public.endswith(b" alpha\n")


def test_a_key_of_another_authority_is_refused(authority, tmp_path):
    """--add with a mixed-up operator folder must not write certificates that nobody trusts."""
    write_ca("demo", 30, tmp_path / "other.key", tmp_path / "other.crt")
    with pytest.raises(UserError, match="is not the key of"):
        read_ca(tmp_path / "other.key", authority[1])
    (tmp_path / "broken.key").write_text("nothing")
    with pytest.raises(UserError, match="cannot read the CA"):
        read_ca(tmp_path / "broken.key", authority[1])
