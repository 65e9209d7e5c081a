"""Matches replies to messages by message id and node. When a message has several replies, the first one is used."""

from collections.abc import Iterable, Sequence

from flwr.app import Message


def match(sent: Sequence[tuple[str, Message]], replies: Iterable[Message]) -> tuple[dict[str, Message], list[str]]:
    """The reply to every message of a phase, by client, and one line for each reply that is dropped.

    Errors may come from another node than the one that was asked: a SuperLink answers for a node that is gone.
    """
    asked = {message.metadata.message_id: (client, message.metadata.dst_node_id) for client, message in sent}
    found: dict[str, Message] = {}
    strays = []
    for reply in replies:
        source = reply.metadata.src_node_id
        client, node = asked.get(reply.metadata.reply_to_message_id, ("", 0))
        if not client:
            strays.append(f"a reply of node {source} is dropped: it answers no message of this phase")
        elif reply.has_content() and source != node:
            strays.append(f"a reply for client {client!r} is dropped: it comes from node {source}, not {node}")
        elif client in found:
            strays.append(f"a reply of client {client!r} is dropped: it answered before")
        else:
            found[client] = reply
    return found, strays
