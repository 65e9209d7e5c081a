"""The inline runtime in forked processes: the numbers of one process, also when one dies; forked to save time."""

import errno
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pandas as pd
import pytest
import torch
from support import numbers, small_experiment

import fedsim.runtime.forked
from fedsim.client_app import app
from fedsim.common.errors import ClientFailedError, UserError
from fedsim.methods.recipe import Recipe
from fedsim.models.infer import EvalMode
from fedsim.results.callbacks import RunCallback
from fedsim.run.plan import resolve
from fedsim.run.processes import reason_against
from fedsim.run.serve import serve
from fedsim.run.target import TargetEvaluator
from fedsim.runtime.forked import ForkedGrid
from fedsim.runtime.launch import launch


@pytest.fixture(autouse=True)
def one_thread():
    """Processes are forked while this one computes with one thread, as in a run."""
    if torch.accelerator.device_count():
        pytest.skip("autograd does not survive a fork where there is an accelerator")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same_records(one, other):
    for file in ("rounds.csv", "clients.csv"):
        pd.testing.assert_frame_equal(numbers(one / file), numbers(other / file), rtol=0, atol=0)
    assert (one / "last.safetensors").read_bytes() == (other / "last.safetensors").read_bytes()
    kept, others = (sorted((folder / "predictions").iterdir()) for folder in (one, other))
    assert [file.read_bytes() for file in kept] == [file.read_bytes() for file in others]


def run_in(processes, folder, method="fedavg", **run):
    """A run of two rounds in so many processes."""
    own = {"output": str(folder / str(processes)), "processes": processes, **run}
    return small_experiment(folder, method, train={"rounds": 2}, run=own)


@pytest.mark.parametrize("method", ["scaffold", "fedbn", "fada"])  # server banks, personal tensors, visits
def test_two_processes_give_the_numbers_of_one(tmp_path, method):
    one, two = (
        launch(
            small_experiment(
                tmp_path, method, train={"rounds": 2}, run={"output": str(tmp_path / str(n)), "processes": n}
            )
        )
        for n in (1, 2)
    )
    same_records(one, two)


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


centred = Recipe(infer=Centred(), paper="own", discloses="nothing")


# COPA predicts with a bank, and in one process. A rule that derives from one that may be shared may not be itself.
@pytest.mark.parametrize("method", ["fedavg", "copa", f"{__name__}:centred"])
def test_processes_share_the_batches_of_the_unseen_domain(tmp_path, monkeypatch, method):
    """Seven batches of 16 images, whose logits are the last bit those of one process."""
    here = []
    whole = TargetEvaluator.__call__
    monkeypatch.setattr(TargetEvaluator, "__call__", lambda *given: here.append(1) or whole(*given))
    one = launch(run_in(1, tmp_path, method, evaluate_batch_size=16))
    assert len(here) == 3
    two = launch(run_in(2, tmp_path, method, evaluate_batch_size=16))
    same_records(one, two)
    assert len(here) == (3 if method == "fedavg" else 6)


def unable(message, context):
    """A client app whose processes die when they predict."""
    if message.metadata.message_type == "query.predict":
        os.kill(os.getpid(), signal.SIGKILL)
    return app(message, context)


def refusing(monkeypatch, refused):
    """Lets os.fork refuse these calls, by their number from 1 on."""
    calls, fork = itertools.count(1), os.fork

    def sometimes():
        if next(calls) in refused:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return fork()

    monkeypatch.setattr(os, "fork", sometimes)


@pytest.mark.parametrize(("refused", "said"), [([], "its client died 2 times"), ([3], "Cannot allocate memory")])
def test_when_processes_cannot_predict_the_server_does(tmp_path, monkeypatch, caplog, refused, said):
    """They are asked once in the run; where one dies, it may be that the machine has no memory for another."""
    one, plan = (
        launch(run_in(1, tmp_path, evaluate_batch_size=16)),
        resolve(run_in(2, tmp_path, evaluate_batch_size=16)),
    )
    refusing(monkeypatch, refused)
    grid = ForkedGrid(unable, plan, len(plan.clients))
    try:
        same_records(one, serve(grid, plan))
    finally:
        grid.close()
    (line,) = [text for text in caplog.messages if text.startswith("the unseen domain is evaluated in one process")]
    assert said in line


def test_a_machine_that_lets_no_client_have_a_process_is_one_line(tmp_path, monkeypatch):
    refusing(monkeypatch, range(1, 100))
    with pytest.raises(
        UserError, match=r"could not be forked \(\[Errno 12\] Cannot allocate memory\); .*run\.processes = 1 "
    ):
        launch(run_in(2, tmp_path))


class Killer(RunCallback):
    """Callback that kills the first process after round 1."""

    def __init__(self, grid):
        self.grid, self.before = grid, []

    def on_round(self, row, clients):
        if row["round"] == 1:
            self.before = self.grid.pids()
            os.kill(self.before[0], signal.SIGKILL)


def test_a_killed_process_is_replaced_and_changes_nothing(tmp_path):
    one, plan = launch(run_in(1, tmp_path, "scaffold")), resolve(run_in(2, tmp_path, "scaffold"))
    grid = ForkedGrid(app, plan, len(plan.clients))
    killer = Killer(grid)
    try:
        two = serve(grid, plan, [killer])
        after = grid.pids()
    finally:
        grid.close()
    same_records(one, two)
    assert after[0] != killer.before[0]
    assert after[1] == killer.before[1]


def suicidal(message, context):
    """A client app whose second client's process always dies."""
    if context.node_id == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return app(message, context)


def test_a_message_that_kills_twice_is_its_clients_failure(tmp_path):
    plan = resolve(run_in(2, tmp_path))
    grid = ForkedGrid(suicidal, plan, len(plan.clients))
    try:
        with pytest.raises(ClientFailedError, match=r"died 2 times \(exit code -9; out of memory\?\)"):
            serve(grid, plan)
    finally:
        grid.close()


def decided(monkeypatch, tmp_path, row, cores=4, **run):
    """(what is said, number of processes) after a round's row."""
    monkeypatch.setattr(fedsim.runtime.forked, "free_cores", lambda: cores)
    plan = resolve(small_experiment(tmp_path, train={"rounds": 11}, run={"output": str(tmp_path), **run}))
    said = []
    grid = ForkedGrid(app, plan, len(plan.clients), said.append)
    try:
        grid.on_round({"round": 0, "steps": 0, "train_seconds": 0}, [])
        grid.on_round({"round": 1, "steps": 12, **row}, [])
        grid.on_round({"round": 2, "steps": 12, "train_seconds": 1000.0}, [])
        return said, len(grid.pids())
    finally:
        grid.close()


def test_processes_are_forked_when_that_saves_time(monkeypatch, tmp_path):
    """Ten rounds remain; three clients on four cores save two thirds of their time."""
    said, count = decided(monkeypatch, tmp_path, {"train_seconds": 0.31})
    assert count == 3
    assert said[0].startswith("clients train in 3 processes from now on, with a core for each: training took 0.3 s")
    assert decided(monkeypatch, tmp_path, {"train_seconds": 0.29}) == ([], 0)
    assert decided(monkeypatch, tmp_path, {"train_seconds": 9.0}, cores=1) == ([], 0)
    assert decided(monkeypatch, tmp_path, {"train_seconds": 9.0}, processes=1) == ([], 0)
    assert decided(monkeypatch, tmp_path, {"train_seconds": 9.0}, threads=2) == ([], 0)


ONE = "clients go on in one process: "


def test_a_machine_that_does_not_let_them_fork_is_named(monkeypatch, tmp_path):
    """With an accelerator, also for a run on the CPU: autograd's threads for it do not survive a fork."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "device_count", lambda: 1)
        assert decided(patch, tmp_path, {"train_seconds": 0.29}) == ([], 0)
        (said,), count = decided(patch, tmp_path, {"train_seconds": 9.0})
        assert said.startswith(f"{ONE}this machine has an accelerator")
        assert count == 0
        with pytest.raises(UserError, match=r"run\.processes = 2: this machine has an accelerator"):
            launch(run_in(2, tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
        (said,), count = decided(patch, tmp_path, {"train_seconds": 9.0})
        assert said.startswith(f"{ONE}this process is a daemon")
        assert count == 0


def test_a_run_whose_processes_cannot_be_forked_goes_on_in_one(monkeypatch, tmp_path, caplog):
    def refused():
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(fedsim.runtime.forked, "LEAST_SAVED", 0.0)
    monkeypatch.setattr(fedsim.runtime.forked, "free_cores", lambda: 2)
    monkeypatch.setattr(os, "fork", refused)
    caplog.set_level("INFO")
    one, tried = launch(run_in(1, tmp_path)), launch(run_in(0, tmp_path))
    same_records(one, tried)
    assert f"{ONE}another could not be forked ([Errno 11] no more processes)" in caplog.text


def test_what_cannot_be_forked_is_refused(tmp_path):
    experiment = small_experiment(tmp_path, run={"processes": 2, "threads": 2})
    with pytest.raises(UserError, match=r"run\.processes = 2: several processes have one thread each"):
        launch(experiment)
    for changes in (
        {"run": {"processes": 2, "runtime": "ray"}},
        {"run": {"processes": 2}, "train": {"side_by_side": 3}},
    ):
        with pytest.raises(UserError, match=r"run\.processes = 2: (run\.runtime = ray|train\.side_by_side)"):
            launch(small_experiment(tmp_path, **changes))  # and not dropped in silence
    assert "one process" in reason_against(small_experiment(tmp_path, train={"compile": "default"}))


def test_processes_end_with_a_killed_run(tmp_path):
    """They hold personal state, which a resumed run continues; nobody else may write it then."""
    command = [sys.executable, "-m", "fedsim", "run", "digits", "--target", "rot75", "--output", str(tmp_path)]
    command += ["--set", "run.processes=2", "--set", "train.rounds=1000"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as run:
        children = wait_for(lambda: found if len(found := children_of(run.pid)) == 2 else [])
        run.kill()
    wait_for(lambda: not any(alive(child) for child in children))


def children_of(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found
