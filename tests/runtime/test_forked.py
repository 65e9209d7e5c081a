"""The inline runtime in forked processes: the numbers of one process, also when one dies; forked to save time."""

import errno
import multiprocessing
import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from probe_app import Killer
from processes import descendants, is_alive, until
from support import numbers, tiny_experiment

import fedsim.runtime.forked
from fedsim.apps.client import app
from fedsim.common.errors import UserError
from fedsim.methods.recipe import Recipe
from fedsim.methods.table import METHODS
from fedsim.models.infer.base import EvalMode
from fedsim.runs.plan import resolve
from fedsim.runs.processes import reason_against
from fedsim.runs.serve import serve
from fedsim.runs.target import SharedTarget, TargetEvaluator
from fedsim.runtime.forked import ForkedGrid
from fedsim.runtime.launch import launch
from strategies.visits.target_training import TargetTraining
from strategies.weights.by_examples import ByExamples

ONE, TWO = "clients go on in one process: ", r"run\.processes = 2: "


@pytest.fixture(autouse=True)
def one_thread():
    """Processes are forked while this one computes with one thread, as in a run."""
    if torch.accelerator.device_count():
        pytest.skip("autograd does not survive a fork where there is an accelerator")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_in(processes, folder, method="fedavg", rounds=2, **run):
    """A run in so many processes; four batches of the unseen domain's images."""
    own = {"processes": processes, "evaluate_batch_size": 16, **run}
    return tiny_experiment(folder / str(processes), method, rounds, run=own)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """one(method): the folder of the run in one process, which is done once."""
    return cache(lambda method="fedavg": launch(run_in(1, tmp_path_factory.mktemp("one"), method)))


def same_records(one, other):
    for file in ("rounds.csv", "clients.csv"):
        pd.testing.assert_frame_equal(numbers(one / file), numbers(other / file), rtol=0, atol=0)
    assert (one / "last.safetensors").read_bytes() == (other / "last.safetensors").read_bytes()
    kept, others = (sorted((folder / "predictions").iterdir()) for folder in (one, other))
    assert [file.read_bytes() for file in kept] == [file.read_bytes() for file in others]


@dataclass(frozen=True)
class Centred(EvalMode):
    """A rule from outside, which subtracts the mean logits of the batches that it has seen so far."""

    def begin(self, net, batches, uploads=None):
        net.eval()
        seen = []

        def predict(images):
            logits = net(images)
            seen.append(logits.mean(0))
            return logits - torch.stack(seen).mean(0)

        return predict


OWN = {
    "centred": Recipe(infer=Centred()),
    "visiting": replace(METHODS["fada"], weights=ByExamples(), visits=(TargetTraining(),)),
}


# Server banks and personal tensors, visits. A rule that derives from one that may be shared may not be itself.
@pytest.mark.parametrize(("method", "shared"), [("scaffold", True), ("visiting", None), ("centred", False)])
def test_two_processes_give_the_numbers_of_one_and_share_the_batches_of_the_unseen_domain(
    one, tmp_path, monkeypatch, method, shared
):
    if method in OWN:
        monkeypatch.setitem(METHODS, method, OWN[method])
    alone, here, whole = one(method), [], TargetEvaluator.__call__
    monkeypatch.setattr(TargetEvaluator, "__call__", lambda *given: here.append(1) or whole(*given))
    same_records(alone, launch(run_in(2, tmp_path, method)))
    assert shared is None or len(here) == (1 if shared else 3)  # the initial model is evaluated here


@contextmanager
def forked(experiment, client_app=app, say=lambda text: None):
    """The plan and the grid of a run."""
    plan = resolve(experiment)
    grid = ForkedGrid(client_app, plan, len(plan.clients), say)
    try:
        yield plan, grid
    finally:
        grid.close()


def test_when_processes_cannot_predict_the_server_does(one, tmp_path, caplog):
    """They are asked once in the run."""
    alone = one()

    def unable(message, context):
        if message.metadata.message_type == "query.predict":
            os.kill(os.getpid(), signal.SIGKILL)
        return app(message, context)

    with forked(run_in(2, tmp_path), unable) as (plan, grid):
        same_records(alone, serve(grid, plan))
    (line,) = [text for text in caplog.messages if text.startswith("the unseen domain is evaluated in one process")]
    assert "its client died 2 times (exit code -9; out of memory?)" in line


@pytest.mark.parametrize("used", [True, False])
def test_the_processes_logits_count_only_for_the_model_that_is_kept(tmp_path, monkeypatch, used):
    """Where most clients cannot use a model, the round keeps the one before, which the processes did not evaluate."""
    here, whole = [], TargetEvaluator.__call__
    monkeypatch.setattr(TargetEvaluator, "__call__", lambda *given: here.append(1) or whole(*given))
    take = SharedTarget.take
    monkeypatch.setattr(SharedTarget, "take", lambda shared, **_: take(shared, used))
    launch(run_in(2, tmp_path, rounds=1))
    assert len(here) == 1 + (not used)


def test_a_machine_that_lets_no_process_be_forked_is_one_line_or_the_run_goes_on(one, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fedsim.runtime.forked, "LEAST_SAVED", 0.0)
    monkeypatch.setattr(fedsim.runtime.forked, "free_cores", lambda: 2)
    monkeypatch.setattr(os, "fork", Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory")))
    with pytest.raises(UserError, match=r"could not be forked \(.*Cannot allocate memory\); .*run\.processes = 1 "):
        launch(run_in(2, tmp_path))
    caplog.set_level("INFO")
    same_records(one(), launch(run_in(0, tmp_path)))
    assert f"{ONE}another could not be forked ([Errno 12] Cannot allocate memory)" in caplog.text


def test_a_killed_process_is_replaced_and_changes_nothing(one, tmp_path):
    with forked(run_in(2, tmp_path, "scaffold")) as (plan, grid):
        killer = Killer(grid.pids)
        same_records(one("scaffold"), serve(grid, plan, [killer]))
        after = grid.pids()
    assert after[0] != killer.before[0]
    assert after[1] == killer.before[1]


def decided(monkeypatch, tmp_path, seconds, cores=4, **run):
    """(what is said, number of processes) after a first round of so many seconds; ten rounds remain."""
    monkeypatch.setattr(fedsim.runtime.forked, "free_cores", lambda: cores)
    said = []
    with forked(run_in(run.pop("processes", 0), tmp_path, rounds=11, **run), say=said.append) as (_, grid):
        for round, taken in ((0, 0.0), (1, seconds), (2, 1000.0)):
            grid.on_round({"round": round, "steps": 12 * bool(round), "train_seconds": taken}, [])
        return said, len(grid.pids())


def test_processes_are_forked_when_that_saves_time(monkeypatch, tmp_path):
    """Three clients on four cores save two thirds of their time."""
    said, count = decided(monkeypatch, tmp_path, 0.31)
    assert count == 3
    assert said[0].startswith("clients train in 3 processes from now on, with a core for each: training took 0.3 s")
    for seconds, words in ((0.29, {}), (9.0, {"cores": 1}), (9.0, {"processes": 1}), (9.0, {"threads": 2})):
        assert decided(monkeypatch, tmp_path, seconds, **words) == ([], 0)


@pytest.mark.parametrize(("place", "name", "value", "said"), [
    (torch.accelerator, "device_count", lambda: 1, "this machine has an accelerator"),  # also for a run on the CPU
    (multiprocessing.current_process(), "_config", {"daemon": True}, "this process is a daemon"),
])  # fmt: skip
def test_a_machine_that_does_not_let_them_fork_is_named(monkeypatch, tmp_path, place, name, value, said):
    monkeypatch.setattr(place, name, value)
    assert decided(monkeypatch, tmp_path, 0.29) == ([], 0)
    (found,), count = decided(monkeypatch, tmp_path, 9.0)
    assert (found.startswith(f"{ONE}{said}"), count) == (True, 0)
    with pytest.raises(UserError, match=f"{TWO}{said}"):
        launch(run_in(2, tmp_path))


@pytest.mark.parametrize(("sections", "said"), [
    ({"run": {"processes": 2, "threads": 2}}, "several processes have one thread each"),
    ({"run": {"processes": 2, "runtime": "ray"}}, r"run\.runtime = ray"),  # and not dropped in silence
    ({"run": {"processes": 2}, "train": {"side_by_side": 3}}, r"train\.side_by_side"),
])  # fmt: skip
def test_what_cannot_be_forked_is_refused(tmp_path, sections, said):
    with pytest.raises(UserError, match=TWO + said):
        launch(tiny_experiment(tmp_path, **sections))
    assert "one process" in reason_against(tiny_experiment(tmp_path, train={"compile": "default"}))


def test_processes_end_with_a_killed_run(tmp_path):
    """They hold personal state, which a resumed run continues; nobody else may write it then."""
    run = os.fork()
    if not run:
        try:
            launch(run_in(2, tmp_path, rounds=1000))
        finally:
            os._exit(1)
    children = until(lambda: found if len(found := descendants(run)) == 2 else [])
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    until(lambda: not any(map(is_alive, children)))
