"""Evaluation on the unseen domain: on the server, or on the site that holds its images. Nobody trains on them."""

import time
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from fedsim.arrays import load_arrays
from fedsim.data import load_target
from fedsim.data.augment import make_transforms, to_float
from fedsim.models import weight_statistics
from fedsim.models.infer import Predict, accuracy_and_loss
from fedsim.results.predictions import Predictions
from fedsim.run.workspace import Workspace
from fedsim.seeding import numpy_rng
from strategies.wire.target_site import TargetScore


class TargetEvaluator:
    """Accuracy on the unseen domain; the only place that opens its images, and no training client ever does."""

    def __init__(self, space: Workspace) -> None:
        experiment = space.experiment
        images, labels, indices = load_target(experiment.data, experiment.run.target)
        self.names = space.travelling
        self.net, self.device, self.infer = space.net, space.device, space.recipe.infer
        if self.infer.shuffled:
            indices = numpy_rng(experiment.run.seed, "test-order").permutation(indices)
        channels = space.plan.data.channels
        self.classes = len(space.plan.data.classes)
        self.normalize = make_transforms(experiment.data, channels, weight_statistics(experiment.model)).normalize
        self.size = experiment.run.evaluate_batch_size
        self.indices, self.class_names = indices, tuple(space.plan.data.classes)
        self.keeps = experiment.run.keep_predictions
        self.images = torch.from_numpy(np.ascontiguousarray(images[indices])).to(self.device)
        self.labels = torch.from_numpy(np.ascontiguousarray(labels[indices])).to(self.device)

    def class_counts(self) -> list[int]:
        """Tested images of each class."""
        return torch.bincount(self.labels, minlength=self.classes).tolist()

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Normalised (images, labels) in large batches."""
        for start in range(0, len(self.labels), self.size):
            part = slice(start, start + self.size)
            yield self.normalize(to_float(self.images[part])), self.labels[part]

    def __call__(
        self, arrays: Mapping[str, np.ndarray], uploads: Mapping[str, Mapping[str, np.ndarray]]
    ) -> TargetScore:
        """Score of a global model; `uploads` are the tensors of single clients that the inference rule asked for."""
        started = time.perf_counter()
        load_arrays(self.net, arrays, self.names)
        own = [
            {name: torch.tensor(array, device=self.device) for name, array in uploads[client].items()}
            for client in sorted(uploads)
        ]
        predict = self.infer.begin(self.net, lambda: (images for images, _ in self.batches()), own)
        kept: list[Tensor] = []
        accuracy, loss, _ = accuracy_and_loss(keeping(predict, kept) if self.keeps else predict, self.batches())
        predictions = self._predictions(kept) if kept else None
        seconds = time.perf_counter() - started
        return TargetScore(accuracy, loss, seconds, self.infer.details(self.net), predictions)

    def _predictions(self, kept: list[Tensor]) -> Predictions:
        probabilities = torch.cat(kept).cpu().numpy()
        return Predictions(np.asarray(self.indices), self.labels.cpu().numpy(), probabilities, self.class_names)


def keeping(predict: Predict, kept: list[Tensor]) -> Predict:
    """The same prediction; the probabilities of each batch are added to `kept`.

    The softmax of logits and of log-probabilities, which some inference rules return, is the probabilities.
    """

    def kept_too(images: Tensor) -> Tensor:
        logits = predict(images)
        kept.append(logits.float().softmax(dim=1))
        return logits

    return kept_too
