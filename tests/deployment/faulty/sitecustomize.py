"""Breaks a site's client app as $FEDSIM_FAULT's file says; loaded by its Python processes (PYTHONPATH) or by warm.py.

The file holds {"kind": ..., "round": ..., "seconds": ...}; without it the site is sound.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path


def fault_of(round_: int, phase: str) -> dict:
    """The fault to cause now, or {}; it happens in its round, in the train phase or in `phase`; with `once` once."""
    file = Path(os.environ["FEDSIM_FAULT"])
    if not file.is_file():
        return {}
    fault = json.loads(file.read_text())
    due = fault["round"] in (round_, "any") and phase == fault.get("phase", "train")
    if due and fault.get("once"):
        file.unlink()
    return fault if due else {}


def strike(fault: dict) -> None:
    """Cause the fault inside the client's work."""
    import ctypes
    import faulthandler
    import signal
    import time

    kind = fault.get("kind")
    if kind == "raise":
        raise RuntimeError("told to raise")
    if kind == "killed":  # as the kernel does when memory runs out
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "late":  # without this, the site's own time limit would end it earlier
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
    if kind in ("hang", "late", "slow"):
        time.sleep(fault["seconds"])
    if kind == "hang-in-c":  # PyDLL does not release the interpreter's lock
        ctypes.PyDLL(None).sleep(int(fault["seconds"]))


def spoil(reply: object, fault: dict, message: object) -> object:
    """Cause the fault in the reply to a message."""
    import numpy as np
    from flwr.app import ConfigRecord, MetricRecord

    from strategies.wire.packing import unpack

    kind, changes = fault.get("kind"), {
        # a batch-norm layer whose output is always NaN
        "variance": lambda name, a: -np.ones_like(a) if name.endswith("running_var") else a,
        "nan": lambda name, a: np.full_like(a, np.nan) if a.ndim > 1 else a,
        "shape": lambda name, a: a[:1] if a.ndim > 1 else a,
        "values": lambda name, a: np.full_like(a, 3e38) if a.dtype.kind == "f" else a,
    }  # fmt: skip
    if kind is not None:
        reply.content = unpack(reply.content)
    if kind in changes:
        change(reply, changes[kind])
    if kind == "opposite":  # so many times as far as honest training, away from what was learned
        start = unpack(message.content).array_records["arrays"]
        change(reply, lambda name, a: moved_away(np.array(start[name].numpy()), a, name, fault["times"]))
    if kind == "metrics":
        reply.content["metrics"] = MetricRecord({**reply.content.metric_records["metrics"], **fault["metrics"]})
    if kind == "huge":  # so many megabytes that nobody asked for
        much = np.random.default_rng().random(int(fault["megabytes"]) * (1 << 18), np.float32)
        change(reply, lambda name, a: a, much=much)
    if kind == "examples":  # a handshake that claims a thousand million of the first class
        said = dict(reply.content.config_records["site"])
        counts = [10**9 - sum(said["class-counts"][1:]), *said["class-counts"][1:]]
        reply.content["site"] = ConfigRecord({**said, "class-counts": counts, "examples": 10**9})
    if kind in ("other-round", "other-run"):
        other = {"round": 1} if kind == "other-round" else {"token": "0" * 16}
        reply.content["echo"] = ConfigRecord({**reply.content.config_records["echo"], **other})
    return reply


def moved_away(start: object, trained: object, name: str, times: float) -> object:
    """A tensor that has moved in the opposite direction; what counts, or is a statistic of batch norm, is honest."""
    return start - times * (trained - start) if trained.dtype.kind == "f" and "running" not in name else trained


def change(reply: object, how: Callable, **more: object) -> None:
    """Replace the tensors of a reply with a model."""
    import numpy as np
    from flwr.app import Array, ArrayRecord

    record = reply.content.array_records["arrays"]
    arrays = {name: how(name, np.array(array.numpy())) for name, array in record.items()} | more
    reply.content["arrays"] = ArrayRecord({name: Array(array) for name, array in arrays.items()})


def install() -> None:
    """Wrap the client's work and the app's replies; the process answers one message at a time."""
    from flwr.clientapp import ClientApp

    from clients.base import DomainClient
    from fedsim.runs.target import TargetEvaluator
    from strategies.wire.packing import unpack

    now: dict = {}

    def breaking(work: Callable) -> Callable:
        def broken(*words: object) -> object:
            strike(now)
            return work(*words)

        return broken

    def spoiling(answer: Callable) -> Callable:
        def spoiled(app: object, message: object, context: object) -> object:
            config = unpack(message.content).config_records.get("config", {})
            now.clear()
            now.update(fault_of(int(config.get("round", -1)), str(config.get("phase", ""))))
            reply = answer(app, message, context)
            return reply if reply.has_error() else spoil(reply, now, message)

        return spoiled

    DomainClient.train = breaking(DomainClient.train)
    DomainClient.validate_model = breaking(DomainClient.validate_model)
    TargetEvaluator.__call__ = breaking(TargetEvaluator.__call__)
    ClientApp.__call__ = spoiling(ClientApp.__call__)


def move_clock() -> None:
    """Let the SuperNode sign its requests with a clock that is ahead by the seconds in the `.clock` file."""
    from datetime import timedelta

    from flwr.supernode import node_auth_http_interceptor as signing

    file, now = Path(os.environ["FEDSIM_FAULT"]).with_suffix(".clock"), signing.now
    signing.now = lambda: now() + timedelta(seconds=float(file.read_text()) if file.is_file() else 0.0)


def flood() -> None:
    """Let the SuperNode's next reply with a model be larger by the megabytes in the `.flood` file.

    The additional parts are created when they are sent, so that the attacker needs no memory for them. They belong to
    the reply, whose table of contents names them.
    """
    import hashlib
    import threading

    from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
    from flwr.supernode import fleet_http_connection as connection

    file, own, part = Path(os.environ["FEDSIM_FAULT"]).with_suffix(".flood"), connection.FleetHttpClient, 5 << 20

    def content(number: int) -> bytes:
        body = number.to_bytes(8, "little") * (part // 8)
        return b"ArrayChunk  %d\0" % len(body) + body

    class Flooding(own):
        def PushMessages(self, request):  # noqa: N802
            if not (file.is_file() and request.messages_list[0].metadata.message_type.startswith("train")):
                return super().PushMessages(request)
            count = int(file.read_text()) * (1 << 20) // part
            file.unlink()
            ids = [hashlib.sha256(content(number)).hexdigest() for number in range(count)]
            request.message_object_trees[0].children.extend(ObjectTree(object_id=each) for each in ids)
            answer, run = super().PushMessages(request), request.messages_list[0].metadata.run_id

            def send() -> None:
                for number, each in enumerate(ids):
                    fields = {"node": request.node, "run_id": run, "session_id": answer.session_id}
                    try:
                        message = PushObjectRequest(object_id=each, object_content=content(number), **fields)
                        if not self.PushObject(message).stored:
                            raise RuntimeError("its session was closed")
                    except Exception as error:
                        print(f"flood: refused after {number * part >> 20} MB: {error}", flush=True)
                        return
                print(f"flood: all {count * part >> 20} MB were taken", flush=True)

            threading.Thread(target=send, daemon=True).start()
            return answer

    connection.FleetHttpClient = Flooding


CLIENT = any("flwr-clientapp" in word for word in sys.orig_argv) or sys.orig_argv[-5:-3] == ["deploy", "client"]

SUPERNODE = ["deploy", "supernode"] in (sys.orig_argv[2:4], getattr(sys, "argv", [])[1:3])

if "FEDSIM_FAULT" in os.environ and SUPERNODE:
    move_clock()
    flood()
elif "FEDSIM_FAULT" in os.environ and (__name__ == "faulty" or CLIENT):
    install()
