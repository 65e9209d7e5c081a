"""Clients are known by name: nodes come late, leave, and return with other ids; each wait has a limit."""

import itertools
import time
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

from fedsim.common.errors import USER_ERROR, ClientFailedError, UserError
from fedsim.flower.identity import assume_identity, stamp
from fedsim.settings import RunSettings
from strategies.wire import handshake
from strategies.wire.handshake import Roster
from strategies.wire.sites import UNANSWERED

ECHO = ConfigRecord({"token": "t", "client": "", "round": 0, "phase": "handshake"})
AWAY, BROKEN = Error(5, "Node Unavailable"), Error(2, f"Trace\n{USER_ERROR}no folder photo")


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


def site(client, role="source", counts=(3, 4), **more):
    counted = {"examples": sum(counts), "class-counts": list(counts)}
    return {"client": client, "role": role, "holds": client, **counted, **more}


def roster(nodes, target="", keys=None, clients=("a", "b")):
    grid = Nodes(nodes)
    return Roster(grid, list(clients), 2, {"token": "t"}, target, *([keys.get] if keys else [])), grid


def key(name, domain, role="source"):
    """The server's knowledge of a node's key."""
    serves = lambda *asked: asked == (domain, role)  # noqa: E731
    return SimpleNamespace(site=name, domain=domain, role=role, serves=serves)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(handshake, "POLL_SECONDS", 0.005)


def settings(mode="stop", wait_for_sites=0.05, **words):
    return RunSettings(**{"wait_for_sites": wait_for_sites, "patience": 0, "on_client_failure": mode, **words})


def seconds(call, *words):
    started = time.monotonic()
    call(*words)
    return time.monotonic() - started


@pytest.mark.parametrize(
    ("nodes", "keys", "kind", "said"),
    [
        ({12: site("a"), 13: site("c")}, None, ClientFailedError, "no node for b within 0.05 s; online: a; .* need: c"),
        ({n: site(f"x{n}") for n in range(20, 50)}, None, ClientFailedError, "a, b .*need: x20, .*x29 and 20 more$"),
        ({12: site("a"), 11: None}, None, ClientFailedError, "1 of the nodes online have not answered yet"),
        ({11: site("a"), 12: site("a"), 13: site("b")}, None, UserError, "two nodes say that they are 'a'"),
        ({11: site("a"), 12: site("b")}, {11: key("alpha", "a")}, ClientFailedError,
         "no node for b .*an unknown node, which claims to be 'b'"),  # although its answers are correct
        ({11: BROKEN, 12: site("b")}, None, UserError, "^no folder photo$"),
        ({11: Error(2, "Traceback\nKeyError: 'x'"), 12: site("b")}, None, ClientFailedError, "KeyError: 'x'"),
        ({11: site("a", counts=(3, 4, 5)), 12: site("b")}, None, UserError, "has 3 classes, the experiment 2"),
        ({11: site("a", examples=10**12), 12: site("b")}, None, UserError, "1000000000000 examples"),
        ({11: site("a"), 12: site("b", counts=(710, 0))}, None, UserError,
         r"client 'b': it reports 710 examples, .* the others \(7\)"),
    ],
)  # fmt: skip
def test_what_is_missing_or_broken_is_named_after_a_bounded_wait(nodes, keys, kind, said):
    roster_, _ = roster(nodes, keys=keys)
    with pytest.raises(kind, match=said):
        assert seconds(roster_.gather, settings()) < 2


@pytest.mark.parametrize(
    ("nodes", "starting", "level"),
    [
        ({12: site("a"), 11: None}, 60.0, "INFO"),  # the process of b starts
        ({12: site("a"), 11: None}, 0.0, "WARNING"),  # it does so for too long
        ({12: site("a")}, 60.0, "WARNING"),  # nobody is there who may be b
        ({11: None}, 60.0, "WARNING"),  # one node cannot be both
    ],
)
def test_a_site_whose_process_starts_is_no_warning(nodes, starting, level, monkeypatch, caplog):
    """`fedsim run` shows the warnings of the server app: on a busy machine the first line of a run was one."""
    monkeypatch.setattr(handshake, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(handshake, "STARTING_SECONDS", starting)
    with caplog.at_level("INFO", "fedsim"):
        roster(nodes)[0].call(0.05)
    levels = [record.levelname for record in caplog.records if record.message.startswith("waiting for")]
    assert levels == [level]


def test_a_question_is_asked_again_where_it_or_its_node_was_lost(monkeypatch):
    monkeypatch.setattr(handshake, "ASK_AGAIN_SECONDS", 0.03)
    roster_, grid = roster({11: None, 12: site("a")})
    assert roster_.call(0.02) == ["b"]
    lost = dict(grid._pending)
    grid.nodes[11] = site("b")
    grid.pull_messages = lambda ids, pull=grid.pull_messages: pull([key for key in ids if key not in lost])
    assert roster_.call(5.0) == []
    assert grid.asked.count(11) >= 2
    for said, asked in ((None, 1), (AWAY, 2)):
        roster_, grid = roster({11: said, 12: site("a")})
        assert roster_.call(0.02) == ["b"]
        grid.nodes[11] = site("b")
        assert roster_.call(5.0) == []
        assert grid.asked.count(11) >= asked == 1 + bool(said)


def test_all_are_found_once_and_who_comes_back_is_asked_again_and_found_by_name_under_another_node():
    """The machine may have changed in the meantime."""
    roster_, grid = roster({11: site("b"), 12: site("a"), 13: site("c")})
    for clients in ([], [["a", "b"]]):
        roster_.gather(settings(), *clients)
        assert [(client, found.node_id) for client, found in roster_.sites.items()] == [("a", 12), ("b", 11)]
        assert sorted(grid.asked) == [11, 12, 13]
    away = grid.nodes.pop(11)
    assert roster_.missing() == []
    assert roster_.call(0.0) == ["b"]
    grid.nodes[11] = away
    assert roster_.call(0.0) == []
    assert grid.asked.count(11) == 2
    grid.nodes[99] = grid.nodes.pop(11)
    roster_.gather(settings(wait_for_sites=5.0), ["a", "b"])
    assert roster_.sites["b"].node_id == 99


def test_continue_waits_for_the_rest_at_the_start_but_not_in_a_round():
    roster_, grid = roster({11: site("a")})
    run = settings("continue", 0.1)
    assert seconds(roster_.gather, run) >= 0.1
    assert roster_.sites["b"].node_id == UNANSWERED
    assert seconds(roster_.gather, run, ["a", "b"]) < 0.1
    grid.nodes = {12: site("b")}
    run = settings("continue", patience=0.15)  # for a lost site it starts once, and not in every phase
    for least, most in ((0.15, 2.0), (0.0, 0.1)):
        assert least <= seconds(roster_.gather, run, ["a", "b"]) < most
    grid.nodes.clear()
    with pytest.raises(ClientFailedError, match="no node for a, b"):
        roster_.gather(run, ["a", "b"])


def test_a_site_that_fails_at_first_or_comes_back_broken_is_left_out_with_continue(caplog):
    roster_, grid = roster({11: site("a"), 12: BROKEN}, keys={11: key("alpha", "a"), 12: key("beta", "b")})
    roster_.gather(settings("continue"))
    assert roster_.missing() == ["b"]
    assert "site 'beta' (b) fails in the handshake" in caplog.text
    for said, missing in ((None, ["b"]), (site("b"), []), (None, ["b"]), (BROKEN, ["b"])):
        grid.nodes.pop(12, None)
        grid.nodes |= {12: said} if said else {}
        assert roster_.call(0.0) == missing


def test_a_node_is_admitted_in_the_role_of_its_key_alone(caplog):
    """Node 13 has the key of another site and says that it is "a", before and after the correct site came. A source
    site with the target's domain is not the target site, and the key of a target site does not train."""
    keys = {node: key(*own) for node, own in ((11, "ua"), (12, "vb"), (13, "wc"), (14, "xd"))}
    roster_, grid = roster({13: site("a"), 14: site("x" * 10**6), 12: site("b")}, keys=keys)
    assert roster_.call(0.0) == ["a"]
    grid.nodes[11] = site("a")
    roster_.gather(settings())
    assert (roster_.sites["a"].node_id, roster_.sites["b"].node_id) == (11, 12)
    assert "site 'w' claims to be 'a' (source), but its key is that of 'c' (source)" in caplog.text
    assert len(caplog.text) < 2000
    roster_, grid = roster({11: site("a"), 12: site("b"), 13: site("z")}, target="z")
    with pytest.raises(ClientFailedError, match="no node for z"):
        roster_.gather(settings())
    grid.nodes[14] = site("z", "target")
    roster_.gather(settings())
    assert roster_.target.node_id == 14
    keys = {11: key("alpha", "a"), 12: key("beta", "b", "target")}
    assert roster({11: site("a"), 12: site("b")}, keys=keys)[0].call(0.0) == ["b"]


@pytest.mark.parametrize("mode", ["stop", "continue"])
@pytest.mark.parametrize(
    ("counts", "reason"), [((5 * 10**8, 5 * 10**8), "1000000000 examples"), ((1, 1), "with it client 'a' would be")]
)
def test_a_site_that_comes_back_within_a_phase_has_plausible_examples(mode, counts, reason, caplog):
    """It comes back as another node, between two calls of `gather`; with its old number it is taken back."""
    roster_, grid = roster({11: site("a", counts=(300, 400)), 12: site("b", counts=(300, 400))})
    roster_.gather(settings(mode))
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


def with_data(client, content="1" * 20, **more):
    """A site's answer with what its data are; however its images change, it has seven."""
    data = {"data-images": 7, "data-content": content, "data-environment": 0}
    return site(client, "target" if client == "c" else "source", **data, **more)


# Node 0: the one that it had, as a SuperNode that starts again with its key.
@pytest.mark.parametrize(("mode", "node", "client"), [("stop", 99, "a"), ("stop", 0, "c"), ("continue", 0, "a")])
def test_a_site_that_comes_back_with_other_data_is_refused(mode, node, client):
    """With "continue" it is missing, and refused again when it tries again, until it has its former data."""
    nodes = {1: with_data("a"), 2: with_data("b"), 3: with_data("c")}
    roster_, _ = roster(nodes, "c")
    roster_.gather(settings(mode, 1.0))
    own = 1 if client == "a" else 3
    for content in ("2" * 20, "3" * 20, "1" * 20):
        nodes.pop(own, None)
        nodes.pop(node, None)
        assert roster_.call(0.0, [client]) == [client]
        nodes[node or own] = with_data(client, content)
        if mode == "stop":
            with pytest.raises(UserError, match=f"client '{client}' came back with other data .*7 images as before"):
                roster_.call(0.0, [client])
            return
        assert roster_.call(0.05, [client]) == ([client] if content != "1" * 20 else [])


def test_the_data_of_a_late_site_that_is_refused_are_not_recorded():
    """Its number of examples would dominate the average; when it comes with a plausible one, its data count."""
    roster_, grid = roster({1: with_data("a"), 2: with_data("b")}, clients=("a", "b", "d"))
    recorded = {}
    roster_.gather(settings("continue"))
    roster_.check_late = lambda late: recorded.update({late.client: late.data})
    grid.nodes[4] = {**with_data("d", "2" * 20), "examples": 10**9, "class-counts": [10**9, 0]}
    assert roster_.call(0.05, ["d"]) == ["d"]
    assert recorded == {}
    grid.nodes[5] = with_data("d")
    assert roster_.call(0.05, ["d"]) == []
    assert recorded["d"]["content"] == "1" * 20


@pytest.mark.parametrize(("count", "missing"), [(700, []), (710, ["b"]), (10**9, ["b"])])
def test_a_count_a_hundred_times_that_of_the_others_is_the_most(count, missing):
    roster_, _ = roster({11: site("a"), 12: site("b", counts=(count, 0))})
    roster_.gather(settings("continue"))
    assert roster_.missing() == missing
