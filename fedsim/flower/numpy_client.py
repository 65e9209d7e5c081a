"""Flower's NumPyClient, or its contract where Flower no longer has the class: the clients do not change.

Flower keeps the class in a package for components of an older interface. Our ClientApp calls the methods itself.
"""

from typing import Any

import numpy as np

try:
    from flwr.client import NumPyClient
except ImportError:

    class NumPyClient:  # type: ignore[no-redef]
        """A client that takes and returns lists of arrays."""

        def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict]:
            """Train the given model; returns the trained arrays, the number of examples and metrics."""
            raise NotImplementedError

        def evaluate(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[float, int, dict]:
            """Validate the given model; returns the loss, the number of examples and metrics."""
            raise NotImplementedError


__all__ = ["NumPyClient"]
