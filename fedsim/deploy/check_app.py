"""A Flower app that asks every site for its versions and its data. It trains nothing.

The server app writes a JSON report to the path that the operator gave; the client app describes its machine.
"""

import json
import platform
from importlib.util import find_spec
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsim.common.about import VERSION, installed_version
from fedsim.common.errors import UserError
from fedsim.common.files import atomic_write
from fedsim.data import benchmark, count_classes, domain_findings
from fedsim.data.findings import sent_findings
from fedsim.deploy.site_statistics import hidden, least_of, statistics_of
from fedsim.runs.site import SiteCheck, check_message
from fedsim.settings import data_root
from fedsim.settings.experiment import parse_experiment
from fedsim.settings.paths import with_own_folders
from fedsim.tensors.records import Config, configs_of

VERSIONS = ("flwr", "torch")
LONGEST_REASON = 500  # characters

server = ServerApp()
client = ClientApp()


@server.main()
def ask(grid: Grid, context: Context) -> None:
    """Ask every connected node, wait for at most `wait` seconds, write the report."""
    config = context.run_config
    nodes = list(grid.get_node_ids())
    asked_for: Config = {
        "experiment": str(config["experiment"]),
        "packages": str(config.get("packages", "")),
    }
    if config.get("statistics"):  # a site of an older version refuses the key
        asked_for["statistics"] = int(config["statistics"])
    content = RecordDict({"config": ConfigRecord(asked_for)})
    messages = [Message(content, node, "query.check") for node in nodes]
    replies = list(grid.send_and_receive(messages, timeout=float(config["wait"])))
    asked = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
    answers_by_node: dict[int, dict[str, Any]] = {}
    for reply in replies:  # a lost node's error comes from the server's own node id
        node = asked.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
        if reply.has_error():
            answers_by_node[node] = {"problem": str(reply.error.reason)[-LONGEST_REASON:]}
        else:
            answers_by_node[node] = dict(configs_of(reply.content).get("site", {}))
    silent = {"problem": f"no answer within {float(config['wait']):g} s"}
    answers = [{**answers_by_node.get(node, silent), "node": node} for node in nodes]
    atomic_write(str(config["report"]), json.dumps(answers, default=str))


@client.query("check")
def answer(message: Message, context: Context) -> Message:
    """This site's name, versions, device and, for an experiment, its data: classes and images of each."""
    node = context.node_config
    description: dict[str, Any] = {key: str(node.get(key, "")) for key in ("site", "domain", "role")}
    description |= {"python": platform.python_version(), **installed_versions(), "problem": ""}
    description |= {"classes": [], "counts": [], "lacking": [], "findings": []}
    try:
        asked = check_message(message.content, SiteCheck)
        settings = asked.experiment
        description["lacking"] = lacking(asked.packages.split())
        description["device"] = device()
        if settings:
            root = str(node.get("data-dir", ""))
            classes, counts, findings = site_data(settings, description["domain"], root)
            if asked.statistics:
                least = least_of(node, asked.statistics)
                counts = tuple(hidden(count, least) for count in counts)
                description["least"] = least
                if description["role"] != "target":
                    description["columns"] = columns_text(settings, description["domain"], root, least)
            description |= {"classes": list(classes), "counts": list(counts), "findings": findings}
    except UserError as error:
        description["problem"] = str(error)[:LONGEST_REASON]
    except Exception as error:  # the operator wants to read any error of a site
        description["problem"] = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
    return Message(RecordDict({"site": ConfigRecord(description)}), reply_to=message)


def columns_text(settings: str, client_name: str, root: str, least: int) -> str:
    """Returns what the site says of its columns or channels, as JSON."""
    data = with_own_folders(parse_experiment(settings), root).data
    columns = statistics_of(data, client_name, least)
    return json.dumps([column.model_dump() for column in columns])


def installed_versions() -> dict[str, str]:
    """Returns the versions of the packages that must fit together; "missing" for one that is not installed."""
    versions = {"fedsim": VERSION}
    for package in VERSIONS:
        versions[package] = installed_version(package) or "missing"
    return versions


def lacking(requirements: list[str]) -> list[str]:
    """Returns a line for each of these packages that is missing here or has another version.

    A package is given as `name==version`, or as the name of a module.
    """
    missing = []
    for requirement in requirements:
        name, _, version = requirement.partition("==")
        if not version:
            if not find_spec(name.partition(".")[0]):  # which imports nothing
                missing.append(f"{requirement} is missing")
            continue
        version_there = installed_version(name)
        if not version_there:
            missing.append(f"{requirement} is missing")
        elif version_there != version:
            missing.append(f"{name} is {version_there} there, {version} here")
    return missing


def device() -> str:
    """Returns the device on which training would run; it imports PyTorch, and so shows that it can be imported."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def site_data(settings: str, client_name: str, root: str) -> tuple[tuple[str, ...], tuple[int, ...], list[str]]:
    """Returns the classes, counts and findings of a site's domain in the experiment; no image is opened.

    `root` is the site's own data folder (empty: its $FEDSIM_DATA); the folders of the experiment are the server's.
    """
    data = with_own_folders(parse_experiment(settings), root).data
    findings = domain_findings(data, client_name, benchmark(data), with_files=False)
    classes, counts = count_classes(data, client_name)
    return classes, counts, sent_findings(findings, str(data_root(data)))
