"""Ray: room for workers, order of messages, workers that die or are late, what is sent to them, runs and sweeps."""

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from probe_app import Killer
from support import numbers, run_small, tiny_experiment

import fedsim.runtime.ray_worker
from fedsim.common.errors import UserError
from fedsim.runs.plan import resolve
from fedsim.runs.serve import serve
from fedsim.runtime import cluster
from fedsim.runtime.launch import launch
from fedsim.runtime.message_bytes import RecordBytes
from fedsim.runtime.ray import RayGrid, SharedTensors
from fedsim.runtime.ray_worker import addressee
from fedsim.settings import RunSettings
from fedsim.studies import Axes, Budget, run_sweep
from fedsim.studies.cell_process import run_cell_elsewhere
from fedsim.studies.on_cluster import RayPool
from fedsim.studies.plan import plan_cells
from fedsim.tensors.arrays import record_to_arrays, state_to_record


@pytest.fixture
def planned(monkeypatch):
    """planned(settings, resources): the workers for five clients, as if Ray had these machines and one that is off."""

    def plan(settings, *resources):
        nodes = [{"Alive": True, "Resources": each} for each in resources]
        nodes.append({"Alive": False, "Resources": {"CPU": 100.0}})
        monkeypatch.setattr(cluster, "import_ray", lambda: SimpleNamespace(nodes=lambda: nodes))
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        return cluster.plan_workers(RunSettings(**settings), clients=5)

    return plan


@pytest.mark.parametrize(("settings", "resources", "workers", "gpus"), [
    ({}, [{"CPU": 8.0}], 5, 0.0),  # one per client at most
    ({}, [{"CPU": 2.0}], 2, 0.0),
    ({"cpus_per_worker": 2.0}, [{"CPU": 3.0}, {"CPU": 5.0}], 3, 0.0),  # whole workers per machine
    ({"ray_address": "somewhere", "workers": 2}, [{"CPU": 8.0}], 2, 0.0),  # only what is reserved
    ({"cpus_per_worker": 0.5}, [{"CPU": 1.0}], 2, 0.0),
    ({"gpus_per_worker": 0.25}, [{"CPU": 8.0, "GPU": 1.0}], 4, 0.25),
    ({"gpus_per_worker": 0.6}, [{"CPU": 8.0, "GPU": 2.0}], 2, 0.6),  # a fraction does not span two GPUs
    ({}, [{"CPU": 8.0, "GPU": 2.0}], 5, 0.3333),  # without a wish the GPUs are shared
    ({"device": "cpu"}, [{"CPU": 8.0, "GPU": 1.0}], 5, 0.0),
])  # fmt: skip
def test_workers_fill_the_cluster(planned, settings, resources, workers, gpus):
    plan = planned(settings, *resources)
    assert (plan.workers, plan.gpus) == (workers, gpus)


@pytest.mark.parametrize(("settings", "said"), [
    ({"cpus_per_worker": 16.0}, "has room for 0 workers of 16 CPUs"),
    ({"ray_address": "somewhere", "workers": 5, "cpus_per_worker": 4.0}, "has room for 2 workers of 4 CPUs"),
    ({"device": "cuda"}, "no GPU"),
    ({"gpus_per_worker": 0.5}, "has room for 0 workers"),
])  # fmt: skip
def test_what_does_not_fit_is_said_before_anything_starts(planned, settings, said):
    with pytest.raises(UserError, match=said):
        planned(settings, {"CPU": 8.0})


def test_without_ray_or_a_cluster_at_the_address_one_line_says_what_to_do(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ray", None)
        with pytest.raises(UserError, match=r"pip install .feddg-sim\[ray\]"):
            cluster.import_ray()
    monkeypatch.setattr(cluster, "import_ray", lambda: SimpleNamespace(is_initialized=lambda: False))
    with pytest.raises(UserError, match=r"\Ano Ray cluster at '127.0.0.1:9' .*`ray start --head`.*\Z"):
        cluster.open_cluster(RunSettings(ray_address="127.0.0.1:9"))


def test_a_folder_whose_path_is_too_long_for_sockets_gets_the_advice_that_helps(monkeypatch):
    def init(**_):
        raise OSError("validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: /x")

    ray = SimpleNamespace(is_initialized=lambda: False, init=init, shutdown=lambda: None)
    monkeypatch.setattr(cluster, "import_ray", lambda: ray)
    with pytest.raises(UserError, match=r"a shorter folder \(TMPDIR=/tmp before the command\)"):
        cluster.open_cluster(RunSettings())


@pytest.fixture(scope="module")
def ray_cluster():
    """Ray with three CPUs whose workers find the probe app. Sweeps come first: the grids below keep all CPUs."""
    pytest.importorskip("ray")
    ray = cluster.import_ray()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield ray
        ray.shutdown()


SMALL = ("data.fraction=0.1", 'data.domains=["rot0", "rot15", "rot30"]', "train.rounds=3", "run.device=cpu")
AXES = Axes(["fedbn"], ["rot0", "rot15"], [0])


@pytest.mark.slow
def test_a_sweep_whose_task_dies_fails_its_cell_by_name_and_the_next_one_runs_it(ray_cluster, tmp_path, capsys):
    """The numbers are those of a local sweep; the cells' folders say which machine ran them."""
    words = [*SMALL, f"run.output={tmp_path / 'ray'}", "run.callbacks=['probe_app:DieOnce']"]
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


def test_jobs_limit_the_tasks_and_what_no_machine_carries_is_said(ray_cluster, tmp_path):
    cells = plan_cells("digits", AXES, [*SMALL, f"run.output={tmp_path}"], "")
    with RayPool(cells, Budget(jobs=1, ray="auto")) as pool:
        assert pool.width == 1
    said = r"has room for 0 cells of 99 CPUs.*--cores-per-cell"
    with pytest.raises(UserError, match=said), RayPool(cells, Budget(cores=99)):
        pass


@pytest.fixture(scope="module")
def grid(ray_cluster):
    """Three clients of the real app on two workers."""
    grid = RayGrid(3, RunSettings(threads=1, device="cpu", workers=2))
    yield grid
    grid.close()


@pytest.fixture(scope="module")
def probes(ray_cluster):
    """Three clients of the probe app on one worker, which is replaced after each test that kills it."""
    grid = RayGrid(3, RunSettings(threads=1, device="cpu", workers=1), app="probe_app:app")
    yield grid
    grid.close()


def ask(grid, orders, timeout=None, arrays=None):
    """{node: reply}, for one message to each of the nodes 2, 3, 4."""
    messages = []
    for node, order in zip(grid.node_ids, orders):
        content = {"config": ConfigRecord({"order": order, "client": f"domain-{node}"})}
        messages.append(Message(RecordDict({**content, **({"arrays": arrays} if arrays else {})}), node, "query"))
    replies = list(grid.send_and_receive(messages, timeout=timeout))
    by_id = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
    return {by_id[reply.metadata.reply_to_message_id]: reply for reply in replies}


def where(reply):
    return reply.content.config_records["where"]


def test_one_worker_serves_its_clients_in_order_and_stays_warm_also_after_an_exception(probes):
    state = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7), "none": np.empty((0, 3))}
    first = ask(probes, ["say"] * 3, arrays=state_to_record(state))
    second = ask(probes, ["raise", "say", "say"])
    error = second.pop(2).error.reason
    assert "told to raise" in error
    assert "Traceback" in error
    places = [where(reply) for reply in (*first.values(), *second.values())]
    assert len({place["pid"] for place in places}) == 1
    earlier = places[0]["answered"] - 1
    order = [(place["client"], place["answered"] - earlier) for place in places]
    assert order == [(0, 1), (1, 2), (2, 3), (1, 4), (2, 5)]
    for reply in first.values():
        back = record_to_arrays(reply.content.array_records["arrays"])
        assert list(back) == list(state)
        for name, array in state.items():
            np.testing.assert_array_equal(back[name], array)
            assert back[name].dtype == array.dtype


@pytest.mark.slow
def test_a_worker_that_dies_once_is_replaced_and_one_that_dies_twice_fails_its_client_by_name(probes, tmp_path):
    """The new process answers all three messages; another death is counted separately."""
    before = {pid for pid, _ in probes.workers()}
    replies = ask(probes, ["say", f"die {tmp_path / 'note'}", "say"])
    assert sorted(replies) == [2, 3, 4]
    assert all(reply.has_content() for reply in replies.values())
    assert where(replies[3])["pid"] == where(replies[4])["pid"] == probes.workers()[0][0]
    assert where(replies[3])["pid"] not in before
    again = ask(probes, ["say", "die", "say"])
    assert "client 'domain-3' died twice (out of memory?)" in again[3].error.reason
    assert len(again[3].error.reason.splitlines()) == 1
    assert again[2].has_content()
    assert again[4].has_content()


def test_a_late_client_is_missing_and_its_worker_replaced(probes):
    early = ask(probes, ["say"])
    assert ask(probes, ["sleep"], timeout=0.3) == {}
    assert where(ask(probes, ["say"], timeout=60.0)[2])["pid"] != where(early[2])["pid"]


@pytest.mark.parametrize("size", [4, 100_000])
def test_equal_tensors_are_stored_once(ray_cluster, size):
    """A record with fewer tensors of the same model is not stored again; another model is."""
    state = {name: np.full(size, number, dtype=np.float32) for number, name in enumerate("abc")}
    whole = state_to_record(state)
    part = ArrayRecord({name: whole[name] for name in "ac"})
    shared = SharedTensors()
    reference, names = shared.share(whole)
    assert names is None
    assert isinstance(reference, RecordBytes) == (size == 4)
    assert shared.share(part) == (reference, ["a", "c"])
    other, _ = shared.share(state_to_record(state))
    assert other != reference
    shared.release_all_but([other])
    assert shared.share(part)[0] != reference


def test_a_shared_model_stays_as_it_was_stored():
    """The guard puts an earlier model back into the record, in place; this is another model than the stored one."""
    record = state_to_record({"w": np.zeros(3, np.float32)})
    shared = SharedTensors()
    stored, _ = shared.share(record)
    record.__dict__["_data"].update(state_to_record({"w": np.ones(3, np.float32)}))
    again, _ = shared.share(record)
    assert [list(record_to_arrays(content.record)["w"]) for content in (stored, again)] == [[0, 0, 0], [1, 1, 1]]
    message = Message(RecordDict({"config": ConfigRecord({"client": ""})}), 3, "query")
    assert addressee(message) == "node 3"  # in the handshake, where no client is known


@pytest.mark.parametrize("room", [True, False])
def test_a_killed_worker_changes_nothing(grid, ray_cluster, tmp_path, monkeypatch, room):
    """Its clients continue in a new process, or in the other one; both read their personal batch norm from files."""
    inline, _ = run_small(tiny_experiment(tmp_path / "inline", "fedbn"))
    sitter = None if room else ray_cluster.remote(num_cpus=1)(type("Sitter", (), {})).remote()  # takes its processor
    monkeypatch.setattr(fedsim.runtime.ray_worker, "START_SECONDS", 60.0 if room else 1.0)
    killer = Killer(lambda: [pid for pid, _ in grid.workers()])
    ray = serve(grid, resolve(tiny_experiment(tmp_path / "ray", "fedbn")), [killer])
    assert killer.before[0] not in [pid for pid, _ in grid.workers()]
    assert [nodes for _, nodes in grid.workers()] == ([[2, 4], [3]] if room else [[3, 2, 4]])
    for file in ("rounds.csv", "clients.csv"):
        pd.testing.assert_frame_equal(numbers(ray / file), numbers(inline / file), rtol=0, atol=0)
    del sitter
