"""Flower's SuperLink with our gate in front of it: `fedsim deploy superlink KIT OPTIONS`, called by start.sh.

What is touched of Flower and not public is in fedsim/flower/private.py; of uvicorn it is the maker of TLS contexts.
"""

import ssl
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedsim.deploy.audit import AUDIT, Audit
from fedsim.deploy.contacts import CONTACTS, Contacts
from fedsim.deploy.federation import read_federation
from fedsim.deploy.gate import Gate
from fedsim.deploy.registry import Registry
from fedsim.flower.private import private, replace

DATABASE_SECONDS = 60  # how long a write waits for another one; Flower's five seconds end in errors on a busy disk
LOOK_SECONDS = 5.0
ACTIVATE = "flwr.server.superlink.linkstate:SqlLinkState.activate_node"
HEARTBEAT = "flwr.server.superlink.linkstate:SqlLinkState.acknowledge_node_heartbeat"


def serve(kit: Path, words: Sequence[str]) -> None:
    """Run the SuperLink of a server kit until it ends; `words` are the options of `flower-superlink`."""
    import uvicorn.config
    from starlette.middleware import Middleware

    federation = read_federation(kit / "federation.toml")
    gate = Middleware(
        Gate,
        registry=Registry(kit),
        audit=Audit(kit / AUDIT),
        contacts=Contacts(kit / CONTACTS),
        largest_reply=federation.largest_reply_mb << 20,
        trust_proxy=federation.proxy == "nginx",
        kit=kit,
    )
    replace("flwr.superlink.extensions:get_middleware", lambda _: lambda: (gate,))
    waits = ("busy_timeout", str(1000 * DATABASE_SECONDS))
    others = "flwr.supercore.sql_mixin:SQLITE_PRAGMAS"
    replace(others, lambda pairs: (waits, *(pair for pair in pairs if pair[0] != waits[0])))
    hold_nodes()
    make_context = uvicorn.config.create_ssl_context

    def renewing(certfile: str, keyfile: str, **options: Any) -> ssl.SSLContext:
        context = make_context(certfile=certfile, keyfile=keyfile, **options)
        threading.Thread(target=follow, args=(context, Path(certfile), Path(keyfile)), daemon=True).start()
        return context

    uvicorn.config.create_ssl_context = renewing  # type: ignore[assignment]  # it is called with these names
    sys.argv = ["flower-superlink", *words]
    private("flwr.superlink.cli.flower_superlink:flower_superlink")()


def hold_nodes() -> None:
    """Change what Flower's SuperLink does when a SuperNode starts and at its heartbeats."""
    replace(ACTIVATE, giving_up)
    for place in (ACTIVATE, HEARTBEAT):
        replace(place, at_the_usual_interval)


def at_the_usual_interval(note: Callable[..., bool]) -> Callable[..., bool]:
    """Flower's note that a node is online, which then lasts a minute: twice an honest SuperNode's heartbeat interval.

    Flower lets a site ask for up to half an hour, in which no other SuperNode with its key is admitted. What a site
    asks for is not used here, whatever it is: the server decides how long it waits. It is not refused either: a site
    gains nothing by asking for more, and a refused heartbeat would take it out of the run.
    """
    usual = private("flwr.common.constant:HEARTBEAT_DEFAULT_INTERVAL")

    def noted(state: Any, node_id: int, heartbeat_interval: float) -> bool:
        return note(state, node_id, usual)

    return noted


def giving_up(activate: Callable[..., bool]) -> Callable[..., bool]:
    """Flower's admission of a SuperNode, after which no reply is waited for that its dead predecessor owes.

    Flower answers for a node only while it is offline. Where a new SuperNode is admitted between two questions of the
    server's program, nobody sees that, and a run would wait until `run.timeout`.
    """
    from sqlalchemy import select, update

    sent = private("flwr.supercore.state.schema.linkstate_models:MessageIns")
    replies = private("flwr.supercore.state.schema.linkstate_models:MessageRes")

    def activate_node(state: Any, node_id: int, heartbeat_interval: float) -> bool:
        admitted = activate(state, node_id, heartbeat_interval)
        if admitted:
            stored = node_id - 2**64 if node_id >= 2**63 else node_id  # the database has signed numbers
            owed = sent.message_id.not_in(select(replies.reply_to_message_id))
            fetched = update(sent).where(sent.dst_node_id == stored, sent.delivered_at != "", owed)
            with state.session() as session:
                session.execute(fetched.values(ttl=0.0))
        return admitted

    return activate_node


def follow(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Use a renewed certificate for new connections, without a restart (`fedsim deploy renew`)."""
    loaded: tuple[int, ...] = ()  # loaded once at the first look: it may have been renewed before this thread began
    while True:
        time.sleep(LOOK_SECONDS)
        now = tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in (certificate, key))
        if now != loaded:
            try:
                context.load_cert_chain(certificate, key)
                loaded = now
            except (OSError, ssl.SSLError):  # between the two files: looked at again
                continue
