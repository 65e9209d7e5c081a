"""Ray workers: the order of messages, workers that die or are late, exceptions, and what is sent to them."""

import pickle

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedsim.runtime.parcel import Parcel
from fedsim.runtime.ray import Shelf, addressee
from fedsim.tensors.arrays import record_to_arrays, state_to_record
from strategies.wire.guard import Guard


def ask(grid, orders, timeout=None, arrays=None):
    """{node: reply}, for one message to each of the nodes 2, 3, 4."""
    messages = []
    for node, order in zip(grid.node_ids, orders):
        content = {"config": ConfigRecord({"order": order, "client": f"domain-{node}"})}
        messages.append(Message(RecordDict({**content, **({"arrays": arrays} if arrays else {})}), node, "query"))
    replies = list(grid.send_and_receive(messages, timeout=timeout))
    by_id = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
    return {by_id[reply.metadata.reply_to_message_id]: reply for reply in replies}


def test_one_worker_serves_its_clients_in_order_and_stays_warm(probes):
    state = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7), "none": np.empty((0, 3))}
    first = ask(probes, ["say"] * 3, arrays=state_to_record(state))
    second = ask(probes, ["say"] * 3)
    where = [reply.content.config_records["where"] for reply in (*first.values(), *second.values())]
    assert len({place["pid"] for place in where}) == 1
    earlier = where[0]["answered"] - 1
    order = [(place["client"], place["answered"] - earlier) for place in where]
    assert order == [(0, 1), (1, 2), (2, 3), (0, 4), (1, 5), (2, 6)]
    for reply in first.values():
        back = record_to_arrays(reply.content.array_records["arrays"])
        assert list(back) == list(state)
        for name, array in state.items():
            np.testing.assert_array_equal(back[name], array)
            assert back[name].dtype == array.dtype


@pytest.mark.slow
def test_a_worker_that_dies_twice_fails_its_client_by_name_and_no_other(probes):
    replies = ask(probes, ["say", "die", "say"])
    assert sorted(replies) == [2, 3, 4]
    assert replies[3].has_error()
    assert "client 'domain-3' died twice (out of memory?)" in replies[3].error.reason
    assert len(replies[3].error.reason.splitlines()) == 1
    assert replies[2].has_content()
    assert replies[4].has_content()


@pytest.mark.slow
def test_a_worker_that_dies_once_is_replaced_and_its_work_repeated(probes, tmp_path):
    """The new process answers all three messages; the only effect is that it takes longer."""
    before = {pid for pid, _ in probes.workers()}
    replies = ask(probes, ["say", f"die {tmp_path / 'note'}", "say"])
    assert sorted(replies) == [2, 3, 4]
    assert all(reply.has_content() for reply in replies.values())
    where = {node: reply.content.config_records["where"]["pid"] for node, reply in replies.items()}
    assert where[3] == where[4] == probes.workers()[0][0]
    assert where[3] not in before
    again = ask(probes, ["say", "say", "die"])
    assert again[4].has_error()  # another death is counted separately: the message is repeated once, then it fails
    assert "client 'domain-4' died twice" in again[4].error.reason
    assert again[2].has_content()


def test_an_exception_comes_back_with_its_traceback(probes):
    """The same process answers the other clients."""
    before = ask(probes, ["say"])[2].content.config_records["where"]
    replies = ask(probes, ["raise", "say", "say"])
    assert "told to raise" in replies[2].error.reason
    assert "Traceback" in replies[2].error.reason
    after = replies[3].content.config_records["where"]
    assert (after["pid"], after["answered"]) == (before["pid"], before["answered"] + 1)


def test_a_late_client_is_missing_and_its_worker_replaced(probes):
    early = ask(probes, ["say"])
    assert ask(probes, ["sleep"], timeout=0.3) == {}
    again = ask(probes, ["say"], timeout=60.0)
    assert again[2].content.config_records["where"]["pid"] != early[2].content.config_records["where"]["pid"]


def test_a_parcel_moves_tensors_out_of_band():
    """Pickle 5 keeps the bytes separately, and the new record uses them without a copy."""
    record = state_to_record({"w": np.arange(1000, dtype=np.float64), "n": np.array(3, dtype=np.int64)})
    buffers = []
    small = pickle.dumps(Parcel(record), protocol=5, buffer_callback=buffers.append)
    assert len(small) < 600
    back = pickle.loads(small, buffers=buffers)
    assert isinstance(back, ArrayRecord)
    assert isinstance(back["w"], Array)
    arrays = record_to_arrays(back)
    np.testing.assert_array_equal(arrays["w"], np.arange(1000))
    assert np.shares_memory(arrays["w"], np.frombuffer(record["w"].data, dtype=np.uint8))


@pytest.mark.parametrize("size", [4, 100_000])
def test_the_shelf_puts_equal_bytes_once(ray_cluster, size):
    """A record with fewer tensors of the same model is not stored again; another model is."""
    state = {name: np.full(size, number, dtype=np.float32) for number, name in enumerate("abc")}
    whole = state_to_record(state)
    part = ArrayRecord({name: whole[name] for name in "ac"})
    shelf = Shelf()
    reference, names = shelf.place(whole)
    assert names is None
    assert isinstance(reference, Parcel) == (size == 4)
    assert shelf.place(part) == (reference, ["a", "c"])
    other, _ = shelf.place(state_to_record(state))
    assert other != reference
    shelf.forget_all_but([other])
    assert shelf.place(part)[0] != reference


def test_the_shelf_keeps_a_model_as_it_was_stored():
    """The guard puts an earlier model back into the record, in place; this is another model than the stored one."""
    record = state_to_record({"w": np.zeros(3, np.float32)})
    shelf = Shelf()
    stored, _ = shelf.place(record)
    Guard.put_back(record, state_to_record({"w": np.ones(3, np.float32)}))
    again, _ = shelf.place(record)
    assert [list(record_to_arrays(parcel.record)["w"]) for parcel in (stored, again)] == [[0, 0, 0], [1, 1, 1]]


def test_a_message_of_the_handshake_is_named_by_its_node():
    message = Message(RecordDict({"config": ConfigRecord({"client": ""})}), 3, "query")
    assert addressee(message) == "node 3"
