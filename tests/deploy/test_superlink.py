"""What our SuperLink does beside Flower's: nobody waits for replies that a dead SuperNode owes."""

import pytest
from flwr.server.superlink.linkstate import SqlLinkState
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes, Node
from flwr.supercore.utils import uint64_to_int64
from flwr.superlink.federation import NoOpFederationManager
from sqlalchemy import select, update

from fedsim.deploy.superlink import giving_up


@pytest.mark.parametrize("high", [False, True])
def test_a_new_supernode_owes_nothing_of_what_its_predecessor_fetched(high, tmp_path):
    state = SqlLinkState(str(tmp_path / "link.db"), NoOpFederationManager(), InMemoryObjectStore())
    state.initialize()
    activate, number = giving_up(SqlLinkState.activate_node), 2**64 - 7 if high else 7
    stored = uint64_to_int64(number)
    with state.session() as session:
        made = uint64_to_int64(state.create_node("aid", "name", b"key", 30.0))
        session.execute(update(Node).where(Node.node_id == made).values(node_id=stored))
        for name, node, fetched in (("owed", stored, "then"), ("answered", stored, "then"), ("waits", stored, ""),
                                    ("other", 5, "then")):  # fmt: skip
            session.add(MessageIns(message_id=name, dst_node_id=node, delivered_at=fetched, ttl=9.0, created_at=0.0))
        session.add(MessageRes(message_id="reply", reply_to_message_id="answered", delivered_at=""))

    def lasting():
        with state.session() as session:
            return dict(session.execute(select(MessageIns.message_id, MessageIns.ttl)).all())

    everything = {"owed": 9.0, "answered": 9.0, "waits": 9.0, "other": 9.0}
    assert lasting() == everything
    assert activate(state, number, 30.0)
    assert lasting() == {**everything, "owed": 0.0}
    with state.session() as session:
        session.execute(update(MessageIns).values(ttl=9.0))
    assert not activate(state, number, 30.0)  # it is online: another SuperNode with its key is turned away
    assert lasting() == everything
