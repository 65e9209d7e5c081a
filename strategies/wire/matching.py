"""Matches replies to messages by message id and node. When a message has several replies, the first one is used."""

from flwr.app import Message

LOST = {3, 4, 5, 8}  # Flower's codes: message, reply or node unavailable, client app stopped responding


class Sent:
    """The messages of a phase by client, each until its reply has come, and lines about replies that are dropped.

    A message gets its id when it is sent, which may be after it came here.
    """

    def __init__(self) -> None:
        self.strays: list[str] = []
        self.open: dict[str, Message] = {}
        self._unsent: dict[str, None] = {}  # clients whose message had no id when it was last looked at
        self._client_of: dict[str, str] = {}  # by message id, also after the reply

    def add(self, client: str, message: Message) -> Message:
        """From now on the client's reply must answer this message, which is returned."""
        earlier = self.open.get(client)
        if earlier is not None:
            self._client_of.pop(earlier.metadata.message_id, None)
        self.open[client] = message
        self._unsent[client] = None
        return message

    def awaited(self, reply: Message) -> str:
        """The client for whose message this is the first reply; empty for any other reply."""
        client = self._find(reply.metadata.reply_to_message_id)
        return client if client in self.open else ""

    def match(self, reply: Message) -> str:
        """The client whose message a reply answers; empty when the reply is dropped, `strays` then says why.

        Errors may come from another node than the one that was asked: a SuperLink answers for a node that is gone.
        """
        source = reply.metadata.src_node_id
        client = self._find(reply.metadata.reply_to_message_id)
        message = self.open.get(client)
        if not client:
            self.strays.append(f"a reply of node {source} is dropped: it answers no message of this phase")
            return ""
        if message is None:
            self.strays.append(f"a reply of client {client!r} is dropped: it answered before")
            return ""
        node = message.metadata.dst_node_id
        if reply.has_content() and source != node:
            self.strays.append(f"a reply for client {client!r} is dropped: it comes from node {source}, not {node}")
            return ""
        del self.open[client]
        return client

    def _find(self, message_id: str) -> str:
        """The client for which a message with this id was sent; empty for no client."""
        if message_id not in self._client_of:
            for client in list(self._unsent):
                key = self.open[client].metadata.message_id
                if key:
                    self._client_of[key] = client
                    del self._unsent[client]
        return self._client_of.get(message_id, "")
