"""Secure aggregation between real processes: FedAvg's numbers, a site that fails, and secrets that are removed."""

import json

import pandas as pd
import pytest
from harness import Loopback, run_folder, run_inline
from support import numbers

SECURE = {"method.fuse": "secure_mean", "run.update_limit": 0, "run.on_client_failure": "continue"}
NAME = "fedavg@fuse=secure_mean"
LOSSES = ["mean_validation_loss", "target_loss"]


@pytest.mark.deployment
def test_a_deployed_sum_is_the_inline_mean(tmp_path):
    """Two rounds; then a run in which a site fails in round 1 after it has sent its shares, and returns later."""
    inline = run_inline(tmp_path / "inline", **{"run.update_limit": 0})
    with Loopback(tmp_path) as federation:
        done = federation.run(tmp_path / "out", **SECURE)
        assert done.returncode == 0, done.stderr
        folder = run_folder(tmp_path / "out", NAME)
        pd.testing.assert_frame_equal(
            numbers(folder / "rounds.csv")[LOSSES], numbers(inline / "rounds.csv")[LOSSES], rtol=0, atol=1e-4
        )
        assert set(pd.read_csv(folder / "clients.csv")["status"]) == {"ok"}
        kept = list(tmp_path.glob("**/secure-mean.json"))
        assert len(kept) == 3
        for file in kept:
            assert file.stat().st_mode & 0o777 == 0o600
            assert set(json.loads(json.loads(file.read_text())["text"])) == {"answered", "answer"}
        fault = {"kind": "raise", "round": 1, "once": True, "seconds": 0}
        federation.fault_file("site-rot15").write_text(json.dumps(fault))
        done = federation.run(tmp_path / "broken", **SECURE)
        assert done.returncode == 0, done.stderr
    clients = pd.read_csv(run_folder(tmp_path / "broken", NAME) / "clients.csv").set_index(["round", "client"])
    assert "told to raise" in clients.loc[(1, "rot15"), "status"]
    weights = clients["weight"]
    assert weights[1, "rot0"] + weights[1, "rot30"] == pytest.approx(1)
    assert weights[2, "rot15"] > 0
