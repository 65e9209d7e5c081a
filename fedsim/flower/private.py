"""All that fedsim uses of Flower and that is not public, in one table, and what is said where a version lacks it.

Flower's interfaces move with its minor versions. Every other module gets these names from here, by `private` or
`replace`; a test shows that none imports them by itself. A version that lacks one is refused in one line.
"""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from fedsim.common.about import installed_version
from fedsim.common.errors import UserError

VERSIONS = "flwr>=1.41,<1.43"  # that pass the tests; the range of pyproject.toml

PRIVATE = {
    # a grid of our own
    "flwr.supercore.run:Run": "the run to which the messages of a simulation belong",
    "flwr.supercore.task_identity:TaskIdentity": "the node in whose name messages are made",
    # messages as one record
    "flwr.common.serde:recorddict_to_proto": "a message's content as protobuf",
    "flwr.common.serde:recorddict_from_proto": "the content that protobuf holds",
    "flwr.proto.recorddict_pb2:RecordDict": "the form of that protobuf",
    # replies that are fetched part by part, and refused when they are too large
    "flwr.superlink.grid.http_grid:HttpGrid": "the grid of a SuperLink",
    "flwr.superlink.grid.http_grid:HttpGrid._runtime_client": "the connection of a server app to the SuperLink",
    "flwr.app.message:Array": "the kind of a part that joins others",
    "flwr.proto.runtime_pb2:PullAppMessagesRequest": "the question for replies",
    "flwr.proto.message_pb2:ConfirmMessageReceivedRequest": "the word that a reply has come whole",
    "flwr.supercore.inflatable.inflatable_object:get_object_body": "the content of a part",
    "flwr.supercore.inflatable.inflatable_object:get_object_head_values_from_object_content": "the kind of a part",
    "flwr.supercore.inflatable.inflatable_object:iterate_object_tree": "the parts of a reply",
    "flwr.supercore.inflatable.inflatable_utils:ObjectPullError": "a part that will never come",
    "flwr.supercore.inflatable.inflatable_utils:ObjectUnavailableError": "a part that has not come yet",
    "flwr.supercore.inflatable.inflatable_utils:inflate_object_from_contents": "a reply from its parts",
    "flwr.supercore.inflatable.inflatable_protobuf_utils:make_pull_object_fn_protobuf": "what fetches a part",
    # the SuperLink behind our gate
    "flwr.proto.fleet_pb2:PushMessagesRequest": "a site's reply, which the gate reads",
    "flwr.supercore.sql_mixin:SQLITE_PRAGMAS": "how long a write to the SuperLink's database waits",
    "flwr.server.superlink.linkstate:SqlLinkState.activate_node": "the admission of a SuperNode",
    "flwr.server.superlink.linkstate:SqlLinkState.acknowledge_node_heartbeat": "the heartbeat of a SuperNode",
    "flwr.common.constant:HEARTBEAT_DEFAULT_INTERVAL": "the interval for which every SuperNode asks",
    "flwr.supercore.state.schema.linkstate_models:MessageIns": "the messages that sites have fetched",
    "flwr.supercore.state.schema.linkstate_models:MessageRes": "the replies to them",
    "flwr.superlink.extensions:get_middleware": "the place for the gate",
    "flwr.superlink.cli.flower_superlink:flower_superlink": "the SuperLink itself",
    # the SuperNode of a site
    "flwr.supernode.cli.flower_supernode:flower_supernode": "the SuperNode itself",
    "flwr.supernode.cli.flower_supernode:start_client_internal": "its start, with the entities that it trusts",
    "flwr.supernode.fleet_http_connection:FleetHttpClient": "its connection, whose contacts are noted",
    "flwr.supernode.fleet_http_connection:make_confirm_message_received_fn_protobuf": "its word that it has a message",
    "flwr.supernode.fleet_http_connection:make_simple_http_retry_invoker": "which failures it tries again after",
    "flwr.supercore.heartbeat:exponential": "its waits after a failed heartbeat",
    "flwr.supernode.start_client_internal:time": "its waits between two questions for work",
    "flwr.supernode.start_client_internal:pull_objects": "how it fetches the parts of a message",
    "flwr.supernode.start_client_internal:_verify_fab": "its check of an app bundle",
    "flwr.supercore.run:RunNotRunningException": "a run that ended while a message was fetched",
    "flwr.common.config:parse_config_args": "how a site's settings are read",
    "flwr.supercore.inflatable.inflatable_utils:pull_objects.__kwdefaults__": "how often it looks for missing parts",
    # the warm client process, and app bundles
    "flwr.supernode.cli.flwr_clientapp:flwr_clientapp": "the program that does one task",
    "flwr.supernode.runtime.run_clientapp:flwr_exit": "the end of the task's process",
    "flwr.supernode.runtime.run_clientapp:start_parent_process_monitor": "the watch on the process that started it",
    "flwr.supernode.runtime.run_clientapp:install_from_fab": "the installation of an app bundle",
    "flwr.cli.build:build_fab_from_disk": "the bundle that `flwr run` submits",
    "flwr.supercore.exit.exit_handler:trigger_exit_handlers": "what Flower does before a task's process ends",
}


def private(place: str) -> Any:
    """What stands at a place `module:name` of the table; UserError where the installed Flower has nothing there."""
    use = PRIVATE[place]
    module, _, name = place.partition(":")
    try:
        return functools.reduce(getattr, name.split("."), import_module(module))
    except (ImportError, AttributeError):
        raise UserError(
            f"Flower {installed_version('flwr')} has no {name} in {module} ({use}), which fedsim needs here; install a "
            f"version that works: pip install '{VERSIONS}'"
        ) from None


def replace(place: str, make: Callable[[Any], Any]) -> None:
    """Put `make(what stands at a place)` there, in this process."""
    new = make(private(place))
    module, _, name = place.partition(":")
    *owner, last = name.split(".")
    setattr(functools.reduce(getattr, owner, import_module(module)), last, new)
