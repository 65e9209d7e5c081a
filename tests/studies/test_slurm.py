"""Cells as jobs of Slurm: what sbatch is told, and jobs that submitit runs on this machine."""

import os
import signal
from pathlib import Path

import pytest
from processes import descendants, until
from support import numbers

from fedsim.common.errors import UserError
from fedsim.runtime.launch import launch
from fedsim.studies import Axes, Budget, on_cluster, run_sweep
from fedsim.studies.plan import plan_cells, rounds_on_disk

submitit = pytest.importorskip("submitit")
SMALL = ("data.fraction=0.05", 'data.domains=["rot0", "rot15", "rot30"]', "train.rounds=2", "run.device=cpu")
AXES = Axes(["fedbn"], ["rot0", "rot15"], [0])


@pytest.mark.parametrize(("launcher", "gpus", "said"), [
    ("slurm", 0, "needs time=MINUTES"), ("slurm time=1:00", 0, "needs time=MINUTES"),
    ("slurm time=5 partition", 0, "partition is not KEY=VALUE"), ("slrum time=5", 0, "there are slurm and local"),
    ("slurm time=5", 0.5, "has whole GPUs"), ("slurm time=5", 0, 'Could not detect "srun"'),
])  # fmt: skip
def test_what_a_job_cannot_have_is_refused(launcher, gpus, said, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    words = [*SMALL, f"run.output={tmp_path / 'out'}"]
    with pytest.raises(UserError, match=said):
        run_sweep("digits", AXES, Budget(gpus=gpus, launcher=launcher), overrides=words)
    assert not list(tmp_path.rglob("summary.csv"))


def test_what_sbatch_is_told(tmp_path, monkeypatch):
    for name in ("srun", "sbatch"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    cells = plan_cells("digits", AXES, [*SMALL, f"run.output={tmp_path}"], "")
    budget = Budget(cores=3, gpus=2, launcher="slurm time=90 partition=gpu mem=16G mail-type=END")
    text = on_cluster.SlurmPool(cells, budget)._executor._executor._make_submission_file_text("python", "1")
    told = {line.removeprefix("#SBATCH --") for line in text.splitlines()}
    assert {"time=90", "partition=gpu", "mem=16G", "mail-type=END", "cpus-per-task=3", "gpus-per-node=2"} <= told
    assert f"output={tmp_path}/digits/slurm-jobs/%j_0_log.out" in told


@pytest.mark.parametrize("launcher", [
    "debug time=5", pytest.param("local time=5", marks=pytest.mark.slow),
])  # fmt: skip
def test_jobs_give_the_numbers_of_a_sweep_here(launcher, tmp_path, monkeypatch):
    """In jobs of this process, and in processes of submitit, of which one dies and is reported with its log."""
    monkeypatch.setattr(on_cluster, "LAUNCHERS", ("local", "debug"))
    monkeypatch.setattr(on_cluster, "SLURM_SECONDS", 0.1)
    words, budget = [*SMALL, f"run.output={tmp_path / 'jobs'}"], Budget(launcher=launcher)
    if launcher.startswith("local"):
        probes = str(Path(__file__).parents[1] / "runtime")
        monkeypatch.syspath_prepend(probes)
        monkeypatch.setenv("PYTHONPATH", probes, prepend=os.pathsep)
        died = run_sweep("digits", AXES, budget, overrides=[*words, "run.callbacks=['probe_app:DieOnce']"])
        assert [cell.title for cell in died] == ["fedbn → rot15 (seed 0)"]
        assert "died" in died[0].reason
        assert "_log.err" in died[0].reason
    assert run_sweep("digits", AXES, budget, overrides=words) == []
    for cell in plan_cells("digits", AXES, [*SMALL, f"run.output={tmp_path / 'here'}"], ""):
        launch(cell.experiment)
    ours, theirs = (numbers(tmp_path / name / "digits" / "results.csv") for name in ("jobs", "here"))
    assert ours.equals(theirs)


@pytest.mark.slow
def test_a_preempted_job_is_queued_again(tmp_path):
    """It has the signal that Slurm gives before it ends a job."""
    words = [*SMALL, "train.rounds=40", f"run.output={tmp_path}"]
    (cell,) = plan_cells("digits", Axes(["fedbn"], ["rot0"], [0]), words, "")
    cell.folder.mkdir(parents=True)
    job = on_cluster.SlurmPool([cell], Budget(launcher="local time=5")).submit(cell)
    until(lambda: rounds_on_disk(cell) >= 2, 300)
    (process,) = descendants(int(job.job_id))
    os.kill(process, signal.SIGUSR2)
    assert job.result()[0] == "finished"
    assert "Requeued job" in job.stdout()
    assert numbers(cell.folder / "rounds.csv")["round"].tolist() == list(range(41))
