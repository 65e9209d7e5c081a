"""A run folder of the previous version, which was stopped after the second of three rounds, is read and resumed.

It was made at revision 2132c9e by `small_experiment("outputs", "scaffold+feddg-ga", ...)` with the settings in its
experiment.toml and `Interrupt(2)`. It has tensors of every kind that a run keeps: model, bank, weights, client states.
"""

import shutil
from pathlib import Path

import pandas as pd
from support import numbers, run_small

from fedsim.analysis import compare
from fedsim.records import read_runs
from fedsim.runs.plan import complete
from fedsim.settings.experiment import parse_experiment


def test_a_run_of_the_previous_version_is_resumed(tmp_path):
    """It ends as an unbroken run of this version; the table names the two revisions."""
    shutil.unpack_archive(Path(__file__).with_name("previous") / "run_of_2132c9e.zip", tmp_path / "then" / "small")
    text = (tmp_path / "then/small/scaffold+feddg-ga/rot45/seed0/experiment.toml").read_text(encoding="utf-8")
    then, now = (
        complete(parse_experiment(text).replace(run={"output": str(tmp_path / name)})) for name in ("then", "now")
    )
    folder, grid = run_small(then)
    rounds = {int(message.content["config"]["round"]) for message, _ in grid.seen if "config" in message.content}
    assert rounds == {0, 3}  # the handshake, and the round that was missing
    whole, _ = run_small(now)
    for name in ("rounds.csv", "clients.csv"):
        own, other = numbers(folder / name), numbers(whole / name)
        pd.testing.assert_frame_equal(own, other[own.columns], rtol=1e-4, atol=1e-5)  # another processor
    notes = " ".join(compare(read_runs(tmp_path / "then")).notes)
    assert "revision of fedsim 2132c9e" in notes
