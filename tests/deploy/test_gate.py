"""What a request needs to get past the gate: key, clock, signature, size, its own name; what a dead SuperNode owes."""

import asyncio
import contextlib
import json
import math
import os
import time
from base64 import b64encode
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key
from demo import register
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.server.superlink.linkstate import SqlLinkState
from flwr.supercore.error import FlowerError
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes, Node
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.servicer.fleet import fleet_handlers
from sqlalchemy import select, update
from support import read_audit

from fedsim.deploy.audit import AUDIT, Audit
from fedsim.deploy.contacts import CONTACTS, Contacts, read_contacts
from fedsim.deploy.gate import Gate
from fedsim.deploy.registry import Registry
from fedsim.deploy.server_app import BoundedGrid
from fedsim.deploy.superlink import giving_up, hold_nodes

MOST_REPLY, TWO_MIB = 3 << 20, 2 << 20


class World:
    """A gate before an app that answers what it is told to, and sites that sign their requests."""

    def __init__(self, federation):
        self.federation, self.kit = federation, register(federation, alpha=11, beta=12)
        self.status, self.bodies = 200, []
        audit, contacts = Audit(self.kit / AUDIT), Contacts(self.kit / CONTACTS)
        own = {"registry": Registry(self.kit), "audit": audit, "contacts": contacts, "kit": self.kit}
        self.gate = Gate(self.app, **own, largest_reply=MOST_REPLY, trust_proxy=True)

    async def app(self, scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body")
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"fine"})

    def headers(self, site="alpha", ahead=0.0, key=None, **more):
        key = key or load_ssh_private_key((self.federation.kit(site) / "key").read_bytes(), None)
        signed = (datetime.now(UTC) + timedelta(seconds=ahead)).isoformat()
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        signature = key.sign(signed.encode(), ec.ECDSA(hashes.SHA256()))
        own = {"flwr-public-key": b64encode(public).decode(), "flwr-timestamp": signed, "x-real-ip": "10.0.0.1"}
        return {**own, "flwr-signature": b64encode(signature).decode(), **more}

    def ask(self, path="pull-messages", headers=None, body=b"", length=None):
        """Status and answer of one request; it fails when the gate reads a body that it has no business with."""
        headers = {"content-length": str(len(body) if length is None else length), **(headers or self.headers())}
        chunks, said = [body[:1000], body[1000:]], []

        async def receive():
            assert chunks, "more was read than there is"
            chunk = chunks.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}

        async def send(message):
            said.append(message)

        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        path = path if path.startswith("/") else f"/v1/fleet/{path}"
        scope = {"type": "http", "path": path, "headers": raw, "client": ("127.0.0.1", 1)}
        asyncio.run(self.gate(scope, receive, send))
        self.unread = len(chunks)
        return said[0]["status"], said[-1]["body"]

    def status_of(self, *words, **named):
        return self.ask(*words, **named)[0]

    def push(self, node=11, source=11, run=0):
        """The status of a reply's head."""
        request = PushMessagesRequest()
        request.node.node_id = node
        metadata = request.messages_list.add().metadata
        metadata.src_node_id, metadata.run_id = source, run
        return self.status_of("push-messages", body=request.SerializeToString())

    def part(self, site="alpha", length=TWO_MIB):
        """The status of a part of a reply."""
        return self.status_of("push-object", self.headers(site), length=length)

    def audit(self, event="refused"):
        return [line for line in read_audit(self.kit / AUDIT) if line["event"] == event]

    def contact(self):
        return read_contacts(self.kit / CONTACTS)["alpha"]


@pytest.fixture
def world(federation):
    return World(federation)


def test_a_registered_site_gets_through(world):
    assert world.ask(headers=world.headers(ahead=2.0), body=b"x" * 3000) == (200, b"fine")
    assert world.bodies == [b"x" * 3000]
    assert world.contact().address == "10.0.0.1"
    assert world.contact().offset == pytest.approx(2.0, abs=0.5)
    assert world.status_of("/v1/control/list-runs", {"x": "y"}) == 200  # the operator's calls are not its business
    for world.status, passed_on in ((500, 503), (404, 404)):  # 500 ends a SuperNode's polling for good, 503 does not
        assert world.status_of() == passed_on


def test_a_strangers_body_is_never_read(world):
    key = ec.generate_private_key(ec.SECP384R1())
    assert world.status_of(headers=world.headers(key=key), length=6_000_000) == 401
    assert world.unread == 2
    status, said = world.ask("activate-node", headers=world.headers(key=key))
    assert status == 400  # a SuperNode that starts can print why
    assert json.loads(said) == {"code": 2004, "detail": "this key is not registered"}
    assert world.status_of(headers={"x-real-ip": "10.0.0.1"}) == 401
    assert not world.bodies
    assert len(world.audit()) == 1  # the same refusal is written once a minute


def test_a_signature_is_of_the_own_key_and_used_once(world):
    """A second request is told to try again, which a site does with a new signature and a replayer cannot."""
    headers, other = world.headers(), world.headers("beta")["flwr-signature"]
    assert world.status_of(headers=headers | {"flwr-signature": other}) == 401
    refused = world.audit()[0]
    assert (refused["site"], "signature is wrong" in refused["reason"]) == ("alpha", True)
    assert [world.status_of(headers=headers) for _ in range(2)] == [200, 503]
    assert len(world.bodies) == 1


def test_clocks_within_flowers_limits_and_a_wrong_one_is_told_to_the_site_that_starts(world):
    for ahead, status in ((4.0, 200), (6.0, 401), (-300.0, 200), (-310.0, 401)):
        assert world.status_of(headers=world.headers(ahead=ahead)) == status
    status, said = world.ask("activate-node", headers=world.headers(ahead=12.0))
    assert (status, json.loads(said)["code"]) == (400, 2990)
    assert json.loads(said)["detail"].startswith("the clock of this machine is 12 s ahead of the server's")
    assert "12 s ahead" in world.contact().refused


def test_sizes_are_bounded_before_a_body_is_read(world):
    assert world.status_of(length=70_000) == 413
    assert world.part(length=7 << 20) == 413
    assert world.unread == 2
    assert [world.part(), world.part(), world.part("beta")] == [200, 413, 200]  # 3 MiB are all parts of one reply
    assert world.status_of(headers=world.headers() | {"content-length": ""}) == 411
    assert any("larger than" in line["reason"] for line in world.audit())


def test_a_reply_names_its_own_node_and_starts_its_own_count(world):
    """Flower 1.41 takes a reply in the name of another node; the gate does not."""
    assert [world.push(11, 11), world.push(11, 12), world.push(12, 12)] == [200, 400, 400]
    assert world.status_of("push-messages", body=b"\xff\xff") == 400
    assert "in the name of beta" in world.audit()[0]["reason"]
    assert len(world.bodies) == 1
    assert [(world.push(), world.part()) for _ in range(3)] == [(200, 200)] * 3


def test_a_reply_is_held_to_what_its_run_expects(world, monkeypatch):
    """The run's server app says it in a file; another run's replies are bounded by the federation alone."""
    monkeypatch.setattr("fedsim.deploy.expected.SLACK", 0)
    grid = BoundedGrid(object(), world.kit, 5)
    grid.expect(1 << 20)
    assert [(world.push(run=run), world.part()) for run in (6, 5)] == [(200, 200), (200, 413)]
    assert "larger than 1048576 bytes (what its run expects)" in world.audit()[-1]["reason"]
    grid.close()
    assert not list((world.kit / "run" / "expected").iterdir())


def test_admissions_are_audited_and_a_second_supernode_with_a_key_is_said(world):
    assert world.status_of("activate-node") == 200
    assert world.audit("admitted")[0]["domain"] == "rot0"
    world.status = 409
    assert world.status_of("activate-node", headers=world.headers(**{"x-real-ip": "10.0.0.9"})) == 409
    assert "another SuperNode with its key" in world.contact().double
    world.status = 200
    assert world.status_of("deactivate-node") == 200
    assert world.audit("left")


def test_the_registry_follows_the_kit_and_a_broken_federation_file_keeps_the_sites_that_were_known(world, caplog):
    """While the operator edits it, the gate answers; then the new file counts."""
    file = world.kit / "federation.toml"
    good = file.read_text()
    node = world.kit / "state" / "nodes" / "alpha.json"
    record = node.read_text()
    for change, status in (
        (lambda: None, 200),
        (lambda: file.write_text(f"{good}\n[[sites]\n"), 200),
        (lambda: file.unlink(), 200),
        (lambda: file.write_text(good.replace('"alpha"', '"omega"')), 401),
        (lambda: file.write_text(good), 200),
        (lambda: node.unlink(), 401),
    ):
        change()
        os.utime(world.kit, (time.time(), time.time()))
        world.gate.registry._looked -= 2  # seconds
        assert world.status_of() == status
    node.write_text(record)
    assert world.status_of() == 200  # a key that was not known is looked for at once
    assert "not valid TOML" in caplog.text


def test_two_nodes_that_poll_with_one_key_by_turns_are_said(world):
    for address, said in zip("112212", (0, 0, 0, 0, 0, 1)):  # a site that moves once is not meant
        world.ask(headers=world.headers(**{"x-real-ip": f"10.0.0.{address}"}))
        assert len(world.audit("double")) == said
    (line,) = world.audit("double")
    assert (line["site"], "several addresses" in line["reason"]) == ("alpha", True)


def registered(folder):
    """The SuperLink's database with one node, whose key is b"key"."""
    state = SqlLinkState(str(folder / "link.db"), NoOpFederationManager(), InMemoryObjectStore())
    state.initialize()
    state.create_node("aid", "name", b"key", 30.0)
    return state


@pytest.mark.parametrize("seconds", [10.0, 30.0, 31.0, 1800.0, 1e300, math.inf, math.nan, -1800.0, 0.0])
def test_a_node_counts_as_online_for_a_minute_whatever_heartbeat_it_asks_for(seconds, tmp_path, monkeypatch):
    """When it starts and at every heartbeat; what Flower refuses by itself changes nothing."""
    for name in ("activate_node", "acknowledge_node_heartbeat"):
        monkeypatch.setattr(SqlLinkState, name, getattr(SqlLinkState, name))  # put back after the test
    hold_nodes()
    state = registered(tmp_path)
    node = state.get_node_id_by_public_key(b"key")
    beat = SendNodeHeartbeatRequest(heartbeat_interval=seconds)
    beat.node.node_id = node

    def left():
        (found,) = state.get_node_info(node_ids=[node])
        return found.online_until - time.time() if found.status == "online" else 0.0

    start = ActivateNodeRequest(public_key=b"key", heartbeat_interval=seconds)
    for flowers, own in (
        (lambda: fleet_handlers.activate_node(start, state), lambda: state.activate_node(node, seconds)),
        (
            lambda: fleet_handlers.send_node_heartbeat(beat, state),
            lambda: state.acknowledge_node_heartbeat(node, seconds),
        ),
    ):
        with contextlib.suppress(FlowerError):
            flowers()
        assert left() <= 60
        own()  # also where no check of Flower stands before it
        assert 55 < left() <= 60


@pytest.mark.parametrize(("number", "stored"), [(7, 7), (2**64 - 7, -7)])
def test_a_new_supernode_owes_nothing_of_what_its_predecessor_fetched(number, stored, tmp_path):
    state = registered(tmp_path)
    sent = {"owed": (stored, "then"), "answered": (stored, "then"), "waits": (stored, ""), "other": (5, "then")}
    with state.session() as session:
        session.execute(update(Node).values(node_id=stored))
        for name, (node, fetched) in sent.items():
            session.add(MessageIns(message_id=name, dst_node_id=node, delivered_at=fetched, ttl=9.0, created_at=0.0))
        session.add(MessageRes(message_id="reply", reply_to_message_id="answered", delivered_at=""))
    for admitted, seconds in ((True, 0.0), (False, 9.0)):  # while it is online, another one with its key is turned away
        assert giving_up(SqlLinkState.activate_node)(state, number, 30.0) == admitted
        with state.session() as session:
            lasting = dict(session.execute(select(MessageIns.message_id, MessageIns.ttl)).all())
            session.execute(update(MessageIns).values(ttl=9.0))
        assert lasting == dict.fromkeys(sent, 9.0) | {"owed": seconds}
