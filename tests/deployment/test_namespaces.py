"""A federation on machines of their own (network namespaces) has the numbers of one process."""

import subprocess

import pandas as pd
import pytest
from harness import SOURCES, TARGET, run_folder, run_inline
from machines import AVAILABLE, PORT, SERVER, Machines
from support import numbers

METHODS = {"fedavg": {}, "gperxan": {}, "ccst": {"method.cross_client_style.encoder": "pixel"}}
pytestmark = [pytest.mark.namespaces, pytest.mark.skipif(not AVAILABLE, reason="needs root and ip (iproute2)")]


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    with Machines(tmp_path_factory.mktemp("machines")) as federation:
        yield federation


@pytest.mark.parametrize("method", METHODS)
def test_separate_machines_give_the_numbers_of_inline(method, machines, tmp_path):
    """Three rounds over TLS with keys; only the target site has the target's images."""
    settings = {"train.rounds": 3, **METHODS[method]}
    inline = run_inline(tmp_path / "inline", method, **settings)
    done = machines.run(tmp_path / "out", method, **settings)
    assert done.returncode == 0, done.stderr
    columns = ["round", "mean_validation_accuracy", "target_accuracy"]
    deployed = run_folder(tmp_path / "out", method)
    ours, theirs = (numbers(folder / "rounds.csv")[columns] for folder in (deployed, inline))
    pd.testing.assert_frame_equal(ours, theirs, rtol=0, atol=1e-4)
    assert set(pd.read_csv(deployed / "clients.csv")["client"]) == {*SOURCES, TARGET}


def test_sites_reach_the_server_and_nobody_else(machines):
    others = machines.federation.site("site-rot15").port
    for address, port, code in ((SERVER, PORT, 0), ("10.77.0.3", others, 1)):
        words = [*machines.inside("site-rot0"), "bash", "-c", f"exec 3<>/dev/tcp/{address}/{port}"]
        assert subprocess.run(words, capture_output=True).returncode == code
