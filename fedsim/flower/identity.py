"""How a Grid of our own makes messages in the name of the server's node."""

from typing import Any

from flwr.app import Message, RecordDict

from fedsim.flower.private import private

SERVER_NODE = 1


def assume_identity(run_id: int) -> Any:
    """Let this process create messages as the server node of a run; returns an empty Run for Flower's Grid."""
    identity = private("flwr.supercore.task_identity:TaskIdentity")
    identity.run_id, identity.node_id, identity.task_id = run_id, SERVER_NODE, SERVER_NODE
    return private("flwr.supercore.run:Run").create_empty(run_id)


def stamp(message: Message, message_id: str) -> None:
    """Give a message its id, as Flower's own grids do."""
    message.metadata.__dict__["_message_id"] = message_id


def with_content(message: Message, content: RecordDict) -> Message:
    """A message with the same id and the same metadata, but with other content."""
    return Message(content, metadata=message.metadata)  # type: ignore[call-overload]  # as Flower itself makes them
