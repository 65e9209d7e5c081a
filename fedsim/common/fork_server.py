"""The process from which a sweep's workers are forked. It imports everything once for all of them."""

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

SHARED = ["fedsim.runtime.launch", "fedsim.apps.client"]


def context() -> ForkServerContext:
    """Where a worker process comes from."""
    context_of_server = multiprocessing.get_context("forkserver")
    context_of_server.set_forkserver_preload(SHARED)
    return context_of_server


def start_early(wanted: bool) -> None:
    """Start the server while the command imports what it needs itself: both take a second and have a core each.

    wanted: cells will run on this machine. Where the server cannot be started, the start of the first worker says so.
    """
    if not wanted:
        return
    context()
    with ctrl_c_later(), contextlib.suppress(OSError, EOFError):
        forkserver.ensure_running()


@contextlib.contextmanager
def ctrl_c_later() -> Iterator[None]:
    """Ctrl-C waits until the end of the block, and a process that is started in the block never sees it.

    A terminal sends the signal to every process, but only the sweep may react to it. A new process inherits that the
    signal is blocked. Here that is not enough: the kernel gives the signal to another thread, and Python then answers
    it in the main thread all the same.
    """
    # The start of Python's resource tracker ends with the signal unblocked, so that the tracker has to run before.
    resource_tracker.ensure_running()
    if threading.current_thread() is not threading.main_thread():  # Python answers signals in the main thread only
        yield
        return
    came = []
    answer = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, answer)
        if came:
            signal.raise_signal(signal.SIGINT)
