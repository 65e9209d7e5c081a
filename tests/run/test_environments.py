"""A run that was resumed elsewhere records all its environments, with the rounds of each."""

import json

import pytest
from support import Interrupt, run_small, tiny_experiment

from fedsim.results import compare, read_runs
from fedsim.results.environment import earlier_environments
from fedsim.run import session

A, B = {"python": "3.11", "device": "cpu"}, {"python": "3.12", "device": "cpu"}


def test_environments_and_their_rounds():
    assert earlier_environments({}, A, -1) == {}
    assert earlier_environments(A, A, 4) == {}
    assert earlier_environments(A, {**A, "cores_free": 3}, 4) == {}
    second = earlier_environments(A, B, 4)
    assert second == {"from_round": 5, "earlier": [{**A, "from_round": 0}]}
    third = earlier_environments({**B, **second}, A, 7)
    assert [one["from_round"] for one in third["earlier"]] == [0, 5]
    assert third["from_round"] == 8
    assert earlier_environments({**B, **second}, B, 7) == second  # interrupted again, on the same machine
    assert earlier_environments({**B, **second}, A, 4) == {}  # killed before B completed a round
    assert earlier_environments({**B, **second}, A, -1) == {}  # begun again


def test_a_resumed_run_records_both_and_a_table_says_it(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        actual = session.environment
        patch.setattr(session, "environment", lambda: actual() | {"python": "3.9.0"})
        with pytest.raises(KeyboardInterrupt):
            run_small(tiny_experiment(tmp_path, rounds=3), Interrupt(2))
    record = json.loads(next(tmp_path.rglob("environment.json")).read_text())
    assert not {"earlier", "from_round"} & record.keys()
    folder, _ = run_small(tiny_experiment(tmp_path, rounds=3, run={"on_client_failure": "continue"}))
    record = json.loads((folder / "environment.json").read_text())
    (first,) = record["earlier"]
    assert (first["python"], first["from_round"], first["on_client_failure"]) == ("3.9.0", 0, "stop")
    assert (record["from_round"], record["on_client_failure"]) == (3, "continue")
    assert record["python"] != "3.9.0"
    assert "recipe" not in first
    notes = " ".join(compare(read_runs(folder.parents[2])).notes)
    assert "Python 3.9.0 (fedavg/rot45/seed0 from round 0)" in notes
    assert "(fedavg/rot45/seed0 from round 3)" in notes
