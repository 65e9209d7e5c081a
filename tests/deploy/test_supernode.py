"""What the SuperNode of a kit does otherwise than Flower's."""

import contextlib
from importlib import import_module
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from flwr.supercore.run import RunNotRunningException

from fedsim.common.errors import UserError
from fedsim.deploy.supernode import CONFIRM, CONNECTION, check_node_config, confirming, failing_with_the_run
from fedsim.flower.private import private


def ends(*words):
    """The SuperLink's answer about a run that has ended."""
    raise RunNotRunningException


def receive(internal, pull, confirm):
    """Flower's receiving of one message: the node's state and its store of parts."""
    state, store = Mock(), Mock()
    state.create_task.return_value = 7
    store.preregister.return_value = ["part"]
    metadata = SimpleNamespace(run_id=1, message_id="m", message_type="train", group_id="")
    received = internal._pull_and_store_message(
        state=state, object_store=store, node_config={}, receive=lambda: (SimpleNamespace(metadata=metadata), Mock()),
        get_run=Mock(), get_fab=Mock(), pull_object=pull, confirm_message_received=confirm, trusted_entities=None,
    )  # fmt: skip
    assert received is None
    return state, store


@pytest.mark.parametrize("where", ["parts", "confirmation"])
def test_the_task_of_a_run_that_ends_meanwhile_ends_too(monkeypatch, where):
    """The client, which may wait for the message's parts already, must not wait on: it does one task at a time, and the
    next run's would come after Flower's 500 tries. If the client answered a message that was not confirmed, that answer
    would be sent instead of the next one, which would be sent instead of the one after it, and so on."""
    internal = import_module("flwr.supernode.start_client_internal")
    pull, confirm = (ends, Mock()) if where == "parts" else (lambda run, part: b"content", ends)
    state, _ = receive(internal, pull, confirm)
    assert not state.finish_task.called, "Flower ends the task itself now: this patch can go"
    monkeypatch.setattr(internal, "pull_objects", failing_with_the_run(internal.pull_objects))
    state, store = receive(internal, pull, failing_with_the_run(confirm))
    assert state.finish_task.call_args.args == (7,)
    assert "the run has ended" in state.finish_task.call_args.kwargs["details"]
    state.delete_messages.assert_called_once_with(message_ids=["m"])
    store.delete.assert_called_once_with("m")


def test_each_connection_confirms_so():
    private(f"{CONNECTION}{CONFIRM}")
    with pytest.raises(RuntimeError, match="the run has ended"):
        confirming(lambda *words: ends)(Mock(), Mock(), 1)("m")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("dp_clip=0.5 dp_epsilon=1.0", "'dp_clip' is unknown"),
        ("dp-clip = 0.5 dp-epsilon = 1.0", "is not key=value"),
        ("dp-clip=0,5 dp-epsilon=1.0", "cannot read this site's settings"),
        ("dp-clip=.5 dp-epsilon=1.0", "cannot read this site's settings"),
        ("dp-clip=0.5 dp-clip=0.5", "cannot read this site's settings"),
        ("dp-epsilon=1.0", "without dp-clip"),
        ("data-dir='/home/o'brien/data' dp-clip=0.5 dp-epsilon=1.0", "is not key=value"),
        ("dp-clip=0.5 dp-epsilon=1.0 data-dir='/data/of beta' mine=3", ""),
    ],
)
def test_a_node_config_that_flower_would_read_otherwise_is_refused_at_the_start(more, said):
    """Flower leaves out what does not look like a pair, and with it the site's privacy."""
    words = ["--superlink", "a:1", "--node-config", f"site='alpha' domain='rot0' role='source' {more}"]
    with pytest.raises(UserError, match=said) if said else contextlib.nullcontext():
        check_node_config(words)
