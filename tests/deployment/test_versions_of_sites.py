"""Versions of the sites of a run: recorded by site, told at its start where they differ, and noted by a comparison."""

import json

import pandas as pd
import pytest
from flwr.app import ConfigRecord
from sites import run_on_sites
from support import Interrupt, run_small, tiny_experiment

from fedsim.analysis import compare
from fedsim.common.about import VERSION, installed_version
from fedsim.records import read_runs
from fedsim.runs.notes import version_notes

TORCH = installed_version("torch")


def other_torch(version, domain="rot15"):
    """The handshake of this domain's site says another version of torch."""

    def tamper(message, reply):
        for name, record in reply.content.config_records.items() if reply.has_content() else ():
            if name.startswith("site") and record["client"] == domain:
                reply.content[name] = ConfigRecord({**record, "version-torch": version})
        return reply

    return tamper


def on_sites(folder):
    return tiny_experiment(folder, rounds=2, run={"evaluate_target": "site"})


def recorded(folder):
    return json.loads((folder / "environment.json").read_text())


def test_they_are_recorded_told_and_noted(tmp_path, caplog):
    folder, _ = run_on_sites(on_sites(tmp_path / "out"), tmp_path / "state", tamper=other_torch("2.0.1"))
    sites = recorded(folder)["sites"]
    assert list(sites) == ["rot0", "rot15", "rot30", "rot45"]
    assert sites["rot15"]["torch"] == "2.0.1"
    assert sites["rot0"] == {**sites["rot15"], "torch": TORCH}
    assert {"python", "fedsim", "torch", "flwr"} <= sites["rot0"].keys()
    said = f"torch is {TORCH} on the server and 2.0.1 at rot15; numbers may differ in the last digits"
    assert said in caplog.messages
    assert said in recorded(folder)["data_remarks"]
    notes = compare(read_runs(tmp_path / "out")).notes
    said = f"sites had other versions than the server: torch 2.0.1 at rot15, {TORCH} on the server."
    assert f"small/fedavg/rot45/seed0: {said}" in notes


def test_of_a_simulation_nothing_is_recorded(tmp_path):
    folder, _ = run_small(tiny_experiment(tmp_path, rounds=1))
    assert "sites" not in recorded(folder)


def test_a_site_that_changes_between_two_parts_of_a_run_has_both(tmp_path):
    experiment = on_sites(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        run_on_sites(experiment, tmp_path / "state", Interrupt(1))
    folder, _ = run_on_sites(experiment, tmp_path / "state", tamper=other_torch("2.0.1"))
    assert recorded(folder)["sites"]["rot15"]["torch"] == f"{TORCH}, then 2.0.1"
    assert list(pd.read_csv(folder / "rounds.csv")["round"]) == [0, 1, 2]


def test_runs_whose_sites_differ_are_noted(tmp_path):
    run_on_sites(on_sites(tmp_path / "out"), tmp_path / "state")
    other = on_sites(tmp_path / "out").replace(run={"seed": 1})
    run_on_sites(other, tmp_path / "state", tamper=other_torch("2.0.1"))
    notes = " ".join(compare(read_runs(tmp_path / "out")).notes)
    assert f"torch at rot15 {TORCH} (small/fedavg/rot45/seed0), 2.0.1 (small/fedavg/rot45/seed1)" in notes


def test_versions_that_decide_are_told_as_such():
    """Sites with one other version are one line; of fedsim and Flower the advice is another one."""
    server = {"fedsim": VERSION, "torch": "2.2", "python": "3.11.7"}
    same, other = dict(server), {**server, "torch": "2.1", "fedsim": "0.9"}
    assert version_notes(server, {"a": same, "b": same}) == []
    assert version_notes(server, {"a": same, "b": other, "c": other}) == [
        f"fedsim is {VERSION} on the server and 0.9 at b, c; install the same, or results may be another method's",
        "torch is 2.2 on the server and 2.1 at b, c; numbers may differ in the last digits",
    ]
    assert version_notes(server, {"a": {"torch": "2.1"}, "b": {"torch": "2.0"}}) == [
        "torch is 2.2 on the server, 2.1 at a and 2.0 at b; numbers may differ in the last digits"
    ]
