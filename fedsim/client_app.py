"""Flower ClientApp: Message -> DomainClient.fit / evaluate / collect -> Message. The same everywhere."""

import platform
import traceback
from collections.abc import Callable
from importlib.metadata import version

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients.base import DomainClient
from fedsim.arrays import record_to_arrays, state_to_record
from fedsim.errors import USER_ERROR, UserError
from fedsim.workspace import source_clients, workspace

CLIENT_APP_RAISED = 2  # Flower's error code for an exception in the client app

app = ClientApp()


def guarded(handler: Callable[[Message, Context], RecordDict]) -> Callable[[Message, Context], Message]:
    """Turn exceptions into error replies that carry the whole traceback (Flower itself sends one line)."""

    def handle(message: Message, context: Context) -> Message:
        try:
            content = handler(message, context)
        except UserError as error:
            return Message(Error(CLIENT_APP_RAISED, f"{USER_ERROR}{error}"), reply_to=message)
        except Exception:
            return Message(Error(CLIENT_APP_RAISED, traceback.format_exc()), reply_to=message)
        config = message.content.config_records["config"]
        content["echo"] = ConfigRecord({key: config[key] for key in ("token", "client", "round", "phase")})
        return Message(content, reply_to=message)

    return handle


def client_of(message: Message, context: Context) -> tuple[DomainClient, dict]:
    """The warm client that the message addresses, with the message's config."""
    config = dict(message.content.config_records["config"])
    node = context.node_config
    space = workspace(str(config["experiment"]), str(node.get("data-dir", "")))
    return space.client(str(config["client"]), str(node.get("state-dir", config["state-dir"]))), config


@app.query("handshake")
@guarded
def handshake(message: Message, context: Context) -> RecordDict:
    """Which client this node is, how much it holds, with which versions."""
    config = dict(message.content.config_records["config"])
    space = workspace(str(config["experiment"]), str(context.node_config.get("data-dir", "")))
    name = node_client(context, space.experiment)
    site: dict = {"client": name, "examples": 0, "class-counts": []}
    if name:
        data = space.client(name, str(context.node_config.get("state-dir", config["state-dir"]))).data
        site |= {"examples": data.examples, "class-counts": [int(count) for count in data.class_counts]}
    versions = {f"version-{package}": version(package) for package in ("torch", "flwr", "numpy")}
    return RecordDict({"site": ConfigRecord({**site, **versions, "version-python": platform.python_version()})})


def node_client(context: Context, experiment) -> str:
    """Client name of a node: its configured domain, else the partition-id'th source client; empty for a spare node."""
    if "domain" in context.node_config:
        return str(context.node_config["domain"])
    clients = source_clients(experiment)
    index = int(context.node_config.get("partition-id", 0))
    return clients[index] if index < len(clients) else ""


@app.query("collect")
@guarded
def collect(message: Message, context: Context) -> RecordDict:
    """This client's contribution to one of the recipe's banks."""
    client, config = client_of(message, context)
    return RecordDict({config["bank"]: state_to_record(client.collect(config))})


@app.train()
@guarded
def train(message: Message, context: Context) -> RecordDict:
    """Local training on the received tensors."""
    client, config = client_of(message, context)
    records = {name: record_to_arrays(record) for name, record in message.content.array_records.items()}
    parameters = ordered(records.pop("arrays"), client.names("train"))
    client.records = records
    arrays, examples, metrics = client.fit(parameters, config)
    sent = state_to_record(dict(zip(client.upload_names(), arrays, strict=True)))
    extra: dict[str, ArrayRecord] = {name: state_to_record(values) for name, values in client.outbox.items()}
    return RecordDict({"arrays": sent, **extra, "metrics": MetricRecord({"num-examples": examples, **metrics})})


@app.evaluate()
@guarded
def evaluate(message: Message, context: Context) -> RecordDict:
    """Validation of the received model."""
    client, config = client_of(message, context)
    arrays = record_to_arrays(message.content.array_records["arrays"])
    loss, examples, metrics = client.evaluate(ordered(arrays, client.names("evaluate")), config)
    return RecordDict({"metrics": MetricRecord({"num-examples": examples, "loss": loss, **metrics})})


def ordered(arrays: dict, names: list[str]) -> list:
    """Arrays in the client's order; a ValueError names what is missing or not wanted."""
    if arrays.keys() != set(names):
        wrong = sorted(arrays.keys() ^ set(names))
        raise ValueError(f"the server's tensors do not fit this client's share rule: {wrong[:4]}")
    return [arrays[name] for name in names]
