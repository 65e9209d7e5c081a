"""Certificates: what has run out or will, and a renewal that leaves keys and kits alone."""

import contextlib
import http.client
import ssl
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from demo import NGINX, edit, files_in
from processes import until
from support import free_ports
from typer.testing import CliRunner

from fedsim.common.errors import UserError
from fedsim.deploy import superlink
from fedsim.deploy.certificates import write_server_certificate
from fedsim.deploy.cli import app
from fedsim.deploy.federation import read_federation
from fedsim.deploy.kits import init
from fedsim.deploy.renewal import renew, valid_until, warnings


def pair(federation):
    return [federation.kit("server") / name for name in ("server.key", "server.pem")]


def let_expire(federation):
    """Replace the server's certificate by one that was valid until half an hour ago."""
    for file in pair(federation):
        file.unlink()
    ca = (federation.kit("operator") / "ca.key", federation.ca_certificate)
    write_server_certificate("demo", federation.server_names, -0.02, ca, pair(federation))


def test_what_runs_out_is_said_thirty_days_before_and_afterwards(federation):
    assert warnings(federation) == []
    assert valid_until(federation.ca_certificate) > datetime.now(UTC) + timedelta(days=3600)
    for days, said in ((335.5, "expires in 29 days"), (366, "has expired")):
        assert f"the server's certificate {said}" in warnings(federation, datetime.now(UTC) + timedelta(days=days))[0]


def test_a_renewal_replaces_the_certificate_alone(federation):
    let_expire(federation)
    assert "has expired" in warnings(federation)[0]
    before = files_in(federation.kits)
    renew(federation)
    after = files_in(federation.kits)
    assert {name for name in after if before.get(name) != after[name]} == {"server/server.key", "server/server.pem"}
    assert warnings(federation) == []
    assert pair(federation)[0].stat().st_mode & 0o777 == 0o600
    (federation.kit("operator") / "ca.key").unlink()
    with pytest.raises(UserError, match="no CA key"):
        renew(federation)


@pytest.mark.parametrize("days", [-1, 3651, 3_000_000, 99_999_999])
def test_days_out_of_range_are_one_line(federation, days):
    with pytest.raises(UserError, match=f"--days {days}: a certificate is valid for 1 to 3650 days"):
        renew(federation, days)


@pytest.mark.parametrize(("days", "said"), [(200, True), (300, False)])
def test_days_that_the_ca_cuts_are_said(federation, monkeypatch, days, said):
    monkeypatch.setattr("fedsim.deploy.renewal.renew", lambda *words: datetime.now(UTC) + timedelta(days=days))
    words = ["renew", str(federation.kit("server") / "federation.toml"), "--days", "300"]
    shown = " ".join(CliRunner().invoke(app, words).output.split())
    assert ("because the CA's certificate ends then" in shown) == said


class Answer(BaseHTTPRequestHandler):
    """Stands for the SuperLink: empty answers."""

    def do_POST(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words):
        pass


@contextlib.contextmanager
def serving(federation, port=0):
    """(its TLS context, its address) of a server with the federation's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*reversed(pair(federation)))
    server = ThreadingHTTPServer(("127.0.0.1", port), Answer)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield context, server.server_address
    finally:
        server.shutdown()


def test_a_running_server_takes_the_new_certificate(federation, monkeypatch):
    monkeypatch.setattr(superlink, "LOOK_SECONDS", 0.02)
    key, certificate = pair(federation)

    def shown():
        with contextlib.suppress(ssl.SSLError):  # certificate and key are being exchanged at this very moment
            return ssl.get_server_certificate(address).strip()

    with serving(federation) as (context, address):
        threading.Thread(target=superlink.follow, args=(context, certificate, key), daemon=True).start()
        first = shown()
        renew(federation)
        assert certificate.read_text().strip() != first
        until(lambda: shown() == certificate.read_text().strip(), 10)


def ask(federation):
    """HTTP status of a site's request through nginx; None before it listens."""
    context = ssl.create_default_context(cafile=federation.ca_certificate)
    connection = http.client.HTTPSConnection("127.0.0.1", federation.port, context=context, timeout=10)
    with contextlib.suppress(ConnectionRefusedError):
        connection.request("POST", "/v1/fleet/pull-messages", b"", {"flwr-public-key": "known"})
        return connection.getresponse().status


@pytest.mark.skipif(NGINX is None, reason="no nginx here")
def test_nginx_takes_the_superlinks_new_certificate_after_it_saw_the_expired_one(federation_file):
    """nginx is told first, and asks once more while the SuperLink still shows the old one: no resumed TLS session may
    keep that verdict for good."""
    public, control = free_ports(2)
    edit(federation_file, 'name = "demo"', f'name = "demo"\nport = {public}\ncontrol = "127.0.0.1:{control}"')
    federation = read_federation(federation_file)
    init(federation)
    kit = federation.kit("server")
    for folder in ("run", "state"):
        (kit / folder).mkdir()
    (kit / "state" / "keys.map").write_text('"known" alpha;\n')
    let_expire(federation)
    with serving(federation, control) as (context, _):
        renew(federation)
        words = [NGINX, "-p", f"{kit}/", "-e", "run/nginx.log", "-c", kit / "nginx.conf", "-g", "daemon off;"]
        nginx = subprocess.Popen(words)
        try:
            assert until(lambda: ask(federation), 20) == 502
            assert "certificate has expired" in (kit / "run" / "nginx.log").read_text()
            context.load_cert_chain(*reversed(pair(federation)))
            assert [ask(federation) for _ in range(3)] == [200, 200, 200]
        finally:
            nginx.terminate()
            nginx.wait(20)
