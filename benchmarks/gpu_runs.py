"""Short runs of every row on a GPU: do they agree with the CPU and with themselves, and does the host wait?

Each row is tried in a process of its own, because only the results count here and not the times.
"""

import multiprocessing
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from gpu_scale import Scale
from gpu_tables import Row

from fedsim.common.errors import UserError
from fedsim.runs.serve import serve
from fedsim.runs.workspace import close_workspaces
from fedsim.runtime.launch import make_grid
from fedsim.testing.contract import small_plan

OURS = ("fedsim", "strategies", "clients", "benchmarks")


def runs(scale: Scale, device: torch.device) -> Iterator[Row]:
    """1. Every row of METHODS runs with finite numbers, agrees with the CPU, and with equal seeds gives equal records.

    `loss` and `validation` are the differences from a run on the CPU after round 1, the loss as a share, without TF32.
    `as the CPU` says whether the validation is within 1e-3. `same` says whether the records of two fp32 runs are equal.
    """
    return each_row(run_row, scale, device)


def synchronisation(scale: Scale, device: torch.device) -> Iterator[Row]:
    """4. Where does the host wait for the device inside a local step? The lines that wait more often with more steps.

    A number before a line is its waits in one step of one client.
    """
    return each_row(wait_row, scale, device)


def each_row(work: Callable[[str, Scale, torch.device], Row], scale: Scale, device: torch.device) -> Iterator[Row]:
    """The work of every row, `scale.jobs` rows at a time."""
    todo = partial(one_row, work, scale=scale, device=device)
    if scale.jobs < 2:
        yield from map(todo, scale.methods)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(scale.jobs, mp_context=context) as pool:
        yield from pool.map(todo, scale.methods)


def one_row(work: Callable[..., Row], method: str, scale: Scale, device: torch.device) -> Row:
    """A row of the table; an error is written into it, so that the other rows are still tried."""
    try:
        return {"method": method} | work(method, scale, device)
    except Exception as error:
        place = "" if isinstance(error, UserError) else our_line(traceback.extract_tb(error.__traceback__))
        return {"method": method, "not run": f"{type(error).__name__} {error} {place}".replace("\n", " ")[:300]}


def run_row(method: str, scale: Scale, device: torch.device) -> Row:
    """Finite numbers, differences from the CPU after round 1, and whether two runs are equal."""
    row: Row = {}
    torch.backends.cudnn.allow_tf32 = False
    cpu = short_run(method, scale, torch.device("cpu"))
    validation = next(name for name in cpu if name.startswith("mean_validation"))
    for precision in scale.precisions:
        try:
            found = short_run(method, scale, device, f"train.precision={precision}")
        except UserError:
            row[f"{precision} finite"] = "refused"
            continue
        row[f"{precision} finite"] = bool(np.isfinite(found["train_loss"].iloc[1:]).all())
        row[f"{precision} loss"] = abs(found["train_loss"][1] / cpu["train_loss"][1] - 1)
        row[f"{precision} validation"] = abs(found[validation][1] - cpu[validation][1])
        if precision == "fp32":
            row |= {
                "as the CPU": row["fp32 validation"] <= 1e-3,
                "same": found.equals(short_run(method, scale, device)),
            }
    return row


def wait_row(method: str, scale: Scale, device: torch.device) -> Row:
    """The lines of ours that wait in every step."""
    few, many = (waits(method, scale, device, steps) for steps in (2, 6))
    each = {line: (many[line] - few[line]) / (4 * 3) for line in many if many[line] > few[line]}  # three clients
    found = ", ".join(f"{count:.2g} {line}" for line, count in sorted(each.items()))
    return {"waits": (found or "none") if device.type == "cuda" else "not a GPU"}


def waits(method: str, scale: Scale, device: torch.device, steps: int) -> Counter:
    """How often each line waited in one round of `steps` local steps."""
    lines: Counter = Counter()

    def note(message: Warning | str, *_: object, **__: object) -> None:
        if "synchronizing" in str(message):
            lines[our_line(traceback.extract_stack())] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            short_run(method, scale, device, "train.rounds=1", f"train.iterations={steps}")
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    return lines


def our_line(frames: traceback.StackSummary) -> str:
    """The innermost line of this project, such as `clients/terms/moon.py:62`."""
    for frame in reversed(frames):
        parts = Path(frame.filename).parts
        if parts[-1] != "gpu_runs.py" and (own := [at for at, part in enumerate(parts) if part in OURS]):
            return f"{'/'.join(parts[own[-1] :])}:{frame.lineno}"
    return "elsewhere"


def short_run(method: str, scale: Scale, device: torch.device, *changes: str) -> pd.DataFrame:
    """rounds.csv of a short run on digits, without times."""
    close_workspaces()
    words = [f"run.device={device.type}", f"train.rounds={scale.rounds}", *scale.changes, *changes]
    with tempfile.TemporaryDirectory() as folder:
        plan = small_plan(method, folder, words)
        found = pd.read_csv(serve(make_grid(plan), plan) / "rounds.csv")
    return found[[column for column in found if "seconds" not in column]]
