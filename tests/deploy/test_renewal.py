"""Certificates: what has run out or will, and a renewal that leaves keys and kits alone."""

import contextlib
import http.client
import os
import shutil
import ssl
import subprocess
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

import pytest
from support import free_ports

from fedsim.common.errors import UserError
from fedsim.deploy import superlink
from fedsim.deploy.certificates import write_server_certificate
from fedsim.deploy.federation import read_federation
from fedsim.deploy.kits import init
from fedsim.deploy.renewal import renew, valid_until, warnings

NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")


def replace_certificate(federation, days):
    kit = federation.kit("server")
    for name in ("server.key", "server.pem"):
        (kit / name).unlink()
    ca = (federation.kit("operator") / "ca.key", kit / "ca.crt")
    write_server_certificate("demo", federation.server_names, days, ca, (kit / "server.key", kit / "server.pem"))


def test_what_runs_out_is_said_in_time(federation):
    """Thirty days before, and afterwards; the CA outlives the certificates."""
    assert warnings(federation) == []
    assert valid_until(federation.ca_certificate) > datetime.now(UTC) + timedelta(days=3600)
    assert (
        "the server's certificate expires in 29 days"
        in warnings(federation, datetime.now(UTC) + timedelta(days=335.5))[0]
    )
    assert "the server's certificate has expired" in warnings(federation, datetime.now(UTC) + timedelta(days=366))[0]


def test_a_renewal_replaces_the_certificate_alone(federation):
    """Every other file of every kit stays as it is, byte for byte; the new certificate is of the same CA."""
    replace_certificate(federation, -0.02)  # half an hour ago
    assert "has expired" in warnings(federation)[0]
    before = {path: path.read_bytes() for path in federation.kits.rglob("*") if path.is_file()}
    renew(federation)
    after = {path: path.read_bytes() for path in federation.kits.rglob("*") if path.is_file()}
    assert {path.name for path in after if before.get(path) != after[path]} == {"server.key", "server.pem"}
    assert warnings(federation) == []
    assert (federation.kit("server") / "server.key").stat().st_mode & 0o777 == 0o600


def test_without_the_cas_key_there_is_no_renewal(federation):
    (federation.kit("operator") / "ca.key").unlink()
    with pytest.raises(UserError, match="no CA key"):
        renew(federation)


def test_a_running_server_takes_the_new_certificate(federation, monkeypatch):
    """New connections see it, without a restart."""
    monkeypatch.setattr(superlink, "LOOK_SECONDS", 0.05)
    kit = federation.kit("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(kit / "server.pem", kit / "server.key")
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    follower = threading.Thread(
        target=superlink.follow, args=(context, kit / "server.pem", kit / "server.key"), daemon=True
    )
    follower.start()
    try:
        first = ssl.get_server_certificate(server.server_address)
        renew(federation)
        until = datetime.now() + timedelta(seconds=10)
        wanted = (kit / "server.pem").read_text().strip()
        shown = first
        while shown.strip() != wanted and datetime.now() < until:
            with contextlib.suppress(ssl.SSLError):  # certificate and key are being exchanged at this very moment
                shown = ssl.get_server_certificate(server.server_address)
        assert first.strip() != wanted == shown.strip()
    finally:
        server.shutdown()


class Answer(BaseHTTPRequestHandler):
    """Stands for the SuperLink behind nginx."""

    def do_POST(self):
        """An empty answer."""
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words):
        """Nothing."""


def ask(federation):
    """HTTP status of a site's request through nginx."""
    context = ssl.create_default_context(cafile=federation.ca_certificate)
    connection = http.client.HTTPSConnection("127.0.0.1", federation.port, context=context, timeout=10)
    connection.request("POST", "/v1/fleet/pull-messages", b"", {"flwr-public-key": "known"})
    return connection.getresponse().status


@pytest.mark.skipif(NGINX is None, reason="no nginx here")
def test_nginx_takes_the_superlinks_new_certificate_after_it_saw_the_expired_one(tmp_path):
    """nginx is told first, and asks once more while the SuperLink still shows the old one: no resumed TLS session may
    keep that verdict for good."""
    public, control = free_ports(2)
    (tmp_path / "federation.toml").write_text(
        f'name = "demo"\naddress = "127.0.0.1"\nport = {public}\ncontrol = "127.0.0.1:{control}"\n'
        '[[sites]]\nname = "alpha"\ndomain = "rot0"\n'
    )
    federation = read_federation(tmp_path / "federation.toml")
    init(federation)
    kit = federation.kit("server")
    for folder in ("run", "state"):
        (kit / folder).mkdir()
    (kit / "state" / "keys.map").write_text('"known" alpha;\n')
    replace_certificate(federation, -0.02)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(kit / "server.pem", kit / "server.key")
    server = ThreadingHTTPServer(("127.0.0.1", control), Answer)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    renew(federation)
    nginx = subprocess.Popen(
        [NGINX, "-p", f"{kit}/", "-e", "run/nginx.log", "-c", kit / "nginx.conf", "-g", "daemon off;"]
    )
    try:
        until = time.monotonic() + 20
        while nginx.poll() is None and time.monotonic() < until:
            with contextlib.suppress(ConnectionRefusedError):
                assert ask(federation) == 502
                break
            time.sleep(0.1)
        assert "certificate has expired" in (kit / "run" / "nginx.log").read_text()
        context.load_cert_chain(kit / "server.pem", kit / "server.key")
        assert [ask(federation) for _ in range(3)] == [200, 200, 200]
    finally:
        nginx.terminate()
        nginx.wait(20)
        server.shutdown()
