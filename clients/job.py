"""A client's order to train."""

from dataclasses import dataclass

import numpy as np

from clients.base import DomainClient
from clients.local_steps import Order


@dataclass
class Job:
    """What `DomainClient.fit` gets."""

    client: DomainClient
    parameters: list[np.ndarray]
    config: Order
