"""What forked processes get and send: about the same work, noise of their own, the model as it is when it is sent."""

import os
import time
from contextlib import closing
from unittest.mock import Mock

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from support import small_experiment, tiny_experiment

import fedsim.runtime.watched
from fedsim.flower.identity import assume_identity, stamp
from fedsim.runs.local_privacy import perturbed
from fedsim.runs.plan import resolve
from fedsim.runtime.forked import ForkedGrid, ForkedProcess
from fedsim.runtime.watched import lonely_grid
from fedsim.settings import TrainSettings
from fedsim.tensors.arrays import record_to_arrays, state_to_record
from fedsim.tensors.records import arrays_of


@pytest.fixture
def two_processes():
    """A function that forks two processes of an app; it returns what each answers to the message of a record."""
    started = []

    def forked(app):
        assume_identity(1)
        started.extend(ForkedProcess(app, {2: Context(1, 2, {}, RecordDict(), {})}, [0]) for _ in range(2))
        return started

    yield forked
    for process in started:
        process.give_up()


def answer(process, record):
    """The tensor "w" that the process sends back when it gets this record."""
    message = Message(RecordDict({"arrays": record, "config": ConfigRecord({"round": 1})}), 2, "train")
    stamp(message, "m1")
    process.give(message)
    [(_, reply)] = process.receive()
    assert not reply.has_error(), reply.error.reason
    return record_to_arrays(arrays_of(reply.content)["arrays"])["w"]


def private(message, context):
    """A client that adds 1 to its model, and then noise."""
    trained = RecordDict({"arrays": state_to_record({"w": np.ones(10_000, np.float32)})})
    train = TrainSettings(dp_clip=1.0, dp_epsilon=1.0)
    return Message(perturbed(trained, message, context, train), reply_to=message)


def test_processes_of_one_parent_have_noise_of_their_own(two_processes, monkeypatch):
    """With the same noise, the difference of two perturbed models would be that of the models."""
    monkeypatch.setattr(os, "sched_setscheduler", Mock(side_effect=PermissionError))  # as in some containers
    record = state_to_record({"w": np.zeros(10_000, np.float32)})
    one, other = (answer(process, record) for process in two_processes(private))
    assert one.std() == pytest.approx(2 * np.sqrt(2 * np.log(1.25e5)), rel=0.05)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.05


def test_a_model_is_decoded_once_and_sent_again_when_it_was_put_back(two_processes):
    """The guard changes the record in place, and the processes keep a model that several messages have in common."""
    views = []

    def app(message, _):
        views.append(record_to_arrays(message.content["arrays"])["w"])
        sent = {"w": np.append(views[-1], [views[-1] is views[0], views[-1].flags.writeable])}
        return Message(RecordDict({"arrays": state_to_record(sent)}), reply_to=message)

    process, record = two_processes(app)[0], state_to_record({"w": np.zeros(3, np.float32)})
    record["w"].data = bytearray(record["w"].data)  # which could be written
    assert [list(answer(process, record)) for _ in range(2)] == [[0, 0, 0, True, False]] * 2
    record.__dict__["_data"].update(state_to_record({"w": np.ones(3, np.float32)}))
    assert list(answer(process, record)) == [1, 1, 1, False, False]


def test_a_process_that_is_late_is_ended(tmp_path):
    """Where a time limit was set; the process is forked again when its client is asked again."""

    def hanging(message, context):
        time.sleep(60 if context.node_id == 3 else 0)
        return Message(RecordDict(), reply_to=message)

    grid = ForkedGrid(hanging, resolve(small_experiment(tmp_path, run={"processes": 2, "timeout": 0.3})), 2)

    def replies(*nodes):
        messages = [Message(RecordDict(), node, "train") for node in nodes]
        return [reply.metadata.src_node_id for reply in grid.send_and_receive(messages, timeout=0.3)]

    assert replies(2, 3) == [2]
    assert grid.pids()[1] == 0 < grid.pids()[0]
    assert replies(3) == []
    assert replies(2) == [2]
    grid.close()


def slow(message, context):
    time.sleep(0.4 if context.node_id == 2 else 0.04)  # longer than five others together
    return Message(RecordDict({"pid": ConfigRecord({"pid": os.getpid()})}), reply_to=message)


def served(grid, nodes):
    replies = grid.send_and_receive([Message(RecordDict(), node, "train") for node in nodes])
    return [(reply.metadata.src_node_id, reply.content["pid"]["pid"]) for reply in replies]


def test_a_process_takes_its_own_clients_first_and_those_of_another_rather_than_nothing(tmp_path):
    plan = resolve(tiny_experiment(tmp_path, data={"clients_per_domain": 2}, run={"processes": 2}))
    with closing(ForkedGrid(slow, plan, 6)) as grid:
        first, second, others = (dict(served(grid, range(start, 8))) for start in (2, 2, 3))
        assert {os.sched_getscheduler(pid) for pid in first.values()} == {os.SCHED_BATCH}  # their parent goes first
    assert [list(first.values()).count(pid) for pid in (first[2], first[7])] == [1, 5]
    assert second == first
    assert set(others.values()) == set(first.values())


def test_a_process_that_check_method_gives_a_client_serves_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(fedsim.runtime.watched, "app", slow)
    with closing(lonely_grid(resolve(tiny_experiment(tmp_path)))) as grid:
        first, busy = served(grid, (2, 3, 4)), served(grid, (2, 2, 4))
    assert len({pid for _, pid in first}) == 3
    assert set(busy) < set(first)
