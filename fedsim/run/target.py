"""Evaluation on the unseen domain, on the server or on the site that holds its images. They are never trained on."""

import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from clients.local_data import fetched, kept_near
from fedsim.common.seeding import numpy_rng
from fedsim.common.tasks import TASKS
from fedsim.common.values import Foreign
from fedsim.data import load_target, load_target_masks
from fedsim.data.augment import to_float
from fedsim.models.tasks import Labelled, Predict, TaskRules
from fedsim.run.workspace import Workspace
from fedsim.settings.plugins import load
from fedsim.tensors.arrays import load_arrays
from strategies.wire.target_site import TargetScore


class TargetEvaluator:
    """The primary metric on the unseen domain, or on the one that is held out to select the round (`held_out`).

    Only this class opens their images; a training client never does.
    """

    def __init__(self, space: Workspace, held_out: bool = False) -> None:
        experiment = space.experiment
        domain = experiment.run.validation_domain if held_out else experiment.run.target
        images, labels, indices = load_target(experiment.data, domain, space.plan.data)
        self.names = space.travelling
        self.net, self.device, self.infer = space.net, space.device, space.recipe.infer
        if self.infer.shuffled:
            indices = numpy_rng(experiment.run.seed, "test-order").permutation(indices)
        self.classes = len(space.plan.data.classes)
        self.normalize = space.transforms.normalize
        self.size = self.infer.pass_size(experiment.run.evaluate_batch_size)
        self.indices, self.outputs = indices, space.plan.data.outputs
        self.task, self.kind = space.task, load(TASKS[space.plan.data.task].kept, "task")
        self.keeps = experiment.run.keep_predictions and not held_out
        self.images = kept_near(torch.from_numpy(np.ascontiguousarray(images[indices])), self.device)
        self.strata = labels[indices]
        masks = load_target_masks(experiment.data, domain, space.plan.data)
        truth = labels if masks is None else masks
        self.labels = torch.from_numpy(np.ascontiguousarray(truth[indices])).to(self.device)

    def class_counts(self) -> list[int]:
        """Tested images of each class."""
        return np.bincount(self.strata, minlength=self.classes).tolist()

    @property
    def divisible(self) -> bool:
        """Whether processes may share the batches: there are several, and the rule predicts each image by itself."""
        several = len(self.labels) > self.size
        return self.infer.divisible and several and not self.task.maps  # maps of logits take long to send

    def cuts(self) -> list[slice]:
        """The images of each batch."""
        return [slice(start, start + self.size) for start in range(0, len(self.labels), self.size)]

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Normalised (images, labels) in large batches."""
        for part in self.cuts():
            yield self._images(part), self.labels[part]

    def _images(self, part: slice) -> Tensor:
        return self.normalize(to_float(fetched(self.images[part], self.device)))

    def __call__(
        self, arrays: Mapping[str, np.ndarray], uploads: Mapping[str, Mapping[str, np.ndarray]]
    ) -> TargetScore:
        """Score of a global model; `uploads` are the tensors of single clients that the inference rule asked for."""
        started = time.perf_counter()
        load_arrays(self.net, arrays, self.names)
        entries = [
            {name: torch.tensor(array, device=self.device) for name, array in uploads[client].items()}
            for client in sorted(uploads)
        ]
        predict = self.infer.begin(self.net, lambda: (images for images, _ in self.batches()), entries)
        return self._score(predict, self.batches(), started)

    @torch.inference_mode()
    def logits(self, arrays: Mapping[str, np.ndarray], places: Sequence[int]) -> list[Tensor]:
        """What a global model predicts for some of the batches, where they are `divisible`."""
        load_arrays(self.net, arrays, self.names)
        predict, cuts = self.infer.begin(self.net, lambda: iter(())), self.cuts()
        return [predict(self._images(cuts[place])).float() for place in places]

    def score_of(self, logits: Sequence[Tensor], started: float) -> TargetScore:
        """The score of a model that predicts these logits for the batches."""
        predicted = iter(logits)
        return self._score(lambda _: next(predicted), ((self.labels[part],) * 2 for part in self.cuts()), started)

    def _score(self, predict: Predict, batches: Labelled, started: float) -> TargetScore:
        predicted: list[Tensor] = []
        value, loss, _ = self.task.measure(keeping(self.task, predict, predicted) if self.keeps else predict, batches)
        predictions = self._predictions(predicted) if predicted else None
        details = self.infer.details(self.net) + (predictions.details() if predictions else [])
        return TargetScore(value, loss, time.perf_counter() - started, details, predictions)

    def _predictions(self, kept: list[Tensor]) -> Foreign:
        """What the task's records keep of the predictions."""
        return self.kind.of(np.asarray(self.indices), self.labels, torch.cat(kept), self.images, self.outputs)


def keeping(task: TaskRules, predict: Predict, kept: list[Tensor]) -> Predict:
    """The same prediction, which also adds to `kept` what the task keeps of each batch."""

    def kept_too(images: Tensor) -> Tensor:
        logits = predict(images)
        kept.append(task.keep(logits))
        return logits

    return kept_too
