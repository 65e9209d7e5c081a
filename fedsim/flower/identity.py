"""The non-public parts of Flower that a Grid of our own needs, all in this module (flwr 1.41)."""

from flwr.app import Message, RecordDict
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

SERVER_NODE = 1


def assume_identity(run_id: int) -> Run:
    """Let this process create messages as the server node of a run; returns an empty Run for Flower's Grid."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, SERVER_NODE, SERVER_NODE
    return Run.create_empty(run_id)


def stamp(message: Message, message_id: str) -> None:
    """Give a message its id, as Flower's own grids do."""
    message.metadata.__dict__["_message_id"] = message_id


def with_content(message: Message, content: RecordDict) -> Message:
    """A message with the same id and the same metadata, but with other content."""
    return Message(content, metadata=message.metadata)
