"""DomainClient: Flower's client of one domain. Names become positions only in its `fit` and `evaluate`.

Flower keeps NumPyClient in a package for components of an older interface. Our ClientApp calls the methods itself, so
that the clients do not change where Flower no longer has the class.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from clients.local_steps import Fitted, Measured, Order
from clients.round import LocalClient
from clients.validation import predicted_logits, source_test, validation
from fedsim.common.doubt import score_counts, slopes, softmax
from fedsim.models.infer.base import Predict
from fedsim.models.tasks import defined
from fedsim.tensors.arrays import fill
from strategies.parts import ArrayDict, Arrays

try:
    from flwr.client import NumPyClient
except ImportError:

    class NumPyClient:  # type: ignore[no-redef]
        """The contract of Flower's class: a client that takes and returns lists of arrays."""

        def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict]:
            """Train the given model; returns the trained arrays, the number of examples and metrics."""
            raise NotImplementedError

        def evaluate(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[float, int, dict]:
            """Validate the given model; returns the loss, the number of examples and metrics."""
            raise NotImplementedError


class DomainClient(LocalClient, NumPyClient):
    """Flower NumPyClient of one client name; `parameters` are the tensors of `names(phase)`, in that order."""

    def fit(self, parameters: list[np.ndarray], config: Order) -> Fitted:  # type: ignore[override]  # numbers alone
        """Trains; returns the tensors to send, the number of examples and metrics."""
        tensors = dict(zip(self.names("train"), parameters, strict=True))
        trained, examples, metrics = self.train(tensors, config)
        return list(trained.values()), examples, metrics

    def evaluate(self, parameters: list[np.ndarray], config: Order) -> Measured:  # type: ignore[override]  # as `fit`
        """Validates the received model; returns the loss, the number of images and metrics."""
        return self.validate_model(dict(zip(self.names("evaluate"), parameters, strict=True)), config)

    def validate_model(self, tensors: Arrays, order: Order) -> Measured:
        """Validates a received model: its loss, the number of images and metrics.

        The client's own tensors stay in the store, and are used only where they were never uploaded.
        """
        started = time.perf_counter()
        predict = self._received(tensors, order)
        metrics, loss, score = validation(self, self.experiment.run, predict)
        metrics |= source_test(self, self.experiment.run, predict)
        if self.experiment.run.personalised or self.personal:
            metrics |= self._personalised(score, loss)
        return loss, len(self.data.validation), {**metrics, "evaluation_seconds": time.perf_counter() - started}

    def _received(self, tensors: Arrays, order: Order) -> Predict | None:
        """Loads a received model; returns what predicts by it where that is not the network alone."""
        self.store.open_round(order["round"] + 1, order.get("state-round"), order.get("saved-round"))
        self._restore_personal(only="local")
        self._load(tensors, "evaluate")
        rule = self.recipe.infer
        return rule.begin(self.net, tuple) if rule.on_sources else None

    def doubt(self, tensors: Arrays, order: Order) -> tuple[ArrayDict, int]:
        """(sums over the validation examples for `run.doubt`, the number of these examples) of a received model.

        The sums are `slopes` [K] at the message's K `temperatures`, or `counts` [BINS] of scores at its `temperature`.
        """
        predict = self._received(tensors, order) or self.net
        self.view.eval()
        batches = self.data.evaluation(self.data.validation, self.experiment.run.evaluate_batch_size)
        labels, logits = predicted_logits(predict, batches)
        if "temperatures" in order:
            sums = {"slopes": slopes(logits, labels, np.array(order["temperatures"]))}
        else:
            sums = {"counts": score_counts(softmax(logits / order["temperature"]), labels)}
        return sums, len(labels)

    def _personalised(self, score: float, loss: float) -> dict[str, float]:
        """Validation of the received model with this client's own tensors in it, if it has any.

        These are the tensors that the share rule keeps on the client (FedIG-A, Table 12), and the personal models of
        parts.
        """
        stored = [self.store.get(name) for name in ("personal", *self.personal)]
        entries = [entry for entry in stored if entry is not None]
        for entry in entries:
            fill(self.state, entry)
        if entries:
            score, loss = self.validate()
        return defined({f"personal_{self.metric}": score, "personal_loss": loss})

    def collect(self, order: Order, tensors: Arrays | None = None) -> ArrayDict:
        """This client's contribution to the bank that the message names, made with the received model, if any."""
        round = self._open(order)
        if tensors is not None:
            self._load(tensors, "train")
        return self.recipe.contributor(order["bank"]).collect(round)


@dataclass
class Job:
    """A client's order to train: what `LocalClient.train` gets, and the client."""

    client: DomainClient
    tensors: Arrays
    config: Order
