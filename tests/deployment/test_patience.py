"""How the server waits: often at first, then less often, until a limit; a lost reply is asked for again."""

import itertools
from types import SimpleNamespace

import pytest
from flwr.app import Error, Message, RecordDict

from fedsim.flower.identity import assume_identity, stamp
from strategies.wire import grids
from strategies.wire.grids import MOST_ATTEMPTS, PatientGrid, QuickGrid


class World:
    """A grid whose nodes answer from a list, and the exchange of its messages; clients are on the nodes 10, 11, ..."""

    def __init__(self, answers, back=True):
        assume_identity(1)
        self.answers, self.back, self.roster = answers, back, self
        self.ids, self.asked, self.waits, self.given_up = itertools.count(), [], [], []
        self.sent = {client: Message(RecordDict(), 10 + place, "train") for place, client in enumerate(answers)}

    def run(self, patience=5.0):
        replies = list(PatientGrid(self, self, patience).send_and_receive(list(self.sent.values()), timeout=1))
        found = {reply.metadata.reply_to_message_id: reply for reply in replies}
        assert len(found) == len(replies)
        return {client: found.get(message.metadata.message_id) for client, message in self.sent.items()}

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            stamp(message, f"m{next(self.ids)}")
            self.asked.append(next(client for client, sent in self.sent.items() if sent is message))
            answer = self.answers[self.asked[-1]].pop(0)
            if answer is not None:
                replies.append(Message(answer if isinstance(answer, Error) else RecordDict(), reply_to=message))
        return replies

    def awaited(self, reply):
        answered = reply.metadata.reply_to_message_id
        return next((client for client, sent in self.sent.items() if sent.metadata.message_id == answered), "")

    def again(self, client):
        message = self.sent[client]
        self.sent[client] = Message(message.content, message.metadata.dst_node_id + 100, "train")
        return self.sent[client]

    def call(self, wait, clients):
        self.waits.append((round(wait), tuple(clients)))
        return self.missing(clients)

    def missing(self, clients):
        return [] if self.back else list(clients)

    def give_up(self, client):
        self.given_up.append(client)


LOST = Error(5, "Node Unavailable")


def test_a_lost_reply_is_asked_for_again_and_a_clients_own_failure_is_not():
    """An exception, a refusal and silence of a client itself; the process of a client that dies every time."""
    world = World({"a": [RecordDict()], "b": [LOST, RecordDict()]})
    replies = world.run()
    assert all(reply.has_content() for reply in replies.values())
    assert replies["b"].metadata.src_node_id == 111
    assert (world.asked, world.waits) == (["a", "b", "b"], [(5, ("b",))])
    for answer in (Error(2, "Traceback"), Error(0, "too large"), None):
        world = World({"a": [answer]})
        reply = world.run()["a"]
        assert reply is None or reply.has_error()
        assert world.asked == ["a"]
    for patience, attempts in ((5.0, MOST_ATTEMPTS), (0.0, 1)):  # without patience there is one
        world = World({"b": [Error(8, "stopped responding")] * 20})
        assert world.run(patience)["b"].has_error()
        assert len(world.asked) == attempts
    assert world.waits == []


class Clock:
    """A clock whose time passes only by sleeping, and a grid whose replies come at given times."""

    def __init__(self):
        self.now, self.pauses, self.times = 0.0, [], {}

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds

    def push_messages(self, messages):
        return list(messages)

    def pull_messages(self, ids):
        due = [key for key in ids if self.times[key] <= self.now]
        return [SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=key)) for key in due]

    def replies(self, timeout=None, **times):
        self.times = times
        found = QuickGrid(self).send_and_receive(list(times), timeout=timeout)
        return [reply.metadata.reply_to_message_id for reply in found]


def test_replies_are_collected_soon_after_they_came_until_the_time_is_over(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(grids, "time", clock)
    assert clock.replies(a=0.0, b=5.0, c=100.0) == ["a", "b", "c"]
    assert clock.now < 103.1
    assert (clock.pauses[0], clock.pauses[-1]) == (0.25, 3.0)
    assert len(clock.pauses) < 100
    clock.now = 0.0
    assert clock.replies(timeout=10.0) == []
    assert clock.now == 0.0
    assert clock.replies(a=1.0, b=50.0, timeout=10.0) == ["a"]
    assert clock.now == pytest.approx(10.0)


def test_a_site_that_stays_away_is_lost_and_not_waited_for_again():
    world = World({"a": [RecordDict()], "b": [LOST]}, back=False)
    assert world.run()["b"].error.code == 5
    assert (world.given_up, world.asked) == (["b"], ["a", "b"])
