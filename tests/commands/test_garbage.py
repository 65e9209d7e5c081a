"""The end of a command says nothing of objects that libraries leave behind."""

import subprocess
import sys

import pytest

COMMAND = """
from fedsim.common.garbage import ending, started, starting
starting()
from torchvision.datasets import MNIST  # imports triton, as Rotated MNIST does before its run begins
started()
ending()
"""


def test_what_was_imported_before_a_run_is_freed_at_its_end():
    """Triton prints a page about objects that no search has freed."""
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, check=True, timeout=120)
    assert "leaked" not in done.stderr
