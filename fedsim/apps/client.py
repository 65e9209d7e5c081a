"""Flower's ClientApp, which is the same for all runtimes.

A message is answered by a method of DomainClient: `train`, `validate_model`, `collect` or `doubt`. The visits to the
unseen domain and the handshake have handlers of their own.
"""

from fedsim.common.exit_codes import refuse_hidden_packages

refuse_hidden_packages()  # before the first import of `clients` or `strategies`

import contextlib
import functools
import platform
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients.base import DomainClient, Job
from clients.local_steps import Trained
from fedsim.common.about import VERSION, installed_version
from fedsim.common.errors import CLIENT_APP_RAISED, USER_ERROR, UserError
from fedsim.data.names import matching
from fedsim.methods.assembly import check_local_privacy
from fedsim.methods.registry import packages_of
from fedsim.parts.part import part_name
from fedsim.runs.local_privacy import own_privacy, perturbed
from fedsim.runs.plan import Plan
from fedsim.runs.site import SiteMessage, check_message, state_folder, time_limit
from fedsim.runs.target import TargetEvaluator
from fedsim.runs.workspace import Workspace, set_threads, workspace
from fedsim.settings.plugins import outside_versions
from fedsim.tensors.arrays import record_to_arrays, state_to_record
from fedsim.tensors.records import Config, arrays_of, config_of, config_record, content_of, metric_record
from strategies.parts import ArrayDict
from strategies.wire.doubt import SUMS
from strategies.wire.packing import answer, unpack
from strategies.wire.reply_checks import ECHOED
from strategies.wire.scales import moments_config, scale_in
from strategies.wire.target_site import UPLOADS, score_records

PACKAGES = ("torch", "flwr", "numpy")

app = ClientApp()


def guarded(handler: Callable[[Message, Context], RecordDict]) -> Callable[[Message, Context], Message]:
    """Turns exceptions into error replies that contain the whole traceback (Flower itself sends one line).

    Records are unpacked before the handler is called, and packed after it if the message asks for it
    (strategies/wire/packing.py).
    """

    def handle(message: Message, context: Context) -> Message:
        try:
            message.content = unpack(message.content)
            with limits(message, context):
                content = handler(message, context)
                content["echo"] = echo_of(message, context)
        except UserError as error:
            return Message(Error(CLIENT_APP_RAISED, f"{USER_ERROR}{error}"), reply_to=message)
        except Exception:
            return Message(Error(CLIENT_APP_RAISED, traceback.format_exc()), reply_to=message)
        return Message(answer(message.content, content), reply_to=message)

    return handle


def limits(message: Message, context: Context) -> contextlib.AbstractContextManager[None]:
    """Returns the time limit of a site's message; raises UserError for a message of a wrong form.

    In a simulation nothing is checked and nothing is limited.
    """
    if not is_site(context):
        return contextlib.nullcontext()
    return time_limit(check_message(message.content, SiteMessage).timeout)


def echo_of(message: Message, context: Context) -> ConfigRecord:
    """Returns what a reply repeats of its message.

    A site's reply also says which data it used: they may have changed since the handshake in a process that has
    started anew.
    """
    config = config_of(message.content)
    echo = {key: config[key] for key in ECHOED}
    if is_site(context) and config["client"]:
        space = site_workspace(config, context)  # which is open
        fingerprint = space.fingerprint(str(config["client"]), str(config["token"]))
        echo["data"] = fingerprint["content"]
    return config_record(echo)


def site_workspace(config: Mapping, context: Context) -> Workspace:
    """Returns the workspace of a message's experiment with the data folder of this site."""
    data_dir = str(context.node_config.get("data-dir", ""))
    return workspace(str(config["experiment"]), data_dir)


def space_of(message: Message, context: Context) -> tuple[Workspace, dict]:
    """Returns (the workspace of the message's experiment with this site's own folders, the message's config)."""
    config = dict(config_of(message.content))
    if is_site(context):
        state_dir = str(context.node_config.get("state-dir", ""))
        config["state-dir"] = state_folder(state_dir, str(config["token"]))
        space = site_workspace(config, context)
    else:
        space = workspace(str(config["experiment"]))
    space.use_scale(scale_in(config))
    set_threads(space.experiment.run.threads)  # needed also when Flower's own engine or a cluster started the process
    refuse_unperturbed(space, context)
    return space, config


def refuse_unperturbed(space: Workspace, context: Context) -> None:
    """Raises UserError when this site has set its own privacy, and the recipe takes more than a perturbed model.

    It is asked for every message, and first in the handshake: nothing leaves the site before.
    """
    if own_privacy(context.node_config) is None:
        return
    if not is_target(context, space.plan):
        check_local_privacy(space.experiment, space.recipe, space.net, "this site's dp-clip")
    elif space.recipe.visits:
        raise UserError(
            f"this site's dp-clip perturbs only the model, and what {part_name(space.recipe.visits[0])} asks for would "
            "leave it without noise; use another method"
        )


def client_of(message: Message, context: Context) -> tuple[DomainClient, dict]:
    """Returns (the client that the message is for, the message's config)."""
    space, config = space_of(message, context)
    name = str(config["client"])
    if is_site(context) and [name] != node_clients(context, space.plan):
        raise UserError(f"this site is {holds(context)} and does not train or validate as {name!r}")
    client = space.client(name, str(config["state-dir"]), str(config["token"]))
    peers = context.node_config.get("peers")
    client.store.peers = None if peers is None else Path(str(peers))
    return client, config


@app.query("handshake")
@guarded
def handshake(message: Message, context: Context) -> RecordDict:
    """Answers which clients this node has, with their numbers of examples and the versions of packages.

    A site has one client; a node of a simulation may have several, in the records `site`, `site-1`, ... A node without
    a client answers with one record with an empty name.
    """
    space, config = space_of(message, context)
    token, state_dir = str(config["token"]), str(config["state-dir"])
    common = node_facts(space, context)
    clients: dict[str, Config] = {}
    if is_target(context, space.plan):
        name = space.experiment.run.target
        evaluator = target_of(space, token)
        clients[name] = client_facts(name, "target", evaluator.class_counts())
    else:
        for name in node_clients(context, space.plan):
            counts = space.class_counts(name, state_dir, token)
            clients[name] = client_facts(name, "source", counts.tolist())
            moments = space.moments(name, state_dir, token)
            if moments:
                clients[name] |= moments_config(moments)
    if clients and is_site(context):  # not in a simulation, where the server reads the same data itself
        name = next(iter(clients))
        data = space.fingerprint(name, token)
        common |= {f"data-{key}": value for key, value in data.items()}
        common["findings"] = space.findings(name)
    if not clients:
        clients[""] = client_facts("", "source", [])
    records = RecordDict()
    for number, facts in enumerate(clients.values()):
        key = f"site-{number}" if number else "site"
        records[key] = ConfigRecord({**facts, **common})
    return records


def client_facts(name: str, role: str, class_counts: list[int]) -> Config:
    """Returns what a node says in the handshake of one of its clients."""
    return {
        "client": name,
        "role": role,
        "examples": sum(class_counts),
        "class-counts": class_counts,
    }


def node_facts(space: Workspace, context: Context) -> Config:
    """Returns what a node says of itself in the handshake: its name, its versions, and its frozen weights."""
    answer: Config = {
        "holds": holds(context),
        "version-python": platform.python_version(),
        "version-fedsim": VERSION,
    }
    answer |= {f"version-{package}": installed_version(package) for package in PACKAGES}
    if space.frozen_content:
        answer["frozen"] = space.frozen_content
    if is_site(context):  # a simulation runs the server's own code
        outside = outside_versions(packages_of(space.experiment))
        answer |= {f"version-{package}": version for package, version in outside.items()}
        answer |= space.hashes_of_names()
    return answer


def node_clients(context: Context, plan: Plan) -> list[str]:
    """Returns the names of a node's clients.

    A site has the client of its domain, or none when that domain does not train here. In a simulation every node can
    act as every client, so that the clients are shared evenly between the nodes.
    """
    node = context.node_config
    if is_site(context):
        name = matching(str(node["domain"]), plan.clients)
        trains = node.get("role", "source") == "source"
        return [name] if name and trains else []
    place = int(node.get("partition-id", 0))
    nodes = int(node.get("num-partitions", 0))
    return list(plan.clients[place :: max(nodes, 1)])


def is_site(context: Context) -> bool:
    """Whether this node is a separate machine, with a domain in its SuperNode's configuration, and not simulated."""
    return "domain" in context.node_config


def is_target(context: Context, plan: Plan) -> bool:
    """Whether this site holds the unseen domain in order to evaluate it."""
    if not is_site(context) or context.node_config.get("role") != "target":
        return False
    domain = str(context.node_config["domain"])
    return matching(domain, [plan.experiment.run.target]) is not None


def holds(context: Context) -> str:
    """Returns a text that names a site: its name, its domain and, for a target, its role; empty in a simulation."""
    if not is_site(context):
        return ""
    node = context.node_config
    name = node.get("site", "a site")
    role = ", target" if node.get("role") == "target" else ""
    return f"{name} ({node['domain']}{role})"


def arrays_in(message: Message) -> dict[str, ArrayDict]:
    """Returns the tensors that came with a message, by the names of their records."""
    records = arrays_of(message.content)
    return {name: record_to_arrays(record) for name, record in records.items()}


@app.query("target")
@guarded
def evaluate_target(message: Message, context: Context) -> RecordDict:
    """Evaluates the global model on the unseen domain, on the site that holds it."""
    space, config = space_of(message, context)
    if not is_target(context, space.plan):
        raise UserError(f"this site is {holds(context)}, not the target site of {space.experiment.run.target!r}")
    records = arrays_in(message)
    arrays = records.pop("arrays")
    uploads = {name.removeprefix(UPLOADS): of_client for name, of_client in records.items()}
    evaluator = target_of(space, str(config["token"]))
    score = evaluator(arrays, uploads)
    return score_records(score, len(evaluator.labels), evaluator.task.metric)


@functools.lru_cache(maxsize=1)
def target_of(space: Workspace, run: str) -> TargetEvaluator:
    """Returns the evaluator of the unseen domain in the run with that token.

    Its images are read on first use and then stay in memory; another run with the same settings may find other images.
    """
    return TargetEvaluator(space)


@app.query("predict")
@guarded
def predict(message: Message, context: Context) -> RecordDict:
    """Predicts some batches of the unseen domain, in a process that was forked from the server's."""
    space, config = space_of(message, context)
    if space.target is None:
        raise UserError("this process does not evaluate the unseen domain")
    places = [int(place) for place in config["places"]]
    logits = space.target.logits(received_model(message), places)
    of_batches = {str(place): of_batch for place, of_batch in zip(places, logits)}
    return RecordDict({"logits": state_to_record(of_batches)})


@app.query("visit")
@guarded
def visit(message: Message, context: Context) -> RecordDict:
    """Uses unlabelled images of the unseen domain, on the machine that holds them."""
    space, config = space_of(message, context)
    if is_site(context) and not is_target(context, space.plan):
        raise UserError(f"this site is {holds(context)}, not the target site of {space.experiment.run.target!r}")
    images = space.unlabelled(str(config["token"]))
    answer = images.answer(arrays_in(message), config)
    return RecordDict({name: state_to_record(arrays) for name, arrays in answer.items()})


@app.query("collect")
@guarded
def collect(message: Message, context: Context) -> RecordDict:
    """Replies with this client's contribution to one of the recipe's banks."""
    client, config = client_of(message, context)
    records = arrays_in(message)
    received = records.pop("arrays", None)
    tensors = None if received is None else fitting(received, client.names("train"))
    client.records = records
    entry = client.collect(config, tensors)
    content = RecordDict({config["bank"]: state_to_record(entry)})
    forget_message(client)
    return content


@app.train()
@guarded
def train(message: Message, context: Context) -> RecordDict:
    """Trains on this client's images, starting from the received tensors."""
    job = job_of(message, context)
    result = job.client.train(job.tensors, job.config)
    return trained(job.client, result, message, context)


def job_of(message: Message, context: Context) -> Job:
    """Returns the client, tensors and config of a message that asks for training."""
    client, config = client_of(message, context)
    records = arrays_in(message)
    tensors = fitting(records.pop("arrays"), client.names("train"))
    client.records = records
    return Job(client, tensors, config)


def trained(client: DomainClient, result: Trained, message: Message, context: Context) -> RecordDict:
    """Returns the reply of a client that has trained."""
    tensors, examples, metrics = result
    records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {"arrays": state_to_record(tensors)}
    for name, values in client.outbox.items():
        records[name] = state_to_record(values)
    records["metrics"] = metric_record({"num-examples": examples, **metrics})
    records["state"] = config_record({"entries": client.stored})
    content = content_of(records)
    forget_message(client)
    return perturbed(content, message, context, client.experiment.train)


def forget_message(client: DomainClient) -> None:
    """Releases what came with the message and what is sent in reply.

    Neither is state, and both may be as large as the model, which hundreds of clients would keep until they are drawn
    again.
    """
    client.records.clear()
    client.outbox.clear()


@app.evaluate()
@guarded
def evaluate(message: Message, context: Context) -> RecordDict:
    """Validates the received model."""
    client, config = client_of(message, context)
    tensors = fitting(received_model(message), client.names("evaluate"))
    loss, examples, metrics = client.validate_model(tensors, config)
    record = metric_record({"num-examples": examples, "loss": loss, **metrics})
    return content_of({"metrics": record})


@app.query("doubt")
@guarded
def doubt(message: Message, context: Context) -> RecordDict:
    """Replies with the sums over the validation examples that `run.doubt` needs, of the received model."""
    client, config = client_of(message, context)
    tensors = fitting(received_model(message), client.names("evaluate"))
    sums, examples = client.doubt(tensors, config)
    metrics = MetricRecord({"num-examples": examples})
    return RecordDict({SUMS: state_to_record(sums), "metrics": metrics})


def received_model(message: Message) -> ArrayDict:
    """Returns the tensors of the model that came with a message."""
    return record_to_arrays(arrays_of(message.content)["arrays"])


def fitting(arrays: ArrayDict, names: list[str]) -> ArrayDict:
    """Returns the arrays in the client's order; raises ValueError that names those that are missing or unexpected."""
    wrong = sorted(arrays.keys() ^ set(names))
    if wrong:
        raise ValueError(f"the server's tensors do not fit this client's share rule: {wrong[:4]}")
    return {name: arrays[name] for name in names}
