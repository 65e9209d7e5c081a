"""The server asks for replies often at first, then less often; it stops waiting at the time limit."""

import pytest

from strategies.wire import polling
from strategies.wire.polling import QuickGrid


class Clock:
    """A clock whose time passes only by sleeping."""

    def __init__(self):
        self.now, self.pauses = 0.0, []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


class Reply:
    def __init__(self, key):
        self.metadata = type("Metadata", (), {"reply_to_message_id": key})


class Slow:
    """A grid whose replies come at given times."""

    def __init__(self, clock, times):
        self.clock, self.times = clock, times

    def push_messages(self, messages):
        return list(self.times)

    def pull_messages(self, ids):
        due = [key for key in ids if self.times[key] <= self.clock.now]
        return [Reply(key) for key in due]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(polling, "time", clock)
    return clock


def test_all_replies_are_collected_soon_after_they_came(clock):
    replies = list(QuickGrid(Slow(clock, {"a": 0.0, "b": 5.0, "c": 100.0})).send_and_receive(["a", "b", "c"]))
    assert [reply.metadata.reply_to_message_id for reply in replies] == ["a", "b", "c"]
    assert clock.now < 103.1
    assert clock.pauses[0] == polling.FIRST_SECONDS
    assert clock.pauses[-1] == 3.0
    assert len(clock.pauses) < 100


def test_the_wait_ends_at_its_time(clock):
    replies = list(QuickGrid(Slow(clock, {"a": 1.0, "b": 50.0})).send_and_receive(["a", "b"], timeout=10.0))
    assert [reply.metadata.reply_to_message_id for reply in replies] == ["a"]
    assert clock.now == pytest.approx(10.0)


def test_nothing_to_send_is_no_wait(clock):
    assert list(QuickGrid(Slow(clock, {})).send_and_receive([], timeout=10.0)) == []
    assert clock.now == 0.0
