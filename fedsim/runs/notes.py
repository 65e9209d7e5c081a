"""What a run says where nothing is refused: about data, weights, the code of sites, and a metric without a value."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from fedsim.common.lists import first_few
from fedsim.common.tasks import BINARY, TASKS
from fedsim.common.values import Row
from fedsim.data import Benchmark, domain_of
from fedsim.data.augment import make_transforms
from fedsim.data.loading import source_domains
from fedsim.models.backbones import weight_statistics
from fedsim.parts.part import part_name
from fedsim.runs.plan import Plan
from fedsim.runs.target import TargetEvaluator
from fedsim.runs.workspace import Workspace
from fedsim.settings.experiment import Experiment
from fedsim.settings.model import weights_file

LEAST_CLIENTS = 3  # in a round, for a rule that compares clients with each other
VALIDATIONS = "(validation)"  # the key of what is said of clients, besides the name of the unseen domain
DECISIVE = "install the same, or results may be another method's"


def data_notes(
    bench: Benchmark,
    images: Mapping[str, int],
    sources: Sequence[Sequence[int]],
    target: str,
    tested: Sequence[int],
) -> list[str]:
    """Returns notes on splits that are joined, more images than are published, and classes that no client trains.

    images: by domain or client. sources: training images of every client by class, empty for one that has not
    answered. tested: tested images of the unseen domain by class.
    """
    notes = []
    if bench.joined:
        notes.append(f"the data set's own splits {', '.join(bench.joined)} are joined and every domain is split anew; "
                     "data.split = 'lists' trains and validates on its splits of these names, and data.test_split = "
                     "'list' tests on its test split alone")  # fmt: skip
    if bench.task == BINARY.name:
        notes.append(f"the positive class is {bench.classes[1]!r}, the second of {', '.join(bench.classes)}: "
                     "sensitivity, specificity and average precision are of it; rename the classes to look for the "
                     "other")  # fmt: skip
    counts = {domain_of(name): count for name, count in images.items()}
    for domain, count in sorted(counts.items()):
        published = (bench.counts or {}).get(domain, count)
        if count > published:
            notes.append(f"{domain} has {count:,} images, and {bench.title} was published with {published:,}; "
                         "results do not compare with published ones if the others are copies")  # fmt: skip
    if TASKS[bench.task].has_classes and all(sources) and len(tested):
        untrained = untrained_classes(bench.classes, sources, tested)
        if untrained:
            notes.append(f"no client has training images of {', '.join(untrained)}, which {target} is tested on; "
                         "if classes are spelled in two ways, make them equal")  # fmt: skip
    return notes


def untrained_classes(classes: Sequence[str], sources: Sequence[Sequence[int]], tested: Sequence[int]) -> list[str]:
    """Returns the classes that the unseen domain is tested on and of which no client has training images."""
    trained = [sum(column) for column in zip(*sources)]
    return [name for name, images, tests in zip(classes, trained, tested) if tests and not images]


def comparison_notes(plan: Plan) -> list[str]:
    """Returns a line for each part that compares clients or domains, where there are too few of them to compare."""
    return few_client_notes(plan) + one_domain_notes(plan)


def few_client_notes(plan: Plan) -> list[str]:
    """Returns a line for each part that compares the clients of a round, where fewer than three of them train."""
    drawn = plan.experiment.train.clients_per_round or len(plan.clients)
    count = min(drawn, len(plan.clients))
    if count >= LEAST_CLIENTS:
        return []
    clients = "1 client trains" if count == 1 else f"{count} clients train"
    parts = dict.fromkeys(part for _, part in plan.recipe.pairs if part.with_few)
    return [f"{clients} in a round of {part_name(part)}: {part.with_few}" for part in parts]


def one_domain_notes(plan: Plan) -> list[str]:
    """Returns a line for each part that compares the domains of one client, where every client has one."""
    if plan.recipe.pooled or domains_of_client(plan) > 1:
        return []
    advice = f"set data.mix, or train deepall+{plan.experiment.method_name} on pooled data"
    notes = []
    for _, part in plan.recipe.pairs:
        if part.with_one_domain:
            name = part_name(part)
            notes.append(f"every client has one domain, and {name} compares domains: {part.with_one_domain}; {advice}")
    return notes


def domains_of_client(plan: Plan) -> int:
    """Returns the number of domains of which a client has examples, where data are not pooled.

    With fewer clients than domains (`data.clients`) clients differ, and 2 stands for several.
    """
    data = plan.experiment.data
    if not data.is_dealt:
        return 1
    sources = source_domains(data, plan.experiment.run.target, plan.data)
    if data.mix:
        return len(sources)
    return 2 if isinstance(data.clients, int) and data.clients < len(sources) else 1


def weight_notes(experiment: Experiment, bench: Benchmark) -> list[str]:
    """Returns a line where images are normalized by other numbers than those of the pretrained weights' training."""
    model, data = experiment.model, experiment.data
    if not bench.images or bench.channels != 3:
        return []
    if model.weights == "none" or weights_file(model.weights):
        return []
    statistics = weight_statistics(model)
    if statistics is None:
        return []
    normalize = make_transforms(data, bench.channels, statistics).normalize
    has_mean = tuple(normalize.mean) == tuple(statistics.mean)
    has_std = tuple(normalize.std) == tuple(statistics.std)
    if has_mean and has_std:
        return []
    mean = ", ".join(f"{value:g}" for value in statistics.mean)
    std = ", ".join(f"{value:g}" for value in statistics.std)
    return [
        f"the weights of {model.backbone} were trained on images with the mean {mean} and the deviation {std}, and "
        f"data.normalize = {data.normalize!r} does not take these; data.normalize = 'weights' does"
    ]


def code_notes(server: Mapping[str, str], sites: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Returns a line for each site whose code from outside of fedsim is not the server's; it may train otherwise.

    server: the server's versions of the packages from outside. sites: the versions that each site reported.
    """
    notes = []
    for client, versions in sites.items():
        for package, version in server.items():
            other = versions.get(package, version)
            if other != version:
                notes.append(f"the site of {client} has {package} {other}, the server {version}; its results may be "
                             "another method's")  # fmt: skip
    return notes


def version_notes(server: Mapping[str, str], sites: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Returns a line for each package of fedsim's own whose version differs between the server and some sites.

    server: the server's versions by package. sites: the versions that each site reported.
    """
    notes = []
    for package, here in server.items():
        others: dict[str, list[str]] = {}
        for client, versions in sites.items():
            there = versions.get(package, here)
            if there != here:
                others.setdefault(there, []).append(client)
        if others:
            places = [f"{here} on the server"]
            for version, clients in others.items():
                places.append(f"{version} at {first_few(clients)}")
            text = f"{', '.join(places[:-1])} and {places[-1]}"
            advice = DECISIVE if package in ("fedsim", "flwr") else "numbers may differ in the last digits"
            notes.append(f"{package} is {text}; {advice}")
    return notes


def undefined_on_target(space: Workspace, evaluator: TargetEvaluator | None, tested: Sequence[int]) -> dict[str, str]:
    """{the unseen domain: what its truth leaves undefined}; empty where the metric means what it says.

    tested: its examples by class, as its site or the evaluator says
    """
    target = space.experiment.run.target
    if evaluator:
        truth = evaluator.labels
    elif TASKS[space.plan.data.task].has_classes:
        truth = torch.from_numpy(np.flatnonzero(tested))
    else:
        return {}
    reason = space.task.undefined(truth, space.plan.data.outputs) if len(truth) else ""
    return {target: reason} if reason else {}


def undefined_validations(rows: Iterable[tuple[str, Row]], metric: str, title: str) -> str:
    """One line on the clients that have validated and have no primary metric; empty without any."""
    validated = [(client, row) for client, row in rows if row.get("validation_loss") is not None]
    without = [client for client, row in validated if row.get(f"validation_{metric}") is None]
    if not without:
        return ""
    return (
        f"{title} is not defined on the validation examples of {first_few(without)}, for example because all are of "
        f"one class; means over clients are over the other {len(validated) - len(without)} of {len(validated)}"
    )
