"""What several trials of robustness share."""

from collections.abc import Iterator

import pytest
from killing import Nursery


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """One for all trials."""
    nursery = Nursery()
    yield nursery
    nursery.close()
