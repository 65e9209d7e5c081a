"""Says on which data the primary metric has no value, or less meaning than its name says, and why."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from fedsim.common.lists import first_few
from fedsim.common.tasks import TASKS
from fedsim.common.values import Row
from fedsim.runs.target import TargetEvaluator
from fedsim.runs.workspace import Workspace

VALIDATIONS = "(validation)"  # the key of what is said of clients, besides the name of the unseen domain


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
