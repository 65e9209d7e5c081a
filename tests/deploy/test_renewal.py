"""Certificates: what has run out or will, and a renewal that leaves keys and kits alone."""

import contextlib
import ssl
import threading
from datetime import UTC, datetime, timedelta

import pytest
from demo import files_in
from processes import until
from typer.testing import CliRunner

from fedsim.common.errors import UserError
from fedsim.deploy import superlink
from fedsim.deploy.certificates import write_server_certificate
from fedsim.deploy.cli import app
from fedsim.deploy.renewal import renew, valid_until, warnings


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
