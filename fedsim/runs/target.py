"""Evaluation on the unseen domain, on the server or on the site that holds its images. They are never trained on.

The server may share it with the processes of the clients, which evaluate while others still validate.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from clients.local_data import fetched, kept_near
from fedsim.common.seeding import numpy_rng
from fedsim.common.tasks import TASKS
from fedsim.data import load_target, load_target_masks
from fedsim.models.tasks import Labelled, Predict, TaskRules
from fedsim.runs.workspace import Workspace
from fedsim.settings.plugins import load
from fedsim.tensors.arrays import load_arrays, record_to_arrays
from fedsim.tensors.records import Config, arrays_of
from strategies.parts import Entries
from strategies.wire.target_site import TargetScore


class TargetEvaluator:
    """The primary metric on the unseen domain, or on the one that is held out to select the round (`held_out`).

    Only this class opens their images; a training client never does.
    """

    def __init__(self, space: Workspace, held_out: bool = False) -> None:
        experiment = space.experiment
        domain = experiment.run.validation_domain if held_out else experiment.run.target
        images, labels, indices = load_target(experiment.data, domain, space.plan.data)
        masks = load_target_masks(experiment.data, domain, space.plan.data)
        self.names = space.travelling
        self.net = space.net
        self.device = space.device
        self.infer = space.recipe.infer
        if self.infer.shuffled:
            indices = numpy_rng(experiment.run.seed, "test-order").permutation(indices)
        self.classes = len(space.plan.data.classes)
        self.transforms = space.transforms
        self.size = self.infer.pass_size(experiment.run.evaluate_batch_size)
        self.indices = indices
        self.outputs = space.plan.data.outputs
        self.kind = load(TASKS[space.plan.data.task].kept, "task")
        self.keeps = experiment.run.keep_predictions and not held_out
        self.images = kept_near(_chosen(images, indices), self.device)
        self.strata = labels[indices]
        self.labels = _chosen(labels if masks is None else masks, indices).to(self.device)
        self.task = space.task.for_truth(self.labels)

    def class_counts(self) -> list[int]:
        """Returns the number of tested images of each class."""
        return np.bincount(self.strata, minlength=self.classes).tolist()

    @property
    def divisible(self) -> bool:
        """Whether processes may share the batches: there are several, and the rule predicts each image by itself."""
        several = len(self.labels) > self.size
        return self.infer.divisible and several and not self.task.maps  # maps of logits take long to send

    def cuts(self) -> list[slice]:
        """Returns where the images of each batch are."""
        starts = range(0, len(self.labels), self.size)
        return [slice(start, start + self.size) for start in starts]

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields normalised (images, labels) in large batches."""
        for part in self.cuts():
            yield self._images(part), self.labels[part]

    def _all_images(self) -> Iterator[Tensor]:
        """Yields the normalised images of all batches."""
        for part in self.cuts():
            yield self._images(part)

    def _images(self, part: slice) -> Tensor:
        images = self.transforms.read(fetched(self.images[part], self.device))
        return self.transforms.normalize(images)

    def __call__(
        self,
        arrays: Mapping[str, np.ndarray],
        uploads: Mapping[str, Mapping[str, np.ndarray]],
    ) -> TargetScore:
        """Returns the score of a global model.

        uploads: the tensors of single clients that the inference rule asked for
        """
        started = time.perf_counter()
        load_arrays(self.net, arrays, self.names)
        entries = []
        for client in sorted(uploads):
            of_client = uploads[client]
            entries.append({name: torch.tensor(array, device=self.device) for name, array in of_client.items()})
        predict = self.infer.begin(self.net, self._all_images, entries)
        return self._score(predict, self.batches(), started)

    @torch.inference_mode()
    def logits(self, arrays: Mapping[str, np.ndarray], places: Sequence[int]) -> list[Tensor]:
        """Returns what a global model predicts for some of the batches, where they are `divisible`."""
        load_arrays(self.net, arrays, self.names)
        predict = self.infer.begin(self.net, lambda: iter(()))
        cuts = self.cuts()
        return [predict(self._images(cuts[place])).float() for place in places]

    def score_of(self, logits: Sequence[Tensor], started: float) -> TargetScore:
        """Returns the score of a model that predicts these logits for the batches."""
        predicted = iter(logits)
        truths = (self.labels[part] for part in self.cuts())
        batches = ((truth, truth) for truth in truths)  # the images are not needed any more
        return self._score(lambda _: next(predicted), batches, started)

    def _score(self, predict: Predict, batches: Labelled, started: float) -> TargetScore:
        """Returns the score of these predictions, with those that are recorded."""
        recorded: list[Tensor] = []
        if self.keeps:
            predict = recording(self.task, predict, recorded)
        value, loss, _ = self.task.measure(predict, batches)
        details = self.infer.details(self.net)
        predictions = None
        if recorded:
            predictions = self._predictions(recorded)
            details = details + predictions.details()
        return TargetScore(value, loss, time.perf_counter() - started, details, predictions)

    def _predictions(self, recorded: list[Tensor]) -> Any:
        """Returns what the task's records keep of the predictions."""
        return self.kind.of(np.asarray(self.indices), self.labels, torch.cat(recorded), self.images, self.outputs)


def _chosen(values: np.ndarray, indices: np.ndarray) -> Tensor:
    """Returns some rows of an array as a tensor."""
    return torch.from_numpy(np.ascontiguousarray(values[indices]))


def recording(task: TaskRules, predict: Predict, recorded: list[Tensor]) -> Predict:
    """Returns an equal prediction, which also adds to `recorded` what the task keeps of each batch."""

    def predict_and_record(images: Tensor) -> Tensor:
        logits = predict(images)
        recorded.append(task.keep(logits))
        return logits

    return predict_and_record


logger = logging.getLogger("fedsim")


class SharedTarget:
    """Evaluates a global model in this process, or in all processes of a grid that has `nodes_of_processes`.

    They are asked together with the clients that validate, so that none waits for another. The batches are those of one
    process. Their logits are measured here, in the order of the batches, so that the score is the same to the last bit.
    If a process dies, this one predicts all batches from then on.
    """

    def __init__(self, evaluator: TargetEvaluator, grid: Grid, settings: Config) -> None:
        self.evaluator, self.grid, self.settings = evaluator, grid, settings
        self._alone = False
        self._sent: list[Message] = []
        self._logits: dict[str, np.ndarray] = {}  # of the batches, by their place
        self._score: TargetScore | None = None  # by the logits of all batches

    def messages(self, round: int, arrays: ArrayRecord, entries: Entries) -> list[Message]:
        """Returns a message to each process, where there are several and the rule predicts each image by itself."""
        self._sent = []
        self._logits = {}
        self._score = None
        nodes = self._nodes()
        if len(nodes) < 2:
            return []
        batches = len(self.evaluator.cuts())
        common: Config = {**self.settings, "round": round, "phase": "predict", "client": ""}
        for index, node in enumerate(nodes):
            places = list(range(index, batches, len(nodes)))
            config = ConfigRecord({**common, "places": places})
            content = RecordDict({"arrays": arrays, "config": config})
            self._sent.append(Message(content, node, "query.predict"))
        return self._sent

    def _nodes(self) -> Sequence[int]:
        """Returns the processes that may share the batches; none where one has to do them all."""
        if self._alone or not self.evaluator.divisible or not hasattr(self.grid, "nodes_of_processes"):
            return []
        return self.grid.nodes_of_processes()

    def others(self, replies: Iterable[Message]) -> Iterator[Message]:
        """Yields the replies that do not answer our messages; the others make the score, while clients validate."""
        for reply in replies:
            sent = {message.metadata.message_id for message in self._sent}
            if reply.metadata.reply_to_message_id not in sent:
                yield reply
            elif not reply.has_error():
                self._logits |= record_to_arrays(arrays_of(reply.content)["logits"])
                if len(self._logits) == len(self.evaluator.cuts()):
                    self._score = self._measured(time.perf_counter())
            elif not self._alone:
                self._alone = True
                reason = str(reply.error.reason).strip().splitlines()[-1]
                logger.warning("the unseen domain is evaluated in one process from now on: %s", reason)

    def _measured(self, started: float) -> TargetScore:
        """Returns the score by the logits of all batches."""
        by_place = {int(place): torch.tensor(array) for place, array in self._logits.items()}
        self._logits = {}
        logits = [by_place[place] for place in sorted(by_place)]
        return self.evaluator.score_of(logits, started)

    def take(self, used: bool = True) -> None:
        """Forgets the score of a model that is not used."""
        if not used:
            self._score = None

    def score(self, arrays: ArrayRecord, entries: Entries) -> TargetScore:
        """Returns the score of a model, by the logits that came for it, or else computed here.

        entries: those of the bank that the inference rule needs
        """
        score = self._score
        self._score = None
        return score or self.evaluator(record_to_arrays(arrays), entries)

    def ask(self, grid: Grid, arrays: ArrayRecord, entries: Entries) -> TargetScore:
        """Returns the score of the initial model, which is computed here."""
        return self.score(arrays, entries)
