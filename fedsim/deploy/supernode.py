"""Flower's SuperNode as a site runs it: `fedsim deploy supernode KIT OPTIONS`, called by supervise.sh.

Beside Flower's own work it

- notes every successful contact with the server in `run/contact` (when, and whether it polls or works): the supervisor
  and start.sh look there, and not at log lines;
- ends the process when the polling has ended (Flower 1.41's process stays, and the site is offline while it lives);
- tries again where a link is cut in a TLS handshake (Flower gives the site's reply up);
- sends a heartbeat soon after a cut, before the site counts as gone;
- asks for work more often soon after a message than when nothing happens;
- ends the task of a message whose run ended while it was fetched or confirmed. Flower 1.41 leaves the task as it is:
  the client process, which does one task after the other, waits for parts that never come. Or it answers a message that
  the SuperNode has forgotten, and all later answers are sent one message too late;
- refuses app bundles that this site has not allowed (fedsim/deploy/bundles.py), when the kit pins them.

What is touched of Flower and not public is in fedsim/flower/private.py.
"""

import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedsim.common import polling
from fedsim.common.errors import UserError
from fedsim.deploy.bundles import Pins
from fedsim.deploy.warm_client import look_often, write_program
from fedsim.flower.private import private, replace

IDLE_SECONDS, REPLY_SECONDS = 3.0, 0.5  # Flower's waits between two questions for work, and for the client's reply
HEARTBEAT_SECONDS = 2  # the longest wait after a failed heartbeat; Flower's 20 s can make a minute of a cut of 30 s
ENDED = 75  # exit code: the polling ended
NODE_CONFIG = "--node-config"
PAIR = re.compile(r"\S+?=('[^']*'|\"[^\"]*\"|\S+)")  # as Flower finds them

CONNECTION, COMMAND = "flwr.supernode.fleet_http_connection:", "flwr.supernode.cli.flower_supernode:"
START, CONFIRM = "flwr.supernode.start_client_internal:", "make_confirm_message_received_fn_protobuf"

logger = logging.getLogger("fedsim")


class ContactFile:
    """The file with the last contact: its modification time, and one word about what the SuperNode does."""

    def __init__(self, file: Path) -> None:
        self.file, self.worked = file, 0.0

    def note(self, state: str = "") -> None:
        """Notes that the server has answered. A full disk may not end the polling: the times are set all the same."""
        if state or not self.file.is_file():
            with contextlib.suppress(OSError):
                self.file.write_text(f"{state or 'polling'}\n")
        with contextlib.suppress(OSError):
            os.utime(self.file)


def serve(kit: Path, words: Sequence[str]) -> int:
    """Runs the SuperNode of a site's kit until its polling ends; returns the process' exit code.

    words: the options of `flower-supernode`
    """
    check_node_config(words)
    look_often()
    client = os.environ.get("FEDSIM_CLIENT")  # the folder of a client process that has a user of its own
    if client:
        write_program(kit, Path(client))
    contact = ContactFile(kit / "run" / "contact")
    contact.file.unlink(missing_ok=True)
    replace(f"{CONNECTION}FleetHttpClient", lambda client: watched(client, contact))
    keep_trying(contact)
    sleep = pause(contact)
    replace(f"{START}time", lambda clock: SimpleNamespace(**{**vars(clock), "sleep": sleep}))
    replace(f"{START}pull_objects", failing_with_the_run)
    replace(f"{CONNECTION}{CONFIRM}", confirming)
    pins = Pins.read(kit)
    if pins is not None:
        enforce(pins)
    sys.argv = ["flower-supernode", *words]
    private(f"{COMMAND}flower_supernode")()
    print("the SuperNode's polling ended", flush=True)
    return ENDED


def check_node_config(words: Sequence[str]) -> None:
    """Raises UserError where Flower would leave out a part of the node config, or a setting of the site's is wrong."""
    from click import ClickException

    from fedsim.deploy.site_statistics import FEWEST, least_of
    from fedsim.runs.local_privacy import own_privacy

    text = ""
    if NODE_CONFIG in words[:-1]:
        text = words[words.index(NODE_CONFIG) + 1]
    rest = " ".join(PAIR.sub("", text).split())
    if rest:
        raise UserError(
            f"{rest!r} in this site's settings is not key=value; NODE_CONFIG in site.env has no spaces next to '=', "
            "and no folder in it has an apostrophe"
        )
    try:
        parsed = private("flwr.common.config:parse_config_args")([text])
    except ClickException:
        raise UserError(
            f"Flower cannot read this site's settings: {text}; NODE_CONFIG in site.env is key=value, each key once, "
            "numbers with a point (0.5), texts in apostrophes"
        ) from None
    own_privacy(parsed)
    least_of(parsed, FEWEST)


def enforce(pins: Pins) -> None:
    """Makes Flower ask the pins about every app bundle; it asks only where trusted entities are named."""
    trusted = {"trusted_entities": {"the kit": "pins"}}
    replace(f"{START}_verify_fab", lambda _: pins.allows)
    replace(f"{COMMAND}start_client_internal", lambda start: lambda **named: start(**{**named, **trusted}))


def confirming(make: Callable[..., Any]) -> Callable[..., Any]:
    """Flower's maker of the function that confirms messages, where the end of the run is a failure, too."""
    return lambda *words: failing_with_the_run(make(*words))


def failing_with_the_run(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of Flower for which the end of the run is a failure like any other, which ends the task."""
    ended = private("flwr.supercore.run:RunNotRunningException")

    def call(*words: Any, **named: Any) -> Any:
        try:
            return function(*words, **named)
        except ended:
            raise RuntimeError("the run has ended") from None

    return call


def watched(client: type, contact: ContactFile) -> type:
    """Flower's connection to the server, which also notes every contact."""

    class WatchedClient(client):
        def PullMessages(self, request: Any) -> Any:  # noqa: N802
            answer = super().PullMessages(request)
            if answer.messages_list:
                contact.worked = time.monotonic()
                contact.note("working")
            else:
                contact.note("polling")
            return answer

        def SendNodeHeartbeat(self, request: Any) -> Any:  # noqa: N802
            answer = super().SendNodeHeartbeat(request)
            contact.note()
            return answer

        def GetFab(self, request: Any) -> Any:  # noqa: N802
            answer = super().GetFab(request)
            answer.fab.verifications["valid_license"] = "the kit's pins decide"
            return answer

    return WatchedClient


def keep_trying(contact: ContactFile) -> None:
    """Makes Flower outlast a cut link.

    Flower gives up at every failure whose text has "SSL", so also where a handshake ends too early or takes too long.
    Once the server was reached, only its certificate may be a reason.
    """
    from httpx import TransportError

    def link_broke(error: Exception) -> bool:
        is_of_link = isinstance(error, TransportError) and "certificate" not in str(error).lower()
        return is_of_link and contact.file.is_file()

    def patient(make: Callable[[], Any]) -> Callable[[], Any]:
        def making() -> Any:
            invoker = make()
            gives_up = invoker.should_giveup
            invoker.should_giveup = lambda error: not link_broke(error) and gives_up(error)
            return invoker

        return making

    replace(f"{CONNECTION}make_simple_http_retry_invoker", patient)
    replace("flwr.supercore.heartbeat:exponential", lambda waits: lambda **_: waits(max_delay=HEARTBEAT_SECONDS))


def pause(contact: ContactFile) -> Callable[[float], None]:
    """Flower's waits of its main loop: its 3 s between two questions become short soon after a message."""

    def sleep(seconds: float) -> None:
        if seconds == IDLE_SECONDS:
            seconds = polling.pause(time.monotonic() - contact.worked)
        elif seconds == REPLY_SECONDS:
            seconds = 0.05  # no question for the server
        time.sleep(min(seconds, IDLE_SECONDS))

    return sleep
