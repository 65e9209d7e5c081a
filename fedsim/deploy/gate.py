"""Checks every request of a site before Flower's SuperLink reads it: key, clock, replay, size and sender of a reply.

The gate is an ASGI middleware around the SuperLink's own HTTP API (fedsim/deploy/superlink.py puts it there). It looks
at the headers first, so that nothing of a request without a registered key is ever read:

1. the public key is a registered site's (else 401, or 400 when a SuperNode starts and can still say why);
2. its signature over the time is right, the time is within Flower's own limits, and it was not used before;
3. the body is not larger than a request of that kind can be, and a reply not larger than its run expects
   (fedsim/deploy/expected.py) or `largest_reply`;
4. a reply names the node of the key as its source (Flower 1.41 does not compare them).

An unexpected error of the SuperLink (500) goes out as 503: a SuperNode tries that again, and gives up for good at 500.
"""

import json
import time
from base64 import b64decode
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from google.protobuf.message import DecodeError

from fedsim.deploy.audit import Audit
from fedsim.deploy.contacts import Contacts
from fedsim.deploy.expected import allowed
from fedsim.deploy.registry import Member, Registry
from fedsim.flower.private import private

AHEAD_SECONDS, BEHIND_SECONDS = 5.0, 305.0  # Flower's own limits of a site's clock
FLEET, ACTIVATE, PUSH, OBJECT = "/v1/fleet/", "activate-node", "push-messages", "push-object"
MOST_BYTES = {OBJECT: 6 << 20, PUSH: 8 << 20}  # Flower sends tensors in parts of 5 MiB, and a reply's table of contents
SMALL_BYTES = 64 << 10  # every other request
MOST_USED = 50_000  # signatures; above it the old ones are forgotten
NOT_ADMITTED, CLOCK = 2004, 2990  # codes in the answer, which a SuperNode prints: Flower's own, and ours
ALGORITHM = ec.ECDSA(hashes.SHA256())

Scope = MutableMapping[str, Any]


class RefusedError(Exception):
    """Why a request is refused: HTTP status, code and text for the site."""

    def __init__(self, status: int, reason: str, code: int = NOT_ADMITTED, member: Member | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.code = code
        self.member = member


class Gate:
    """The middleware. `largest_reply` is in bytes; with `trust_proxy` the site's address is in X-Real-IP.

    `kit` is the server's: runs say there how large their replies may be.
    """

    def __init__(
        self,
        app: Callable,
        registry: Registry,
        audit: Audit,
        contacts: Contacts,
        largest_reply: int,
        trust_proxy: bool,
        kit: Path,
    ) -> None:
        self.app = app
        self.registry = registry
        self.audit = audit
        self.contacts = contacts
        self.largest_reply = largest_reply
        self.trust_proxy = trust_proxy
        self.kit = kit
        self._used: dict[tuple[str, str], float] = {}  # by (site, signed time): the time until which it is remembered
        self._replies: dict[str, int] = {}  # bytes of the reply that a site is sending
        self._allowed: dict[str, int] = {}  # how many these may be

    async def __call__(self, scope: Scope, receive: Callable, send: Callable) -> None:
        """Refuses a request, or lets it through."""
        if scope["type"] != "http" or not scope["path"].startswith(FLEET):
            await self.app(scope, receive, send)
            return
        headers = headers_of(scope)
        kind = scope["path"].removeprefix(FLEET)
        address = self._address(scope, headers)
        try:
            member, offset = self._admit(kind, headers)
            self._check_length(kind, member, headers)
            if kind == PUSH:
                receive = await self._own_replies(member, receive)
        except RefusedError as refusal:
            await self._refuse(send, refusal, address)
            return
        version = headers.get("flwr-package-version", "")
        double = self.contacts.seen(member.site, address, kind, offset, version)
        if double:
            self.audit.write("double", site=member.site, address=address, reason=double)
        await self._pass_on(kind, member, address, scope, receive, send)

    def _address(self, scope: Scope, headers: dict[str, str]) -> str:
        direct = (scope.get("client") or ("", 0))[0]
        return headers.get("x-real-ip", direct) if self.trust_proxy else direct

    def _admit(self, kind: str, headers: dict[str, str]) -> tuple[Member, float]:
        """Returns the site whose key signed the request, and how far its clock is ahead in seconds.

        Raises RefusedError for a key or a signature that is wrong, and for a clock that is.
        """
        status = 400 if kind == ACTIVATE else 401
        member = self.registry.of_key(headers.get("flwr-public-key", ""))
        if member is None:
            raise RefusedError(status, "this key is not registered")
        signed = headers.get("flwr-timestamp", "")
        signature = headers.get("flwr-signature", "")
        try:
            key = load_pem_public_key(member.key)
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise TypeError("a key of another kind")
            key.verify(b64decode(signature, validate=True), signed.encode(), ALGORITHM)
            at = datetime.fromisoformat(signed)
            if not at.tzinfo:
                at = at.replace(tzinfo=UTC)
            offset = (at - datetime.now(UTC)).total_seconds()
        except (InvalidSignature, ValueError, TypeError):
            raise RefusedError(status, "its signature is wrong", member=member) from None
        if not -BEHIND_SECONDS < offset < AHEAD_SECONDS:
            where = "ahead of" if offset > 0 else "behind"
            reason = f"the clock of this machine is {abs(offset):.0f} s {where} the server's"
            limit = f"{AHEAD_SECONDS:g} s ahead and {BEHIND_SECONDS:g} s behind are allowed"
            raise RefusedError(status, f"{reason}: {limit}; set the clock (NTP)", CLOCK, member)
        self._use_once(member, signed)
        return member, offset

    def _use_once(self, member: Member, signed: str) -> None:
        """Remembers a signature as long as its time is within the limits; raises RefusedError for a remembered one."""
        now = time.monotonic()
        key = (member.site, signed)
        oldest = next(iter(self._used.values()), now)
        if len(self._used) > MOST_USED or oldest < now:
            self._used = {used: until for used, until in self._used.items() if until >= now}
        if key in self._used:
            raise RefusedError(503, "this signature was used before", member=member)
        self._used[key] = now + AHEAD_SECONDS + BEHIND_SECONDS

    def _check_length(self, kind: str, member: Member, headers: dict[str, str]) -> None:
        """Refuses a request that declares too large a length or none."""
        length = headers.get("content-length", "")
        if not length.isdecimal():
            raise RefusedError(411, "the request does not say how long it is", member=member)
        size = int(length)
        if size > MOST_BYTES.get(kind, SMALL_BYTES):
            raise RefusedError(413, f"a {kind} request of {size} bytes is too large", member=member)
        if kind == OBJECT:
            sent = self._replies.get(member.site, 0) + size
            most = self._allowed.get(member.site, self.largest_reply)
            if sent > most:
                limit = "largest_reply_mb" if most == self.largest_reply else "what its run expects"
                raise RefusedError(413, f"its reply is larger than {most} bytes ({limit})", member=member)
            self._replies[member.site] = sent
        self.contacts.moved(member.site, up=size)

    async def _own_replies(self, member: Member, receive: Callable) -> Callable:
        """Reads the start of a reply and checks that its source is the node of the key.

        Returns a `receive` that gives the same bytes again. Raises RefusedError for a reply of another node.
        """
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return replaying(message, receive)
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > MOST_BYTES[PUSH]:
                raise RefusedError(413, "its reply's head is too large", member=member)
        try:
            request = private("flwr.proto.fleet_pb2:PushMessagesRequest").FromString(bytes(body))
        except DecodeError:
            raise RefusedError(400, "its reply cannot be read", member=member) from None
        replies = [message.metadata for message in request.messages_list]
        nodes = {request.node.node_id} | {reply.src_node_id for reply in replies}
        if nodes != {member.node}:
            others = [self.registry.of_node(node) for node in nodes - {member.node}]
            names = ", ".join(other.site if other else "nobody" for other in others)
            raise RefusedError(400, f"it sends a reply in the name of {names}", member=member)
        self._replies[member.site] = 0
        runs = [reply.run_id for reply in replies] or [0]
        self._allowed[member.site] = min(allowed(self.kit, run, self.largest_reply) for run in runs)
        return replaying({"type": "http.request", "body": bytes(body), "more_body": False}, receive)

    async def _pass_on(
        self,
        kind: str,
        member: Member,
        address: str,
        scope: Scope,
        receive: Callable,
        send: Callable,
    ) -> None:
        """Gives a request to the SuperLink and notes its answer, in which an unexpected error becomes 503."""
        failed = False

        async def answer(message: Scope) -> None:
            nonlocal failed
            if message["type"] == "http.response.start":
                if message["status"] == 500:
                    failed = True
                    message = {**message, "status": 503}
                self._note(kind, member, address, message["status"])
            elif message["type"] == "http.response.body":
                self.contacts.moved(member.site, down=len(message.get("body", b"")))
            await send(message)

        await self.app(scope, receive, answer)
        if failed:
            self.audit.refuse(member.site, address, f"the SuperLink failed in {kind}; the site tries again")

    def _note(self, kind: str, member: Member, address: str, status: int) -> None:
        if kind == ACTIVATE and status == 200:
            self.contacts.activated(member.site, address)
            self.audit.write("admitted", site=member.site, domain=member.domain, role=member.role, address=address)
        elif kind == ACTIVATE:
            self.contacts.second(member.site, address)
            self.audit.refuse(member.site, address, "a SuperNode with this key is online already")
        elif kind == "deactivate-node" and status == 200:
            self.audit.write("left", site=member.site, address=address)

    async def _refuse(self, send: Callable, refusal: RefusedError, address: str) -> None:
        site = refusal.member.site if refusal.member else ""
        self.audit.refuse(site, address, refusal.reason)
        if site:
            self.contacts.refused(site, refusal.reason)
        body = json.dumps({"code": refusal.code, "detail": refusal.reason}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),  # the rest of the body is not read
        ]
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def headers_of(scope: Scope) -> dict[str, str]:
    """Returns the headers of a request, by their names in small letters."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers[name.decode("latin-1").lower()] = value.decode("latin-1")
    return headers


def replaying(message: Scope, receive: Callable) -> Callable:
    """Returns a `receive` that gives this message first."""
    waiting = [message]

    async def again() -> Scope:
        return waiting.pop() if waiting else await receive()

    return again
