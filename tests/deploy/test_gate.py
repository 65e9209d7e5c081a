"""What a request needs to get past the gate: the right key, clock, signature, size, and its own name on its replies."""

import asyncio
import json
from base64 import b64encode
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key
from flwr.proto.fleet_pb2 import PushMessagesRequest
from support import read_audit

from fedsim.deploy.audit import Audit
from fedsim.deploy.contacts import Contacts, read_contacts
from fedsim.deploy.gate import Gate
from fedsim.deploy.registry import Registry

NODES = {"alpha": 11, "beta": 12}
MOST_REPLY = 3 << 20


@pytest.fixture
def kit(federation):
    """A server kit in which two sites are registered."""
    kit = federation.kit("server")
    (kit / "state" / "nodes").mkdir(parents=True)
    (kit / "run").mkdir()
    for site, node in NODES.items():
        key = (kit / "sites" / f"{site}.pub").read_text()
        (kit / "state" / "nodes" / f"{site}.json").write_text(json.dumps({"node": node, "key": key}))
    return kit


class World:
    """A gate before an app that answers what it is told to, and sites that sign their requests."""

    def __init__(self, federation, kit):
        self.federation, self.kit, self.status, self.bodies = federation, kit, 200, []
        self.gate = Gate(
            self.app,
            registry=Registry(kit),
            audit=Audit(kit / "state" / "audit.jsonl"),
            contacts=Contacts(kit / "run" / "contacts.json"),
            largest_reply=MOST_REPLY,
            trust_proxy=True,
            kit=kit,
        )

    async def app(self, scope, receive, send):
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"fine"})

    def headers(self, site="alpha", ahead=0.0, key=None, **more):
        key = key or load_ssh_private_key((self.federation.kit(site) / "key").read_bytes(), None)
        signed = (datetime.now(UTC) + timedelta(seconds=ahead)).isoformat()
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        signature = key.sign(signed.encode(), ec.ECDSA(hashes.SHA256()))
        own = {
            "flwr-public-key": b64encode(public).decode(),
            "flwr-timestamp": signed,
            "flwr-signature": b64encode(signature).decode(),
            "x-real-ip": "10.0.0.1",
        }
        return {**own, **more}

    def ask(self, path="pull-messages", headers=None, body=b"", length=None):
        """Status and answer of one request; it fails when the gate reads a body that it has no business with."""
        headers = dict(headers or self.headers())
        headers.setdefault("content-length", str(len(body) if length is None else length))
        chunks, said = [body[:1000], body[1000:]], []

        async def receive():
            assert chunks, "more was read than there is"
            chunk = chunks.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}

        async def send(message):
            said.append(message)

        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "path": f"/v1/fleet/{path}", "headers": raw, "client": ("127.0.0.1", 1)}
        asyncio.run(self.gate(scope, receive, send))
        self.unread = len(chunks)
        return said[0]["status"], said[-1]["body"]

    def audit(self, event="refused"):
        lines = read_audit(self.kit / "state" / "audit.jsonl")
        return [line for line in lines if line["event"] == event]


@pytest.fixture
def world(federation, kit):
    return World(federation, kit)


def test_a_registered_site_gets_through(world):
    """The body arrives unchanged; the contact is noted with its clock."""
    assert world.ask(headers=world.headers(ahead=2.0), body=b"x" * 3000) == (200, b"fine")
    assert world.bodies == [b"x" * 3000]
    contact = read_contacts(world.kit / "run" / "contacts.json")["alpha"]
    assert contact.address == "10.0.0.1"
    assert contact.offset == pytest.approx(2.0, abs=0.5)


def test_a_strangers_body_is_never_read(world):
    """An unknown key ends in 401 (400 for a SuperNode that starts, which can print why)."""
    key = ec.generate_private_key(ec.SECP384R1())
    assert world.ask(headers=world.headers(key=key), length=6_000_000)[0] == 401
    assert world.unread == 2
    status, said = world.ask("activate-node", headers=world.headers(key=key))
    assert status == 400
    assert json.loads(said) == {"code": 2004, "detail": "this key is not registered"}
    assert world.ask(headers={"content-length": "0", "x-real-ip": "10.0.0.1"})[0] == 401
    assert not world.bodies
    assert len(world.audit()) == 1  # the same refusal is written once a minute


def test_a_signature_of_another_key_is_refused(world):
    """The header of alpha with the signature of beta."""
    headers = world.headers() | {"flwr-signature": world.headers("beta")["flwr-signature"]}
    assert world.ask(headers=headers)[0] == 401
    assert "signature is wrong" in world.audit()[0]["reason"]
    assert world.audit()[0]["site"] == "alpha"


def test_a_request_cannot_be_used_twice(world):
    """The second one is told to try again, which a site does with a new signature and a replayer cannot."""
    headers = world.headers()
    assert world.ask(headers=headers)[0] == 200
    assert world.ask(headers=headers)[0] == 503
    assert len(world.bodies) == 1


@pytest.mark.parametrize(("ahead", "status"), [(4.0, 200), (6.0, 401), (-300.0, 200), (-310.0, 401)])
def test_clocks_within_flowers_limits(world, ahead, status):
    """5 s ahead, 305 s behind."""
    assert world.ask(headers=world.headers(ahead=ahead))[0] == status


def test_a_wrong_clock_is_told_to_the_site(world):
    """With the number and what to do, in an answer that a starting SuperNode prints."""
    status, said = world.ask("activate-node", headers=world.headers(ahead=12.0))
    assert status == 400
    said = json.loads(said)
    assert said["code"] == 2990
    assert said["detail"].startswith("the clock of this machine is 12 s ahead of the server's")
    contact = read_contacts(world.kit / "run" / "contacts.json")["alpha"]
    assert "12 s ahead" in contact.refused


def test_sizes_are_bounded_before_a_body_is_read(world):
    """By kind of request, and over all parts of one reply."""
    assert world.ask(length=70_000)[0] == 413
    assert world.ask("push-object", length=7 << 20)[0] == 413
    assert world.unread == 2
    for expected in (200, 413):  # two parts of 2 MiB are more than the 3 MiB of a reply
        assert world.ask("push-object", body=b"", length=2 << 20)[0] == expected
    assert world.ask("push-object", headers=world.headers("beta"), body=b"", length=2 << 20)[0] == 200
    assert world.ask(headers=world.headers() | {"content-length": ""})[0] == 411
    assert any("larger than" in line["reason"] for line in world.audit())


def push(node, source):
    """A reply's head."""
    request = PushMessagesRequest()
    request.node.node_id = node
    request.messages_list.add().metadata.src_node_id = source
    return request.SerializeToString()


def test_a_reply_names_its_own_node(world):
    """Flower 1.41 takes a reply in the name of another node; the gate does not."""
    assert world.ask("push-messages", body=push(11, 11))[0] == 200
    assert world.bodies == [push(11, 11)]
    assert world.ask("push-messages", body=push(11, 12))[0] == 400
    assert world.ask("push-messages", body=push(12, 12))[0] == 400
    assert world.ask("push-messages", body=b"\xff\xff")[0] == 400
    assert "in the name of beta" in world.audit()[0]["reason"]
    assert len(world.bodies) == 1


def test_a_new_reply_starts_its_own_count(world):
    """The bound is on one reply, not on a run."""
    for _ in range(3):
        assert world.ask("push-messages", body=push(11, 11))[0] == 200
        assert world.ask("push-object", body=b"", length=2 << 20)[0] == 200


def test_a_reply_is_held_to_what_its_run_expects(world, monkeypatch):
    """The run's server app says it in a file; another run's replies are bounded by the federation alone."""
    monkeypatch.setattr("fedsim.deploy.expected.SLACK", 0)
    from fedsim.deploy.server_app import BoundedGrid

    grid = BoundedGrid(object(), world.kit, 5)
    grid.largest_reply = 1 << 20
    for run, expected in ((6, 200), (5, 413)):
        request = PushMessagesRequest.FromString(push(11, 11))
        request.messages_list[0].metadata.run_id = run
        assert world.ask("push-messages", body=request.SerializeToString())[0] == 200
        assert world.ask("push-object", body=b"", length=2 << 20)[0] == expected
    assert "larger than 1048576 bytes (what its run expects)" in world.audit()[-1]["reason"]
    grid.close()
    assert not list((world.kit / "run" / "expected").iterdir())


def test_an_error_of_the_superlink_is_tried_again(world):
    """500 ends a SuperNode's polling for good, 503 does not."""
    world.status = 500
    assert world.ask()[0] == 503
    world.status = 404
    assert world.ask()[0] == 404


def test_admissions_are_audited(world):
    """Who came and left; a second SuperNode with the key of one that is online is said."""
    assert world.ask("activate-node")[0] == 200
    assert world.audit("admitted")[0]["domain"] == "rot0"
    world.status = 409
    assert world.ask("activate-node", headers=world.headers(**{"x-real-ip": "10.0.0.9"}))[0] == 409
    assert "another SuperNode with its key" in read_contacts(world.kit / "run" / "contacts.json")["alpha"].double
    world.status = 200
    assert world.ask("deactivate-node")[0] == 200
    assert world.audit("left")


def test_two_nodes_that_poll_with_one_key_are_said(world):
    """Two addresses by turns; a site that moves once is not meant."""
    for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"):
        world.ask(headers=world.headers(**{"x-real-ip": address}))
    assert not world.audit("double")
    for address in ("10.0.0.1", "10.0.0.2"):
        world.ask(headers=world.headers(**{"x-real-ip": address}))
    (line,) = world.audit("double")
    assert line["site"] == "alpha"
    assert "several addresses" in line["reason"]


def test_a_key_that_was_shut_out_is_a_stranger(world, monkeypatch):
    """The registry follows the kit's files."""
    assert world.ask()[0] == 200
    (world.kit / "state" / "nodes" / "alpha.json").unlink()
    monkeypatch.setattr("fedsim.deploy.registry.LOOK_SECONDS", 0.0)
    assert world.ask()[0] == 401


def test_other_paths_are_not_the_gates_business(world):
    """The operator's and the server app's calls pass."""
    said = []

    async def send(message):
        said.append(message)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    asyncio.run(world.gate({"type": "http", "path": "/v1/control/list-runs", "headers": []}, receive, send))
    assert said[0]["status"] == 200
