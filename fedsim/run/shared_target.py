"""The evaluation of the unseen domain when a run has several processes: each predicts some of the batches."""

import logging
import time
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsim.common.errors import NotForkedError
from fedsim.run.target import TargetEvaluator
from fedsim.tensors.arrays import record_to_arrays
from fedsim.tensors.records import Config, arrays_of
from strategies.parts import Entries
from strategies.wire.target_site import TargetScore

logger = logging.getLogger("fedsim")


@runtime_checkable
class Lanes(Protocol):
    """A grid of several processes."""

    def lanes(self) -> list[int]:
        """One node of each process."""


class SharedTarget:
    """Evaluates a global model in this process, or in all processes of a grid that has `lanes`.

    The batches are those of one process. Their logits are measured here, in the order of the batches, so that the score
    is the same to the last bit. If a process dies or cannot be forked, this one predicts all batches from then on.
    """

    _alone = False

    def __init__(self, evaluator: TargetEvaluator, grid: Grid, settings: Config) -> None:
        self.evaluator, self.grid, self.settings = evaluator, grid, settings

    def __call__(self, round: int, arrays: ArrayRecord, entries: Entries) -> TargetScore:
        """The score of the model of a round; `entries` are those of the bank that the inference rule needs."""
        started = time.perf_counter()
        lanes = self.grid.lanes() if self._may_share() and isinstance(self.grid, Lanes) else []
        logits = self._asked(round, arrays, lanes) if len(lanes) > 1 else {}
        if len(logits) < len(self.evaluator.cuts()):
            return self.evaluator(record_to_arrays(arrays), entries)
        return self.evaluator.score_of([logits[place] for place in sorted(logits)], started)

    def _may_share(self) -> bool:
        return not self._alone and self.evaluator.divisible

    def _asked(self, round: int, arrays: ArrayRecord, lanes: list[int]) -> dict[int, torch.Tensor]:
        """The logits of the batches, by their place; none when a process failed."""
        common: Config = {**self.settings, "round": round, "phase": "predict", "client": ""}
        messages = []
        for index, node in enumerate(lanes):
            places = list(range(len(self.evaluator.cuts())))[index :: len(lanes)]
            content = RecordDict({"arrays": arrays, "config": ConfigRecord({**common, "places": places})})
            messages.append(Message(content, node, "query.predict"))
        found: dict[str, np.ndarray] = {}
        failed = ""
        try:
            for reply in self.grid.send_and_receive(messages):
                if reply.has_error():
                    failed = str(reply.error.reason)
                else:
                    found |= record_to_arrays(arrays_of(reply.content)["logits"])
        except NotForkedError as error:
            failed = str(error.__cause__)
        if failed:
            self._alone = True
            reason = failed.strip().splitlines()[-1]
            logger.warning("the unseen domain is evaluated in one process from now on: %s", reason)
            return {}
        return {int(place): torch.tensor(array) for place, array in found.items()}
