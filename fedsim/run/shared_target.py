"""The evaluation of the unseen domain when a run has several processes: each predicts some of the batches."""

import logging
import time
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsim.run.target import TargetEvaluator
from fedsim.tensors.arrays import record_to_arrays
from fedsim.tensors.records import Config, arrays_of
from strategies.parts import Entries
from strategies.wire.target_site import TargetScore

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
        """One message to each process, where there are several and the rule predicts each image by itself."""
        self._sent, self._logits, self._score = [], {}, None
        divisible = self.evaluator.divisible and not self._alone
        nodes = self.grid.nodes_of_processes() if divisible and hasattr(self.grid, "nodes_of_processes") else []
        common: Config = {**self.settings, "round": round, "phase": "predict", "client": ""}
        for index, node in enumerate(nodes if len(nodes) > 1 else []):
            places = list(range(len(self.evaluator.cuts())))[index :: len(nodes)]
            content = RecordDict({"arrays": arrays, "config": ConfigRecord({**common, "places": places})})
            self._sent.append(Message(content, node, "query.predict"))
        return self._sent

    def others(self, replies: Iterable[Message]) -> Iterator[Message]:
        """The replies that do not answer our messages; those that do make the score, while clients still validate."""
        for reply in replies:
            if reply.metadata.reply_to_message_id not in {message.metadata.message_id for message in self._sent}:
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
        logits = {int(place): torch.tensor(array) for place, array in self._logits.items()}
        self._logits = {}
        return self.evaluator.score_of([logits[place] for place in sorted(logits)], started)

    def take(self, used: bool = True) -> None:
        """Forget the score of a model that is not used."""
        if not used:
            self._score = None

    def __call__(self, arrays: ArrayRecord, entries: Entries) -> TargetScore:
        """The score of a model, by the logits that came for it, or else computed here.

        entries: those of the bank that the inference rule needs
        """
        score, self._score = self._score, None
        return score or self.evaluator(record_to_arrays(arrays), entries)
