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


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Keys and certificates of a CA, of another one with the same name, and of a server under the first."""
    folder = tmp_path_factory.mktemp("pki")
    names = ("ca.key", "ca.crt", "other.key", "other.crt", "server.key", "server.pem")
    files = {name: folder / name for name in names}
    ca, other, server = zip(*[iter(files.values())] * 2)
    write_ca("demo", 30, *ca)
    write_ca("demo", 30, *other)
    write_server_certificate("demo", HOSTS, 30, ca, server)
    return files


def certificate(file):
    return x509.load_pem_x509_certificate(file.read_bytes())


def chain(files, host, authority="ca.crt"):
    """The chain that a TLS client sees that trusts this CA only and wants to reach that host."""
    try:
        subject = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        subject = x509.DNSName(host)
    store = Store([certificate(files[authority])])
    return PolicyBuilder().store(store).build_server_verifier(subject).verify(certificate(files["server.pem"]), [])


def test_the_server_is_trusted_under_each_of_its_names_by_its_authority_alone(files):
    assert [len(chain(files, host)) for host in HOSTS] == [2] * len(HOSTS)
    for host, authority in (("evil.example.org", "ca.crt"), ("localhost", "other.crt")):
        with pytest.raises(VerificationError):
            chain(files, host, authority)


def test_the_server_cannot_sign_and_the_authority_cannot_serve(files):
    both = ca, leaf = certificate(files["ca.crt"]), certificate(files["server.pem"])
    constraints = [cert.extensions.get_extension_for_class(x509.BasicConstraints).value for cert in both]
    assert [(value.ca, value.path_length) for value in constraints] == [(True, 0), (False, None)]
    usages = [cert.extensions.get_extension_for_class(x509.KeyUsage).value for cert in both]
    assert [usage.key_cert_sign for usage in usages] == [True, False]
    extended = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(extended) == [ExtendedKeyUsageOID.SERVER_AUTH]
    days = (leaf.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).total_seconds() / 86400
    assert 29.9 < days <= 30
    assert leaf.not_valid_after_utc <= ca.not_valid_after_utc


def test_a_site_has_a_key_of_the_kind_that_flower_wants_and_private_keys_are_their_owners_alone(files, tmp_path):
    old = os.umask(0)  # 0600 whatever the umask says
    try:
        write_site_key("alpha", tmp_path / "key", tmp_path / "alpha.pub")
    finally:
        os.umask(old)
    for file in (files["ca.key"], files["server.key"], tmp_path / "key"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "key", b"")
    key = load_ssh_private_key((tmp_path / "key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(key.curve, ec.SECP384R1)
    public = (tmp_path / "alpha.pub").read_bytes()
    assert load_ssh_public_key(public) == key.public_key()
    assert public.endswith(b" alpha\n")


def test_a_key_of_another_authority_is_refused(files, tmp_path):
    (tmp_path / "broken.key").write_text("nothing")
    for key, said in ((files["other.key"], "is not the key of"), (tmp_path / "broken.key", "cannot read the CA")):
        with pytest.raises(UserError, match=said):
            read_ca(key, files["ca.crt"])
