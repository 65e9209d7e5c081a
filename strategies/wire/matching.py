"""Matches replies to messages by message id and node. When a message has several replies, the first one is used."""

from flwr.app import Message


class Sent:
    """The messages of a phase by client, each until its reply has come, and lines about replies that are dropped.

    A message gets its id when it is sent, which may be after it came here.
    """

    def __init__(self) -> None:
        self.strays: list[str] = []
        self._open: dict[str, Message] = {}
        self._unsent: dict[str, None] = {}  # clients whose message had no id when it was last looked at
        self._client_of: dict[str, str] = {}  # by message id, also after the reply

    def add(self, client: str, message: Message) -> Message:
        """From now on the client's reply must answer this message, which is returned."""
        earlier = self._open.get(client)
        if earlier is not None:
            self._client_of.pop(earlier.metadata.message_id, None)
        self._open[client] = message
        self._unsent[client] = None
        return message

    def client_of(self, message: Message) -> str:
        """Name of the client whose reply to this message is waited for; empty for another message."""
        client = self._find(message.metadata.message_id)
        return client if self._open.get(client) is message else ""

    def match(self, reply: Message) -> tuple[str, Message] | None:
        """The client and the message that a reply answers; None when it is dropped, `strays` then says why.

        Errors may come from another node than the one that was asked: a SuperLink answers for a node that is gone.
        """
        source, client = reply.metadata.src_node_id, self._find(reply.metadata.reply_to_message_id)
        message = self._open.get(client)
        if not client:
            self.strays.append(f"a reply of node {source} is dropped: it answers no message of this phase")
        elif message is None:
            self.strays.append(f"a reply of client {client!r} is dropped: it answered before")
        elif reply.has_content() and source != message.metadata.dst_node_id:
            node = message.metadata.dst_node_id
            self.strays.append(f"a reply for client {client!r} is dropped: it comes from node {source}, not {node}")
        else:
            del self._open[client]
            return client, message
        return None

    def _find(self, message_id: str) -> str:
        """Client of a message by its id."""
        if message_id not in self._client_of:
            for client in list(self._unsent):
                known = self._open[client].metadata.message_id
                if known:
                    self._client_of[known] = client
                    del self._unsent[client]
        return self._client_of.get(message_id, "")
