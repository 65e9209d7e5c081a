"""Cells as Ray tasks: when a task dies, its cell fails by name, the others finish, and the next sweep runs it again."""

import socket

import pytest
from support import numbers

from fedsim.common.errors import UserError
from fedsim.runtime.launch import launch
from fedsim.sweep import Axes, Budget, run_sweep
from fedsim.sweep.cell_process import run_cell_elsewhere
from fedsim.sweep.on_ray import RayPool
from fedsim.sweep.plan import plan_cells

SMALL = ("data.fraction=0.1", 'data.domains=["rot0", "rot15", "rot30"]', "train.rounds=3", "run.device=cpu")
AXES = Axes(["fedbn"], ["rot0", "rot15"], [0])


@pytest.mark.slow
def test_sweep_on_a_cluster(ray_cluster, tmp_path, capsys):
    """The numbers are those of a local sweep; the cells' folders say which machine ran them."""
    words = [*SMALL, f"run.output={tmp_path / 'ray'}", "run.callbacks=['probe_callbacks:DieOnce']"]
    failed = run_sweep("digits", AXES, Budget(ray="auto"), overrides=words)
    assert [cell.title for cell in failed] == ["fedbn → rot15 (seed 0)"]
    assert "the Ray task died" in failed[0].reason
    assert failed[0].place == socket.gethostname()
    assert "1 of 2 cells finished, 1 failed" in capsys.readouterr().err
    assert run_sweep("digits", AXES, Budget(ray="auto"), overrides=words) == []
    assert ray_cluster.is_initialized()
    for cell in plan_cells("digits", AXES, [*SMALL, f"run.output={tmp_path / 'local'}", "run.threads=1"], ""):
        launch(cell.experiment)
    ours, theirs = (numbers(tmp_path / name / "digits" / "results.csv") for name in ("ray", "local"))
    assert ours.equals(theirs)


def test_outputs_must_be_shared(tmp_path):
    """A machine that does not see the run's folder does not write records into a folder of its own."""
    kind, reason, _ = run_cell_elsewhere("", str(tmp_path / "not-here"), str(tmp_path), print)
    assert kind == "failed"
    assert "storage that all machines share" in reason
    assert socket.gethostname() in reason


def test_what_no_machine_carries_is_said(ray_cluster, tmp_path):
    cells = plan_cells("digits", AXES, [*SMALL, f"run.output={tmp_path}"], "")
    with (
        pytest.raises(UserError, match=r"has room for 0 cells of 99 CPUs.*--cores-per-cell"),
        RayPool(cells, Budget(cores=99)),
    ):
        pass


def test_jobs_limit_the_tasks(ray_cluster, tmp_path):
    cells = plan_cells("digits", AXES, [*SMALL, f"run.output={tmp_path}"], "")
    with RayPool(cells, Budget(jobs=1, ray="auto")) as pool:
        assert pool.width == 1
