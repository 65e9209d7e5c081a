"""A fixture that several tests of robustness share."""

from collections.abc import Iterator

import pytest
from killing import Nursery


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """One nursery for all tests."""
    nursery = Nursery()
    yield nursery
    nursery.close()
