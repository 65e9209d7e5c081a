"""A site's SuperNode outlasts a link that is cut: in a TLS handshake, and between two heartbeats."""

import contextlib
import socket
import threading
import time
from functools import partial
from importlib import import_module
from itertools import islice
from types import SimpleNamespace

import httpx
import pytest
from flwr.common import constant
from flwr.supercore.heartbeat import HeartbeatSender

from fedsim.deploy import supernode
from fedsim.deploy.supernode import CONNECTION, ContactFile, keep_trying

MODULES = [(import_module(CONNECTION[:-1]), "make_simple_http_retry_invoker")]
MODULES += [(import_module("flwr.supercore.heartbeat"), "exponential")]


@pytest.fixture
def contact(tmp_path, monkeypatch):
    """The file of contacts of a SuperNode that keeps trying; what is replaced in Flower is put back."""
    for module, name in MODULES:
        monkeypatch.setattr(module, name, getattr(module, name))
    keep_trying(file := ContactFile(tmp_path / "contact"))
    return file


def handshake(seconds):
    """A request whose connection ends in the handshake, after so long; the client waits for half a second."""

    def hang_up(door):
        with door.accept()[0] as line:
            line.recv(1 << 16)
            time.sleep(seconds)

    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=hang_up, args=(door,)).start()
        httpx.get(f"https://127.0.0.1:{door.getsockname()[1]}", verify=False, trust_env=False, timeout=0.5)


def expired():
    raise httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired")


@pytest.mark.parametrize(
    ("reached", "fault", "tries"),
    [
        (True, partial(handshake, 0), 2),
        (True, partial(handshake, 1), 2),
        (True, expired, 1),
        (False, partial(handshake, 0), 1),  # the supervisor tries again, and says why
    ],
)
def test_once_the_server_was_reached_only_its_certificate_is_a_reason_to_give_up(contact, reached, fault, tries):
    if reached:
        contact.note()
    calls, invoker = [], MODULES[0][0].make_simple_http_retry_invoker()
    invoker.wait_function = lambda seconds: None

    def ask():
        calls.append("call")
        if len(calls) == 1:
            fault()

    with contextlib.nullcontext() if tries > 1 else pytest.raises(httpx.ConnectError, match="SSL"):
        invoker.invoke(ask)
    assert len(calls) == tries


def test_a_cut_of_half_a_minute_ends_before_the_site_counts_as_gone(contact):
    waits = islice(HeartbeatSender(lambda: True)._retry_invoker.wait_gen_factory(), 20)
    share = constant.HEARTBEAT_BASE_MULTIPLIER + max(constant.HEARTBEAT_RANDOM_RANGE)
    pause = share * (constant.HEARTBEAT_DEFAULT_INTERVAL - constant.HEARTBEAT_CALL_TIMEOUT)
    late = pause + 30 + max(waits) + constant.HEARTBEAT_CALL_TIMEOUT  # of a try that began before the end of the cut
    assert late < constant.HEARTBEAT_PATIENCE * constant.HEARTBEAT_DEFAULT_INTERVAL


@pytest.mark.parametrize(("flowers", "since", "ours"), [
    (supernode.IDLE_SECONDS, 1.0, 0.25),  # for work, a second after the last message
    (supernode.IDLE_SECONDS, 20.0, 1.0),
    (supernode.IDLE_SECONDS, 3600.0, 3.0),
    (supernode.REPLY_SECONDS, 1.0, 0.05),  # for the client's reply, without a question for the server
    (60.0, 1.0, 3.0),
])  # fmt: skip
def test_a_site_asks_soon_after_a_message_and_seldom_long_after(contact, monkeypatch, flowers, since, ours):
    slept, now = [], contact.worked + since
    monkeypatch.setattr(supernode, "time", SimpleNamespace(monotonic=lambda: now, sleep=slept.append))
    supernode.pause(contact)(flowers)
    assert slept == [pytest.approx(ours)]
