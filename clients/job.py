"""A client's order to train."""

from dataclasses import dataclass

from clients.base import DomainClient
from clients.local_steps import Order
from strategies.parts import Arrays


@dataclass
class Job:
    """What `LocalClient.train` gets, and the client."""

    client: DomainClient
    tensors: Arrays
    config: Order
