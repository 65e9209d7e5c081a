"""Breaks a site's client app as $FEDSIM_FAULT's file says; loaded by its Python processes (PYTHONPATH) or by warm.py.

The file holds {"kind": ..., "round": ..., "seconds": ...}; without it the site is sound.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path


def fault_of(round_: int, phase: str) -> dict:
    """The fault to inject now, or {}; it strikes in its round's train phase (or `phase`), with `once` only once."""
    file = Path(os.environ["FEDSIM_FAULT"])
    if not file.is_file():
        return {}
    fault = json.loads(file.read_text())
    due = fault["round"] == round_ and phase == fault.get("phase", "train")
    if due and fault.get("once"):
        file.unlink()
    return fault if due else {}


def strike(fault: dict) -> None:
    """What happens inside the client's work."""
    import ctypes
    import faulthandler
    import signal
    import time

    kind = fault.get("kind")
    if kind == "raise":
        raise RuntimeError("told to raise")
    if kind == "killed":  # as the kernel does when memory runs out
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "late":  # the site's own limit would cut it short
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
    if kind in ("hang", "late", "slow"):
        time.sleep(fault["seconds"])
    if kind == "hang-in-c":  # PyDLL keeps the interpreter's lock
        ctypes.PyDLL(None).sleep(int(fault["seconds"]))


def spoil(reply: object, fault: dict) -> object:
    """What happens to the reply."""
    import numpy as np
    from flwr.app import Array, ArrayRecord, ConfigRecord

    kind = fault.get("kind")
    if kind in ("nan", "shape"):
        record = reply.content.array_records["arrays"]
        arrays = {name: np.array(array.numpy()) for name, array in record.items()}
        name = next(name for name, array in arrays.items() if array.ndim > 1)
        arrays[name] = np.full_like(arrays[name], np.nan) if kind == "nan" else arrays[name][:1]
        reply.content["arrays"] = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    if kind in ("values", "huge"):  # 3e38 in every weight; so many megabytes that nobody asked for
        record = reply.content.array_records["arrays"]
        arrays = {name: np.array(array.numpy()) for name, array in record.items()}
        if kind == "values":
            arrays = {name: np.full_like(a, 3e38) if a.dtype.kind == "f" else a for name, a in arrays.items()}
        else:
            size = int(fault["megabytes"]) * (1 << 18)
            arrays["much"] = np.random.default_rng().random(size, np.float32)
        reply.content["arrays"] = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    if kind == "examples":  # a handshake that claims a thousand million of the first class
        said = dict(reply.content.config_records["site"])
        counts = [10**9 - sum(said["class-counts"][1:]), *said["class-counts"][1:]]
        reply.content["site"] = ConfigRecord({**said, "class-counts": counts, "examples": 10**9})
    if kind in ("other-round", "other-run"):
        change = {"round": 1} if kind == "other-round" else {"token": "0" * 16}
        reply.content["echo"] = ConfigRecord({**reply.content.config_records["echo"], **change})
    return reply


def install() -> None:
    """Wrap the client's work and the app's replies; the process answers one message at a time."""
    from flwr.clientapp import ClientApp

    from clients.base import DomainClient
    from fedsim.run.target import TargetEvaluator

    now: dict = {}

    def breaking(work: Callable) -> Callable:
        def broken(*words: object) -> object:
            strike(now)
            return work(*words)

        return broken

    def spoiling(answer: Callable) -> Callable:
        def spoiled(app: object, message: object, context: object) -> object:
            config = message.content.config_records.get("config", {})
            now.clear()
            now.update(fault_of(int(config.get("round", -1)), str(config.get("phase", ""))))
            reply = answer(app, message, context)
            return reply if reply.has_error() else spoil(reply, now)

        return spoiled

    DomainClient.fit = breaking(DomainClient.fit)
    DomainClient.evaluate = breaking(DomainClient.evaluate)
    TargetEvaluator.__call__ = breaking(TargetEvaluator.__call__)
    ClientApp.__call__ = spoiling(ClientApp.__call__)


CLIENT = any("flwr-clientapp" in word for word in sys.orig_argv) or sys.orig_argv[-5:-3] == ["deploy", "client"]

if "FEDSIM_FAULT" in os.environ and (__name__ == "faulty" or CLIENT):
    install()
