"""What `run.record` asks for: alpha of the test images, and each client's model and the fused one on all domains.

`local_models` measures the model of each client after its training, before it is fused, and the fused model of the
round: on the unseen domain's test images, and on the validation images of each source domain's clients. It is done in
the rounds in which clients validate (`train.evaluate_every`) and in a prelude, by a simulation's server, which can read
all domains. The rows go into details.csv:

    local_accuracy   client, name: a domain         the metric of the client's model on a domain (any task's metric)
    fused_accuracy   no client, name: a domain      that of the fused model
    distance_within, distance_across   no client, name: a tensor

A distance is the mean of ||a - b||_2 / sqrt(n) over the pairs of clients of one domain, or of two domains, for a
parameter of n numbers: the root of the mean squared difference.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np
from safetensors.numpy import load_file
from torch import Tensor

from clients.local_data import LocalData
from fedsim.common.values import Row
from fedsim.data import domain_of
from fedsim.records.alphas import Alphas
from fedsim.runs.target import TargetEvaluator
from fedsim.runs.workspace import Workspace
from fedsim.tensors.arrays import load_arrays
from strategies.parts import ArrayDict, Arrays, Update
from strategies.server import Server


def keep_alphas(space: Workspace, evaluator: TargetEvaluator) -> None:
    """Writes alpha of every test image in every layer of the run's selected model into its folder."""
    folder = space.plan.folder
    evaluator(load_file(folder / "best.safetensors"), {})
    by_layer = evaluator.infer.alphas(space.net)
    alpha = np.stack([values.cpu().numpy() for values in by_layer.values()])
    Alphas(np.asarray(evaluator.indices, np.int64), alpha, tuple(by_layer)).write(folder)


class LocalModels:
    """Measures clients' models and fused ones on all domains, and notes it for details.csv."""

    def __init__(self, space: Workspace, server: Server, evaluator: TargetEvaluator | None) -> None:
        self.space, self.server, self.evaluator = space, server, evaluator
        self.metric = space.task.metric
        self.size = space.experiment.run.evaluate_batch_size
        self.parameters = [name for name, _ in space.net.named_parameters()]
        self.validation: dict[str, list[LocalData]] = {}  # by source domain

    def is_measured(self, number: int) -> bool:
        """Whether the models of a round are measured."""
        return number % self.space.experiment.train.evaluate_every == 0

    def __call__(self, number: int, model: ArrayDict, updates: Sequence[Update]) -> None:
        """Notes the accuracy of each client's model, and the distances between these models."""
        if not self.is_measured(number):
            return
        for update in updates:
            self._note(update.client, f"local_{self.metric}", self.measured({**model, **update.arrays}))
        names = [name for name in self.parameters if updates and name in updates[0].arrays]
        for quantity, values in distances(updates, names).items():
            self._note("", quantity, values)

    def fused(self, model: ArrayDict) -> None:
        """Notes the accuracy of a fused model."""
        self._note("", f"fused_{self.metric}", self.measured(model))

    def measured(self, arrays: Arrays) -> dict[str, float]:
        """The primary metric of a model by domain; without a domain on which it is not defined."""
        space = self.space
        values = {}
        for domain, clients in self._data().items():
            load_arrays(space.net, arrays, space.travelling)
            rule = space.recipe.infer
            predict = rule.begin(space.net, tuple) if rule.on_sources else space.net.eval()
            value, _, _ = space.task.measure(predict, self._batches(clients))
            values[domain] = value
        if self.evaluator:
            score = self.evaluator(arrays, self.server.wanted_entries())
            assert score.value is not None  # this process evaluates
            values[space.experiment.run.target] = score.value
        return {domain: value for domain, value in values.items() if not np.isnan(value)}

    def _data(self) -> Mapping[str, Sequence[LocalData]]:
        """The data of the clients by domain, which are read when they are first needed."""
        if not self.validation:
            for client in self.space.plan.clients:
                self.validation.setdefault(domain_of(client), []).append(self.space.local_data(client))
        return self.validation

    def _batches(self, clients: Sequence[LocalData]) -> Iterator[tuple[Tensor, Tensor]]:
        """The validation images of these clients with their labels."""
        for data in clients:
            yield from data.evaluation(data.validation, self.size)

    def _note(self, client: str, quantity: str, values: Mapping[str, float]) -> None:
        rows: list[Row] = []
        for name, value in values.items():
            rows.append({"client": client, "quantity": quantity, "name": name, "value": value})
        self.server.exchange.notes.details += rows


def distances(updates: Sequence[Update], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """{"distance_within", "distance_across": {tensor: mean over the pairs of clients}}; none where there is no pair.

    The distance of two tensors is the root of their mean squared difference.
    """
    pairs: dict[str, list[tuple[Update, Update]]] = {}
    for one, other in combinations(updates, 2):
        kind = "distance_within" if domain_of(one.client) == domain_of(other.client) else "distance_across"
        pairs.setdefault(kind, []).append((one, other))
    means: dict[str, dict[str, float]] = {}
    for kind, couples in pairs.items():
        means[kind] = {}
        for name in names:
            values = [apart(one.arrays[name], other.arrays[name]) for one, other in couples]
            means[kind][name] = float(np.mean(values))
    return means


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """The root of the mean squared difference of two arrays of one shape."""
    difference = one.astype(np.float64) - other.astype(np.float64)
    return float(np.sqrt(np.mean(np.square(difference))))
