"""What our SuperLink does beside Flower's: nobody waits for replies that a dead SuperNode owes."""

import pytest
from flwr.server.superlink.linkstate import SqlLinkState
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes, Node
from flwr.superlink.federation import NoOpFederationManager
from sqlalchemy import select, update

from fedsim.deploy.superlink import giving_up


@pytest.mark.parametrize(("number", "stored"), [(7, 7), (2**64 - 7, -7)])
def test_a_new_supernode_owes_nothing_of_what_its_predecessor_fetched(number, stored, tmp_path):
    state = SqlLinkState(str(tmp_path / "link.db"), NoOpFederationManager(), InMemoryObjectStore())
    state.initialize()
    state.create_node("aid", "name", b"key", 30.0)
    sent = {"owed": (stored, "then"), "answered": (stored, "then"), "waits": (stored, ""), "other": (5, "then")}
    with state.session() as session:
        session.execute(update(Node).values(node_id=stored))
        for name, (node, fetched) in sent.items():
            session.add(MessageIns(message_id=name, dst_node_id=node, delivered_at=fetched, ttl=9.0, created_at=0.0))
        session.add(MessageRes(message_id="reply", reply_to_message_id="answered", delivered_at=""))
    for admitted, seconds in ((True, 0.0), (False, 9.0)):  # while it is online, another one with its key is turned away
        assert giving_up(SqlLinkState.activate_node)(state, number, 30.0) == admitted
        with state.session() as session:
            lasting = dict(session.execute(select(MessageIns.message_id, MessageIns.ttl)).all())
            session.execute(update(MessageIns).values(ttl=9.0))
        assert lasting == dict.fromkeys(sent, 9.0) | {"owed": seconds}
