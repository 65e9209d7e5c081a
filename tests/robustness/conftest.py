"""A fixture that several tests of robustness share."""

from collections.abc import Iterator

import pytest
from killing import QuickRuns


@pytest.fixture(scope="module")
def quick_runs() -> Iterator[QuickRuns]:
    """One quick_runs for all tests."""
    quick_runs = QuickRuns()
    yield quick_runs
    quick_runs.close()
