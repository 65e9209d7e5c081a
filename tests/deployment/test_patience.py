"""A reply that is lost is asked for again when its site is back; an error that the client itself reports is not."""

import itertools

import pytest
from flwr.app import Error, Message, RecordDict

from fedsim.flower.identity import assume_identity, stamp
from strategies.wire.patience import MOST_ATTEMPTS, PatientGrid


class World:
    """A grid whose nodes answer from a list, and the sender of the messages; clients are on the nodes 10, 11, ..."""

    def __init__(self, answers, back=True):
        assume_identity(1)
        self.answers, self.back, self.roster = answers, back, self
        self.ids, self.asked, self.waits, self.given_up = itertools.count(), [], [], []
        self.sent = {client: Message(RecordDict(), 10 + place, "train") for place, client in enumerate(answers)}

    def run(self, patience=5.0):
        grid = PatientGrid(self, self, patience)
        replies = list(grid.send_and_receive(list(self.sent.values()), timeout=1))
        found = {reply.metadata.reply_to_message_id: reply for reply in replies}
        assert len(found) == len(replies)
        return {client: found.get(message.metadata.message_id) for client, message in self.sent.items()}

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            stamp(message, f"m{next(self.ids)}")
            client = self.client_of(message)
            self.asked.append(client)
            answer = self.answers[client].pop(0)
            if answer is not None:
                replies.append(Message(answer if isinstance(answer, Error) else RecordDict(), reply_to=message))
        return replies

    def client_of(self, message):
        return next((client for client, sent in self.sent.items() if sent is message), "")

    def again(self, message):
        client = self.client_of(message)
        self.sent[client] = Message(message.content, message.metadata.dst_node_id + 100, "train")
        return self.sent[client]

    def call(self, wait, clients):
        self.waits.append((round(wait), tuple(clients)))
        return [] if self.back else list(clients)

    def missing(self, clients):
        return [] if self.back else list(clients)

    def give_up(self, client):
        self.given_up.append(client)


LOST = Error(5, "Node Unavailable")


def test_a_lost_reply_is_asked_for_again():
    """It is asked for at the client's present node; the other clients are not asked twice."""
    world = World({"a": [RecordDict()], "b": [LOST, RecordDict()]})
    replies = world.run()
    assert replies["a"].has_content()
    assert replies["b"].has_content()
    assert replies["b"].metadata.src_node_id == 111
    assert world.asked == ["a", "b", "b"]
    assert world.waits == [(5, ("b",))]


@pytest.mark.parametrize("answer", [Error(2, "Traceback"), Error(0, "too large"), None])
def test_what_a_client_says_or_does_itself_counts(answer):
    """These are an exception, a refusal, and no answer."""
    world = World({"a": [answer]})
    reply = world.run()["a"]
    assert reply is None or reply.has_error()
    assert world.asked == ["a"]


def test_a_site_that_stays_away_is_lost():
    """Its error is kept, and the run does not wait for it again."""
    world = World({"a": [RecordDict()], "b": [LOST]}, back=False)
    replies = world.run()
    assert replies["b"].error.code == 5
    assert world.given_up == ["b"]
    assert world.asked == ["a", "b"]


def test_without_patience_nothing_is_waited_for():
    world = World({"b": [LOST]})
    assert world.run(patience=0.0)["b"].has_error()
    assert world.waits == []


def test_attempts_are_bounded():
    """The process of the client dies every time."""
    world = World({"b": [Error(8, "stopped responding")] * 20})
    assert world.run()["b"].has_error()
    assert len(world.asked) == MOST_ATTEMPTS
