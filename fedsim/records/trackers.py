"""Trackers that ship: Weights & Biases and MLflow. `--callback wandb` and `--callback mlflow` switch them on.

Both write the resolved settings, all numbers of every round under the names of `scalars`, and the summary. Where they
write is said by their own variables: WANDB_MODE, WANDB_PROJECT and the others of W&B, and MLFLOW_TRACKING_URI. A run
that is resumed continues its record. MLflow itself asks for MLFLOW_ALLOW_FILE_STORE=true before it writes into files.
"""

import hashlib
import os
import time
from pathlib import Path
from typing import Any

from fedsim.common.about import optional
from fedsim.common.errors import UserError
from fedsim.records.callbacks import numbers, scalars
from fedsim.records.differences import flatten
from fedsim.settings.experiment import Experiment

FOLDER_TAG = "fedsim.folder"
AT_ONCE = 100  # parameters or metrics of one request to an MLflow server


def _required(package: str) -> Any:
    return optional(package, f"run.callbacks has {package!r}, which is not installed", package)


def _name(experiment: Experiment) -> str:
    return f"{experiment.method_name} {experiment.run.target} seed {experiment.run.seed}"


class WandB:
    """Writes a run to Weights & Biases. The project is WANDB_PROJECT, or else the experiment's name.

    Raises UserError on construction when the package wandb is not installed.
    """

    def __init__(self) -> None:
        self._wandb = _required("wandb")
        self._run: Any = None

    def on_start(self, experiment: Experiment, folder: Path) -> None:
        """Begin the record, or continue that of the same folder."""
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT") or experiment.name,
            group=experiment.method_name,
            name=_name(experiment),
            id=hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16],
            resume="allow",
            reinit="create_new",
            dir=str(folder),
            config=experiment.model_dump(mode="json"),
        )

    def on_round(self, row: dict[str, Any], clients: list[dict[str, Any]]) -> None:
        """Write the numbers of a round as its step. W&B itself leaves out steps that it has already."""
        self._run.log(scalars(row, clients), step=int(row["round"]))

    def on_end(self, summary: dict[str, Any]) -> None:
        """Write the summary and close the record."""
        values = {name: value for name, value in summary.items() if isinstance(value, str | int | float)}
        self._run.summary.update(values)
        self._run.finish()

    def on_failure(self, error: BaseException) -> None:
        """Close the record as failed."""
        if self._run is not None:
            self._run.finish(exit_code=1)


class MLflow:
    """Writes a run to MLflow, where MLFLOW_TRACKING_URI says (a server, `sqlite:///FILE` or `file:///FOLDER`).

    Raises UserError on construction when MLflow is not installed. mlflow-skinny, which the extra installs, is enough
    for a server and for files; a database needs the whole of mlflow.
    """

    def __init__(self) -> None:
        self._mlflow = _required("mlflow")
        self._client: Any = None
        self._id = ""

    def on_start(self, experiment: Experiment, folder: Path) -> None:
        """Begin the record, or continue that of the same folder."""
        try:
            client = self._client = self._mlflow.MlflowClient()
        except (self._mlflow.MlflowException, ImportError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"run.callbacks: MLflow cannot write to {self._mlflow.get_tracking_uri()} ({reason}); set "
                            "MLFLOW_TRACKING_URI") from None  # fmt: skip
        group = client.get_experiment_by_name(experiment.name)
        number = group.experiment_id if group else client.create_experiment(experiment.name)
        tag = str(folder.resolve())
        earlier = client.search_runs([number], f"tags.`{FOLDER_TAG}` = '{tag}'", max_results=1)
        if earlier:
            self._id = earlier[0].info.run_id
            client.update_run(self._id, status="RUNNING")
            return
        record = client.create_run(number, run_name=_name(experiment), tags={FOLDER_TAG: tag})
        self._id = record.info.run_id
        parameters = []
        for name, value in flatten(experiment.model_dump(mode="json")).items():
            if value not in ("", None, []):
                parameters.append(self._mlflow.entities.Param(name, str(value)))
        self._write("params", parameters)

    def on_round(self, row: dict[str, Any], clients: list[dict[str, Any]]) -> None:
        """Write the numbers of a round as its step."""
        self._write("metrics", self._metrics(scalars(row, clients), int(row["round"])))

    def on_end(self, summary: dict[str, Any]) -> None:
        """Write the numbers of the summary and close the record."""
        self._write("metrics", self._metrics(numbers(summary, "summary"), 0))
        self._client.set_terminated(self._id)

    def on_failure(self, error: BaseException) -> None:
        """Close the record as failed."""
        if self._id:
            self._client.set_terminated(self._id, status="FAILED")

    def _metrics(self, values: dict[str, float], step: int) -> list[Any]:
        now = int(1000 * time.time())
        return [self._mlflow.entities.Metric(name, value, now, step) for name, value in values.items()]

    def _write(self, kind: str, entries: list[Any]) -> None:
        for start in range(0, len(entries), AT_ONCE):
            self._client.log_batch(self._id, **{kind: entries[start : start + AT_ONCE]})
