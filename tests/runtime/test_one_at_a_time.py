"""In a phase only one message and one reply at a time are in memory, whatever the number of clients."""

import gc
import weakref

import pytest
from flwr.app import Error, Message, RecordDict
from support import tiny_experiment

from fedsim.flower.identity import assume_identity, stamp
from fedsim.runs import workspace
from fedsim.runs.workspace import close_workspaces
from fedsim.runtime.launch import launch
from fedsim.runtime.local_grid import InlineGrid
from strategies.wire.grids import PatientGrid
from strategies.wire.matching import Sent


class Quiet:
    """The exchange of messages whose replies are never lost."""

    roster = None


def test_messages_are_made_when_they_are_sent_and_replies_are_not_kept():
    made, alive = [], []
    grid = InlineGrid(lambda message, context: Message(RecordDict(), reply_to=message), 5)

    def messages():
        for node in grid.node_ids:
            made.append(node)
            yield Message(RecordDict(), node, "train")

    for count, reply in enumerate(PatientGrid(grid, Quiet(), 5.0).send_and_receive(messages()), start=1):
        assert len(made) == count
        alive = [reference for reference in alive if reference() is not None]
        assert len(alive) <= 1  # the previous one, to which this loop's variable referred
        alive.append(weakref.ref(reply))
        del reply
        gc.collect()
        assert alive[-1]() is None or len(alive) == 1
    assert made == grid.node_ids


@pytest.mark.parametrize("side_by_side", [1, 3])
def test_a_client_keeps_no_tensors_of_a_message(tmp_path, side_by_side):
    """It would keep them until it is drawn again; what it must keep is in its store. SCAFFOLD sends more tensors."""
    close_workspaces()
    train = {"side_by_side": side_by_side, "momentum": 0.0}
    launch(tiny_experiment(tmp_path, "scaffold", train=train, run={"processes": 1}))
    clients = [client for space in workspace._open.values() for client in space.clients.values()]
    assert len(clients) == 3
    assert not any(client.records or client.outbox for client in clients)


def answer(message, error=False):
    return Message(Error(5, "gone"), reply_to=message) if error else Message(RecordDict(), reply_to=message)


def test_a_reply_finds_its_message_by_the_id_that_sending_gave_it():
    assume_identity(1)
    sent = Sent()
    first, second = (sent.add(name, Message(RecordDict(), node, "train")) for name, node in (("a", 7), ("b", 8)))
    assert sent.awaited(answer(first)) == ""  # it has no id yet
    for number, message in enumerate((first, second)):
        stamp(message, f"m{number}")
    assert sent.awaited(answer(first)) == "a"
    assert sent.match(answer(second)) == "b"
    assert sent.awaited(answer(second)) == ""
    assert sent.match(answer(second)) == ""
    assert "answered before" in sent.strays[-1]
    foreign = answer(first)
    foreign.metadata.__dict__["_src_node_id"] = 8
    assert sent.match(foreign) == ""
    assert "it comes from node 8, not 7" in sent.strays[-1]
    again = sent.add("a", Message(RecordDict(), 9, "train"))
    stamp(again, "m2")
    assert sent.awaited(answer(first)) == ""
    assert sent.match(answer(first)) == ""  # the message was made again
    assert "answers no message" in sent.strays[-1]
    assert sent.match(answer(again, error=True)) == "a"
