"""Findings in the data of sites: each site tells its own, and a grave one refuses the run as in a simulation."""

import json

import numpy as np
import pytest
from flwr.app import ConfigRecord
from image_trees import write_tree
from PIL import Image
from sites import run_on_sites
from support import small_experiment

from fedsim.common.errors import ClientFailedError, UserError
from fedsim.data.findings import Finding, read_findings, sent_findings
from fedsim.runs.plan import run_folder
from fedsim.runs.workspace import close_workspaces

FACTS = {"domains": ["a", "b", "c"], "classes": ["cat", "dog"]}
GRAVE = Finding("alpha", "b", 8, "b: 8 of 8 images have a fourth channel", "convert them", is_grave=True)


@pytest.fixture
def run(tmp_path):
    """run(data) on three sites, each with a folder of its own domain alone; b has pictures whose alpha holds data."""
    close_workspaces()
    folders = {}
    for number, name in enumerate(FACTS["domains"]):
        folders[name] = write_tree(tmp_path / f"site-{name}", [name], FACTS["classes"], 4, seed=100 * number)
    for number, file in enumerate(sorted(folders["b"].rglob("*.png"))):
        pixels = np.random.default_rng(number).integers(40, 200, (16, 16, 4), dtype=np.uint8)
        Image.fromarray(pixels, "RGBA").save(file)
    for name in ("scan.npy", "other.npy"):
        (folders["a"] / "a" / "cat" / name).write_bytes(b"no image")

    def of(tamper=None, **data):
        settings = {"dataset": "folder", "image_size": 16, "fraction": 1.0, **FACTS, **data}
        training = {"rounds": 1, "batch_size": 4, "iterations": 1}
        run = {"target": "c", "evaluate_target": "site", "runtime": "deployment"}
        experiment = small_experiment(tmp_path / "out", data=settings, train=training, run=run)
        return experiment, lambda: run_on_sites(experiment, tmp_path / "state", data=folders, tamper=tamper)[0]

    yield of
    close_workspaces()


def test_a_grave_finding_of_a_site_refuses_the_run(run):
    """Nothing is left behind, and the line has the setting that accepts the data."""
    experiment, start = run()
    with pytest.raises(UserError, match=r"^b: .*fourth channel.*data\.accept = \['alpha'\] takes the data as they are"):
        start()
    assert not run_folder(experiment).exists()


def test_accepted_ones_and_others_are_told_and_recorded(run, caplog):
    """No path of a site's machine is in them."""
    _, start = run(accept=["alpha"])
    folder = start()
    record = json.loads((folder / "environment.json").read_text())
    kinds = {finding["kind"]: finding for finding in record["findings"]}
    assert {"alpha", "other-files"} <= set(kinds), kinds
    assert kinds["alpha"]["where"] == "b"
    for finding in record["findings"]:
        assert finding["text"] in " ".join(record["data_remarks"])
        assert finding["text"] in caplog.text
    assert "/site-" not in json.dumps(record["findings"])


def test_what_no_site_of_ours_sends_is_refused(run):
    def tamper(message, reply):
        for name, record in reply.content.config_records.items():
            if name == "site":
                reply.content[name] = ConfigRecord({**record, "findings": ["[" * 3000]})
        return reply

    with pytest.raises(ClientFailedError, match="a finding has another form than those of fedsim"):
        run(tamper)[1]()


def test_the_form_of_a_finding():
    """Signs that a terminal obeys are left out, and a path of the site's data too."""
    other = Finding("groups", "/data/of us", 3, "/data/of us: 3 groups\x1b[2J")
    texts = sent_findings([other, GRAVE], "/data/of us")
    assert [finding.kind for finding in read_findings("b", texts)] == ["alpha", "groups"]
    assert read_findings("b", texts)[1].text == "b: its data folder: 3 groups[2J"
    assert read_findings("b", texts)[0] == GRAVE
    for wrong in ("alpha", ["x"] * 21, [3], ["x" * 5000], [json.dumps({**GRAVE.record(), "kind": "mine"})], ["{}"]):
        with pytest.raises(ValueError, match="finding"):
            read_findings("b", wrong)
