"""The end of a command runs what is registered for the end, and says nothing of objects that libraries leave behind."""

import subprocess
import sys

import pytest

from fedsim.common.exit_codes import leave

WITH_TRITON = """
from fedsim.common.exit_codes import leave
from fedsim.common.garbage import started, starting
starting()
from torchvision.datasets import MNIST  # imports triton, as Rotated MNIST does before its run begins
started()
leave(0)
"""
WITH_THREADS = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from fedsim.common.exit_codes import leave
atexit.register(lambda: print("at the end"))
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
ThreadPoolExecutor(1).submit(print, "pool").result()
sys.stdout.write("no line end, ")
leave({code})
print("never")
"""


def ended(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_triton_prints_nothing_at_the_end():
    """It prints a page about objects that no search has freed, where Python ends as usual."""
    pytest.importorskip("triton")
    done = ended(WITH_TRITON)
    assert done.returncode == 0, done.stderr
    assert "leaked" not in done.stderr


@pytest.mark.parametrize(("given", "code"), [("None", 0), ("0", 0), ("2", 2), ("'a text'", 1)])
def test_threads_and_exit_functions_end_as_usual(given, code):
    """Only the modules are not cleared: 0.3 s after an import of PyTorch."""
    done = ended(WITH_THREADS.format(code=given))
    assert done.returncode == code
    assert done.stdout == "pool\nno line end, thread\nat the end\n"
    assert done.stderr == ("fedsim: a text\n" if code == 1 else "")


def test_a_second_interruption_does_not_keep_the_process(monkeypatch):
    """Ctrl-C while a thread is waited for: the process ends at once, with the exit code that it has."""

    class EndedError(Exception):
        pass

    def interrupted():
        raise KeyboardInterrupt

    def end(code):
        raise EndedError(code)

    monkeypatch.setattr("threading._shutdown", interrupted)
    monkeypatch.setattr("os._exit", end)
    with pytest.raises(EndedError, match="130"):
        leave(130)
