"""Files of tables, and finished runs of their rows with invented accuracies."""

import io
from functools import cache
from pathlib import Path

import pandas as pd
from rich.console import Console

from fedsim.methods.recipe import values_of
from fedsim.records import Recorder, read_runs, summary_row
from fedsim.runs.plan import resolve
from fedsim.studies.reproduction import Reproduction, reproductions, show
from fedsim.studies.tables import Block, PaperTable, find_table, read_table, row_experiment

ROWS = '{ method = "fedavg", printed = "FedAvg" }, { method = "fedprox" }'


@cache
def shipped(name: str) -> PaperTable:
    return read_table(find_table(f"tables/{name}.toml"))


def own_table(
    folder: Path,
    rows: str = ROWS,
    targets: str = '["rot0", "rot75"]',
    settings: str = "",
    seeds: str = "[0, 1]",
    more: str = "",
) -> Path:
    """The file of a table, with the name of the copy that a sweep puts next to the runs."""
    file = folder / "table.toml"
    block = f'config = "digits"\ntargets = {targets}\nsettings = [{settings}]\n{more}'
    file.write_text(f'title = "Own"\ndeviation = "none"\nseeds = {seeds}\nrows = [{rows}]\n[[blocks]]\n{block}')
    return file


def finish(
    block: Block | Path, root: Path, target: str, seed: int = 0, accuracy: float = 0.5, row: int = 0, settings=()
) -> Path:
    """A finished run of one of the rows of a block, or of a table's only block."""
    own = read_table(block).blocks[0] if isinstance(block, Path) else block
    words = [f"run.seed={seed}", f"run.output={root}", *settings]
    plan = resolve(row_experiment(own, own.rows[row], target, words))
    recorder = Recorder(plan.folder)
    recorder.write_experiment(plan.experiment.toml())
    recorder.write_environment({"recipe": values_of(plan.recipe)})
    rounds = pd.DataFrame([{"round": 1, "mean_validation_accuracy": 0.9, "target_accuracy": accuracy}])
    recorder.write_summary(summary_row(plan.experiment, rounds, label=plan.folder.parent.parent.name))
    return plan.folder


def compared(folder: Path) -> Reproduction:
    (result,) = reproductions(folder, read_runs(folder))
    return result


def shown(*results: Reproduction) -> str:
    buffer = io.StringIO()
    show(results, Console(file=buffer, width=200))
    return buffer.getvalue()
