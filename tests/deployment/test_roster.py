"""Clients are known by name: nodes come late, leave, and return with other ids; each wait has a limit."""

import itertools
import time

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

from fedsim.common.errors import USER_ERROR, ClientFailedError, UserError
from fedsim.flower.identity import assume_identity, stamp
from fedsim.settings import RunSettings
from strategies.wire import handshake
from strategies.wire.handshake import Roster
from strategies.wire.sites import UNANSWERED

ECHO = ConfigRecord({"token": "t", "client": "", "round": 0, "phase": "handshake"})


class Nodes:
    """A grid of nodes with given answers; `nodes` maps node ids to the answers (None: no answer)."""

    def __init__(self, nodes):
        assume_identity(1)
        self.nodes, self.asked = nodes, []
        self._ids, self._pending = itertools.count(1), {}

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        for message in messages:
            stamp(message, f"m{next(self._ids)}")
            self._pending[message.metadata.message_id] = message
            self.asked.append(message.metadata.dst_node_id)
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, ids):
        replies = []
        for key in ids:
            message = self._pending[key]
            said = self.nodes.get(message.metadata.dst_node_id)
            if said is not None:
                del self._pending[key]
                content = said if isinstance(said, Error) else RecordDict({"site": ConfigRecord(said), "echo": ECHO})
                replies.append(Message(content, reply_to=message))
        return replies


def site(client, role="source", counts=(3, 4)):
    return {"client": client, "role": role, "holds": client, "examples": sum(counts), "class-counts": list(counts)}


def roster(nodes, target=""):
    grid = Nodes(nodes)
    return Roster(grid, ["a", "b"], 2, {"token": "t"}, target), grid


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(handshake, "POLL_SECONDS", 0.01)


def settings(**words):
    return RunSettings(**{"wait_for_sites": 0.1, "patience": 0, **words})


def test_all_are_found_once():
    roster_, grid = roster({11: site("b"), 12: site("a"), 13: site("c")})
    roster_.gather(settings())
    assert {client: found.node_id for client, found in roster_.sites.items()} == {"a": 12, "b": 11}
    assert list(roster_.sites) == ["a", "b"]
    roster_.gather(settings(), ["a", "b"])
    assert sorted(grid.asked) == [11, 12, 13]


def test_who_is_missing_is_named_after_a_bounded_wait():
    roster_, _ = roster({12: site("a"), 13: site("c")})
    started = time.monotonic()
    with pytest.raises(ClientFailedError, match=r"no node for b within 0.1 s; online: a; .* does not need: c"):
        roster_.gather(settings())
    assert time.monotonic() - started < 2


def test_the_first_of_two_waits_ends_with_the_last_site():
    roster_, grid = roster({12: site("a")})
    grid.nodes[11] = None  # connected, and its answer takes longer
    with pytest.raises(ClientFailedError, match="1 of the nodes online have not answered yet"):
        roster_.gather(settings(wait_for_sites=0.05))
    grid.nodes[11] = site("b")
    assert roster_.call(5.0) == []
    assert grid.asked.count(11) == 1


def test_a_question_that_was_lost_is_asked_again(monkeypatch):
    monkeypatch.setattr(handshake, "ASK_AGAIN_SECONDS", 0.05)
    roster_, grid = roster({11: None, 12: site("a")})
    assert roster_.call(0.02) == ["b"]
    lost = dict(grid._pending)
    grid.nodes[11] = site("b")
    grid.pull_messages = lambda ids, pull=grid.pull_messages: pull([key for key in ids if key not in lost])
    assert roster_.call(5.0) == []
    assert grid.asked.count(11) == 2


def test_a_site_that_comes_back_as_another_node_is_found_by_name():
    roster_, grid = roster({11: site("a"), 12: site("b")})
    roster_.gather(settings())
    del grid.nodes[12]
    assert roster_.missing() == []
    assert roster_.call(0.0) == ["b"]
    grid.nodes[99] = site("b")
    roster_.gather(settings(wait_for_sites=5.0), ["a", "b"])
    assert roster_.sites["b"].node_id == 99


def test_a_node_that_was_away_is_asked_again():
    """The machine may have changed in the meantime."""
    roster_, grid = roster({11: site("a"), 12: site("b")})
    roster_.gather(settings())
    away = grid.nodes.pop(12)
    roster_.call(0.0)
    grid.nodes[12] = away
    roster_.call(0.0)
    assert grid.asked.count(12) == 2


def test_continue_goes_on_with_the_rest():
    """At the start the run waits for the other clients, but not in a round; without any client there is no run."""
    roster_, grid = roster({11: site("a")})
    run = settings(on_client_failure="continue", wait_for_sites=0.2)
    started = time.monotonic()
    roster_.gather(run)
    assert time.monotonic() - started >= 0.2
    assert roster_.sites["b"].node_id == UNANSWERED
    started = time.monotonic()
    roster_.gather(run, ["a", "b"])
    assert time.monotonic() - started < 0.2
    del grid.nodes[11]
    with pytest.raises(ClientFailedError, match="no node for a, b"):
        roster_.gather(run, ["a", "b"])


def test_a_site_that_comes_back_broken_is_missing_when_others_may_go_on():
    roster_, grid = roster({11: site("a"), 12: site("b")})
    roster_.gather(settings(on_client_failure="continue"))
    del grid.nodes[12]
    roster_.call(0.0)
    grid.nodes[12] = Error(2, f"{USER_ERROR}no folder photo")
    roster_.call(0.0)
    assert roster_.missing() == ["b"]


def test_the_target_has_a_role():
    """A source site with the target's domain is not the target site."""
    roster_, grid = roster({11: site("a"), 12: site("b"), 13: site("z")}, target="z")
    with pytest.raises(ClientFailedError, match="no node for z"):
        roster_.gather(settings())
    grid.nodes[14] = site("z", "target")
    roster_.gather(settings())
    assert roster_.target.node_id == 14


def test_two_nodes_of_one_client_are_refused():
    roster_, _ = roster({11: site("a"), 12: site("a"), 13: site("b")})
    with pytest.raises(UserError, match="two nodes say that they are 'a'"):
        roster_.gather(settings())


def test_a_node_that_goes_before_it_answers_is_asked_again():
    roster_, grid = roster({11: site("a"), 12: Error(5, "Node Unavailable")})
    assert roster_.call(0.05) == ["b"]
    grid.nodes[12] = site("b")
    assert roster_.call(1.0) == []


@pytest.mark.parametrize(
    ("said", "kind", "reason"),
    [
        (Error(2, f"Trace\n{USER_ERROR}no folder photo"), UserError, "^no folder photo$"),
        (Error(2, "Traceback\nKeyError: 'x'"), ClientFailedError, "KeyError: 'x'"),
        (site("a", counts=(3, 4, 5)), UserError, "has 3 classes, the experiment 2"),
        ({**site("a"), "examples": 10**12}, UserError, "1000000000000 examples"),
        ({**site("a"), "examples": 8}, UserError, "8 examples but 7 labels"),
        ({**site("a"), "class-counts": [-1, 8]}, ClientFailedError, "not whole numbers"),
        ({**site("a"), "examples": "many"}, ClientFailedError, "not whole numbers"),
        ({"client": "a"}, ClientFailedError, "node 11 .*\\n.*with the role None"),
    ],
    ids=str,
)
def test_what_a_broken_node_says_ends_the_handshake_with_its_reason(said, kind, reason):
    roster_, _ = roster({11: said, 12: site("b")})
    with pytest.raises(kind, match=reason):
        roster_.gather(settings())


class Key:
    """The server's knowledge of a node's key."""

    def __init__(self, name, domain, role="source"):
        self.site, self.domain, self.role = name, domain, role

    def serves(self, client, role):
        return (client, role) == (self.domain, self.role)


def with_keys(nodes, keys):
    grid = Nodes(nodes)
    return Roster(grid, ["a", "b"], 2, {"token": "t"}, "", keys.get), grid


def test_a_node_is_admitted_in_the_role_of_its_key_alone(caplog):
    """Node 13 has the key of another site and says that it is "a", before and after the correct site came."""
    keys = {11: Key("alpha", "a"), 12: Key("beta", "b"), 13: Key("gamma", "c")}
    roster_, grid = with_keys({13: site("a"), 12: site("b")}, keys)
    assert roster_.call(0.0) == ["a"]
    grid.nodes[11] = site("a")
    roster_.gather(settings())
    assert (roster_.sites["a"].node_id, roster_.sites["b"].node_id) == (11, 12)
    assert "site 'gamma' claims to be 'a' (source), but its key is that of 'c' (source)" in caplog.text


def test_a_node_without_a_registered_key_is_nobody():
    """It is refused even when its answers are correct; the message about the wait names it."""
    roster_, _ = with_keys({11: site("a"), 12: site("b")}, {11: Key("alpha", "a")})
    with pytest.raises(ClientFailedError, match=r"no node for b .*an unknown node, which claims to be 'b'"):
        roster_.gather(settings())


def test_the_key_of_a_target_site_does_not_train():
    """A key is registered together with a role."""
    roster_, _ = with_keys({11: site("a"), 12: site("b")}, {11: Key("alpha", "a"), 12: Key("beta", "b", "target")})
    assert roster_.call(0.0) == ["b"]


@pytest.mark.parametrize(("count", "refused"), [(700, False), (710, True), (10**9, True)])
def test_a_count_far_from_the_others_is_refused(count, refused):
    """When the other site has 7 examples, 100 times as many are accepted, but not 10^9."""
    roster_, _ = roster({11: site("a"), 12: site("b", counts=(count, 0))})
    if refused:
        with pytest.raises(UserError, match=rf"client 'b': it reports {count} examples, .* the others \(7\)"):
            roster_.gather(settings())
    else:
        roster_.gather(settings())
    roster_, _ = roster({11: site("a"), 12: site("b", counts=(count, 0))})
    roster_.gather(settings(on_client_failure="continue"))
    assert roster_.missing() == (["b"] if refused else [])


def test_a_site_that_fails_at_first_is_named_and_left_out_with_continue(caplog):
    """`continue` counts from the first handshake on, and the log knows the site's name."""
    keys = {11: Key("alpha", "a"), 12: Key("beta", "b")}
    roster_, _ = with_keys({11: site("a"), 12: Error(2, f"{USER_ERROR}no folder photo")}, keys)
    roster_.gather(settings(on_client_failure="continue"))
    assert roster_.missing() == ["b"]
    assert "site 'beta' (b) fails in the handshake" in caplog.text


def test_a_lost_site_is_waited_for_once_with_continue():
    """The patience starts when the site is lost, and does not start again in every phase."""
    roster_, grid = roster({11: site("a"), 12: site("b")})
    run = settings(on_client_failure="continue", patience=0.3)
    roster_.gather(run)
    del grid.nodes[12]
    for least, most in ((0.3, 2.0), (0.0, 0.2)):
        started = time.monotonic()
        roster_.gather(run, ["a", "b"])
        assert least <= time.monotonic() - started < most


@pytest.mark.parametrize("mode", ["stop", "continue"])
@pytest.mark.parametrize(
    ("counts", "reason"), [((5 * 10**8, 5 * 10**8), "1000000000 examples"), ((1, 1), "with it client 'a' would be")]
)
def test_a_site_that_comes_back_within_a_phase_has_plausible_examples(mode, counts, reason, caplog):
    """It comes back as another node, between two calls of `gather`; with its old number it is taken back."""
    roster_, grid = roster({11: site("a", counts=(300, 400)), 12: site("b", counts=(300, 400))})
    roster_.gather(settings(on_client_failure=mode))
    del grid.nodes[12]
    grid.nodes[13] = site("b", counts=counts)
    if mode == "stop":
        with pytest.raises(UserError, match=reason):
            roster_.call(0.0)
    else:
        assert roster_.call(0.0) == ["b"]
        assert reason in caplog.text
    assert roster_.sites["b"].examples == 700
    grid.nodes[14] = site("b", counts=(300, 400))
    assert roster_.call(0.0) == []
    assert roster_.sites["b"].node_id == 14
