"""Certificates as OpenSSL and Flower read them, their renewal, and private keys that nobody else can read."""

import contextlib
import ipaddress
import os
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from demo import files_in
from processes import until
from typer.testing import CliRunner

from fedsim.common.errors import UserError
from fedsim.deploy import superlink
from fedsim.deploy.certificates import read_ca, write_ca, write_private, write_server_certificate, write_site_key
from fedsim.deploy.cli import app
from fedsim.deploy.renewal import renew, valid_until, warnings

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
    days = (leaf.not_valid_after_utc - datetime.now(UTC)).total_seconds() / 86400
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


def pair(federation):
    return [federation.kit("server") / name for name in ("server.key", "server.pem")]


def test_what_runs_out_is_said_thirty_days_before_and_afterwards(federation):
    assert warnings(federation) == []
    assert valid_until(federation.ca_certificate) > datetime.now(UTC) + timedelta(days=3600)
    for days, said in ((335.5, "expires in 29 days"), (366, "has expired")):
        assert f"the server's certificate {said}" in warnings(federation, datetime.now(UTC) + timedelta(days=days))[0]


def test_a_renewal_replaces_the_certificate_alone(federation):
    for file in pair(federation):
        file.unlink()
    ca = (federation.kit("operator") / "ca.key", federation.ca_certificate)
    write_server_certificate("demo", federation.server_names, -0.02, ca, pair(federation))
    assert "has expired" in warnings(federation)[0]
    before = files_in(federation.kits)
    renew(federation)
    after = files_in(federation.kits)
    assert {name for name in after if before.get(name) != after[name]} == {"server/server.key", "server/server.pem"}
    assert warnings(federation) == []
    assert pair(federation)[0].stat().st_mode & 0o777 == 0o600
    ca[0].unlink()
    with pytest.raises(UserError, match="no CA key"):
        renew(federation)


def test_days_out_of_range_and_days_that_the_ca_cuts_are_one_line(federation, monkeypatch):
    for days in (-1, 3651, 99_999_999):
        with pytest.raises(UserError, match=f"--days {days}: a certificate is valid for 1 to 3650 days"):
            renew(federation, days)
    words = ["renew", str(federation.kit("server") / "federation.toml"), "--days", "300"]
    for days, said in ((200, True), (300, False)):
        until = datetime.now(UTC) + timedelta(days=days)
        monkeypatch.setattr("fedsim.deploy.renewal.renew", lambda *words, until=until: until)
        shown = " ".join(CliRunner().invoke(app, words).output.split())
        assert ("because the CA's certificate ends then" in shown) == said


def test_a_running_server_takes_the_new_certificate(federation, monkeypatch):
    monkeypatch.setattr(superlink, "LOOK_SECONDS", 0.02)
    key, certificate = pair(federation)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def shown():
        """The certificate that a client sees, without a network; None while certificate and key are exchanged."""
        client, inside, outside = ssl.create_default_context(), ssl.MemoryBIO(), ssl.MemoryBIO()
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        ends = client.wrap_bio(inside, outside), context.wrap_bio(outside, inside, server_side=True)
        with contextlib.suppress(ssl.SSLError):
            for end in (*ends, ends[0]):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
            return ssl.DER_cert_to_PEM_cert(ends[0].getpeercert(True)).strip()

    threading.Thread(target=superlink.follow, args=(context, certificate, key), daemon=True).start()
    first = shown()
    assert certificate.read_text().strip() == first
    renew(federation)
    assert certificate.read_text().strip() != first
    until(lambda: shown() == certificate.read_text().strip(), 10)
