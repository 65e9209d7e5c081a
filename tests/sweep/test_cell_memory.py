"""A sweep's worker process runs many cells; it keeps the memory of none of them."""

from types import SimpleNamespace

from support import small_experiment

from fedsim.run import workspace
from fedsim.sweep.cell_process import run_cell


def test_a_finished_cell_leaves_no_network_or_data_in_memory(tmp_path, monkeypatch):
    asked = []
    library = SimpleNamespace(malloc_trim=asked.append)
    monkeypatch.setattr("fedsim.sweep.cell_process.ctypes", SimpleNamespace(CDLL=lambda name: library))
    experiment = small_experiment(tmp_path, "fedavg", train={"rounds": 1})
    told = []
    assert run_cell(experiment.toml(), told.append) == ("finished", "", None)
    assert [message[0] for message in told] == ["round", "round"]
    assert not workspace._open
    assert asked == [0]
