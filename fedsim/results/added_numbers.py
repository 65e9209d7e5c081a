"""Numbers of papers that a user adds: `fedsim compare --published mine.csv`, in the form of published.csv."""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from fedsim.common.errors import UserError
from fedsim.results.published import BACKBONES, DATASETS, as_ours, squeeze
from fedsim.settings.experiment import Experiment

NEEDED = ("paper", "dataset", "backbone", "method", "target_domain", "accuracy_percent", "std_percent")


def added_rows(
    file: Path, experiment: Experiment, methods: Iterable[str], targets: Iterable[str]
) -> tuple[pd.DataFrame, list[str]]:
    """(the file's rows of this data set, backbone and these methods, a note on them).

    Other settings are not compared, because fedsim does not know the papers' protocols. Raises UserError for a file
    that cannot be read or lacks a column, and for an accuracy that is no number from 0 to 100.
    """
    if not file.is_file():
        raise UserError(f"--published {file}: no such file")
    try:
        frame = pd.read_csv(file, keep_default_na=False, na_values=[""])
    except ValueError as error:
        raise UserError(f"--published {file}: not a readable CSV file: {error}") from None
    if lacking := [name for name in NEEDED if name not in frame]:
        raise UserError(f"--published {file}: no column {', '.join(lacking)}; needed: {', '.join(NEEDED)}")
    for name in ("accuracy_percent", "std_percent"):
        numbers = pd.to_numeric(frame[name], errors="coerce")
        wrong = (numbers.isna() & frame[name].notna()) | ~numbers.fillna(0).between(0, 100)
        if wrong.any():
            raise UserError(f"--published {file}: line {wrong.idxmax() + 2}: {name} is no number from 0 to 100")
        frame[name] = numbers
    data, backbone = experiment.data.dataset, experiment.model.backbone
    ours = {"dataset": {data, DATASETS.get(data, data)}, "backbone": {backbone, BACKBONES.get(backbone, backbone)}}
    for name, known in ours.items():
        frame = frame[frame[name].astype(str).map(squeeze).isin(set(map(squeeze, known)))]
    rows = as_ours(frame, methods, targets)
    if rows.empty:
        return rows, [f"{file}: no row of {data}, {backbone} and these methods."]
    return rows, [f"Rows of {file} are shown without a check that their protocol is that of these runs."]
