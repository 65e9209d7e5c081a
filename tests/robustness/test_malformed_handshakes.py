"""Malformed answers to the handshake: at the start each one ends the run with a reason, later none does."""

import random

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from malformed import broken, extra_record, missing_record, wrong_echo, wrong_kind
from scene import TOKEN

from fedsim.common.errors import ClientFailedError, UserError
from fedsim.flower.identity import assume_identity, stamp
from strategies.wire.handshake import Roster
from strategies.wire.reply_checks import RejectedReplyError
from strategies.wire.sites import MOST_VERSIONS, read_site

CLIENTS = ("photo", "sketch")
COUNTS = {"examples": 5, "class-counts": [2, 3]}
SITE = {"client": "sketch", "role": "source", "holds": "a site", **COUNTS, "version-x": "1"}


class TwoNodes:
    """A grid whose node 2 answers correctly; the test chooses the answer of node 3."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.replies: dict[str, Message] = {}

    def get_node_ids(self):
        return [2, 3]

    def push_messages(self, messages):
        """Answer at once."""
        for message in messages:
            node = message.metadata.dst_node_id
            stamp(message, f"m{node}")
            echo = ConfigRecord({"token": TOKEN, "client": "", "round": 0, "phase": "handshake"})
            site = ConfigRecord({**SITE, "client": CLIENTS[node - 2]})
            reply = Message(RecordDict({"echo": echo, "site": site}), reply_to=message)
            self.replies[f"m{node}"] = self.answer(message, reply) if node == 3 else reply
        return list(self.replies)

    def pull_messages(self, ids):
        """Return each reply once."""
        return [self.replies.pop(key) for key in ids if key in self.replies]


def wrong_site(draft, rng, odd):
    """A site without a name, with counts that are not whole numbers, or with contradictions."""
    site = draft.configs["site"]
    wrong = {
        "client": [odd, None, 3, ["sketch"], "", "s" * 10_000, "photo"],
        "role": [odd, None, "server", ["source"], True],
        "examples": [odd, None, -5, 0, 5.0, True, 10**12, "5", [5], 6],
        "class-counts": [odd, None, [2, -3], [2.0, 3.0], [True, 4], 5, [], [2, 3, 0], ["2", 3], [2, 4]],
    }
    key = rng.choice([*wrong])
    if rng.random() < 0.2:
        del site[key]
        return True
    site[key] = rng.choice(wrong[key])
    return type(site[key]) is not type(SITE[key]) or site[key] != SITE[key]


def error_reply(draft, rng, odd):
    """The site's app has raised an exception."""
    draft.error = Error(2, rng.choice(["user error: the folder is empty", "Traceback\nValueError: odd", f"{odd}", ""]))


MUTATIONS = {"site": wrong_site, "error": error_reply, "echo": wrong_echo, "missing": missing_record}
MUTATIONS |= {"extra": extra_record, "kind": wrong_kind}


def roster_with(answer) -> Roster:
    assume_identity(1)
    return Roster(TwoNodes(answer), CLIENTS, 2, {"token": TOKEN})


@pytest.mark.parametrize("kind", MUTATIONS)
def test_a_malformed_answer_ends_the_run_at_the_start_and_never_later(kind):
    """The reason is one line that names the node or the client; `sketch` is missing, `photo` is there."""
    for seed in range(24):
        rng, tolerant = random.Random(f"{kind} {seed}"), bool(seed % 2)
        roster = roster_with(lambda message, reply, rng=rng: broken(MUTATIONS[kind], reply, message, rng))
        roster.tolerant = tolerant
        said, missing = "", []
        try:
            missing = roster.call(0.0)
        except (ClientFailedError, UserError) as error:
            said = str(error)
        if missing:
            assert missing == ["sketch"]
            assert [roster.sites[client].examples for client in CLIENTS] == [5, 0]
        else:
            assert not tolerant
            assert said.strip()
            assert kind == "error" or len(said.splitlines()) <= 2


def test_all_versions_of_a_site_are_read_wherever_they_stand():
    """A site says more than 20 things of itself, in any order; too many versions are refused and none is left out."""
    others = {f"scale-{number}": number for number in range(20)}
    versions = {f"version-{number}": str(number) for number in range(MOST_VERSIONS)}
    site, _ = read_site(3, others | SITE | {"version-x": "1"} | dict(list(versions.items())[1:]))
    assert len(site.versions) == MOST_VERSIONS
    assert (site.versions["x"], site.versions["99"]) == ("1", "99")
    with pytest.raises(RejectedReplyError, match="reports 101 versions of packages, and 100 are the most"):
        read_site(3, SITE | versions)
