"""The log of a run without a terminal: lines on the standard output and in the run's `run.log`."""

import logging
import sys
from pathlib import Path

from fedsim.common.cores import free_cores
from fedsim.common.tasks import scores, task_in
from fedsim.records.selection import DEFAULT_RULE, rule_title
from fedsim.settings.experiment import Experiment
from fedsim.settings.run import NO_TARGET

LOG = "run.log"

logger = logging.getLogger("fedsim")


class LogLines:
    """One log line per round and per problem, to the standard output and into the run's `run.log`."""

    def on_start(self, experiment: Experiment, folder: Path) -> None:
        """Logs where the records are written."""
        self.basis = rule_title(DEFAULT_RULE, [experiment])
        logger.setLevel(logging.INFO)
        form = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
        for handler in (logging.StreamHandler(sys.stdout), logging.FileHandler(folder / LOG, encoding="utf-8")):
            handler.setFormatter(form)
            logger.addHandler(handler)
        run = experiment.run
        logger.info(
            "%s on %s, target %s, seed %d: records in %s",
            experiment.method_name,
            experiment.data.dataset,
            run.target,
            run.seed,
            folder,
        )
        threads = run.threads or "as many as there are cores"
        logger.info("CPU threads of each process: %s; cores free to this one: %d", threads, free_cores())

    def on_round(self, row: dict, clients: list[dict]) -> None:
        """Logs the round, and the primary metric in validation and on the target."""
        task = task_in(row)
        texts = [f"{name} {task.text(value)}" for name, value in scores(row)]
        logger.info("round %d: %s", row["round"], "  ".join(texts))

    def on_end(self, summary: dict) -> None:
        """Logs the result of the run."""
        task = task_in(summary, "best_validation_target_")
        place, quantity = summary["target"], "target"
        if place == NO_TARGET:
            place, quantity = "the validation of all domains", "mean_validation"
        value, round = summary[f"best_validation_{quantity}_{task.metric}"], summary["best_validation_round"]
        if round is None:  # the validation is NaN in every round
            logger.info("done: no round has a validation (%s)", self.basis)
        else:
            logger.info("done: %s on %s (round %d, %s)", task.text(value), place, round, self.basis)

    def on_failure(self, error: BaseException) -> None:
        """Logs why the run stopped."""
        reason = error if isinstance(error, Exception) else "from outside"  # by a signal
        logger.error("stopped: %s", reason)
