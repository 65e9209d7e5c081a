"""Rows of numbers on separate machines: every site has a file of its own, the server none."""

import pandas as pd
import pytest
from sites import run_on_sites
from support import numbers, run_small, small_experiment

from fedsim.apps.client import app
from fedsim.common.errors import UserError
from fedsim.data.array_rows import EMBEDDED
from fedsim.deploy.check_app import site_data
from fedsim.records.doubt import read_doubt
from fedsim.runs.plan import resolve
from fedsim.runs.serve import serve
from fedsim.runtime.forked import ForkedGrid
from fedsim.settings.experiment import from_table, read_experiment

HOSPITALS = ["cleveland", "hungary", "switzerland", "va_long_beach"]
USED = ["hospital", "disease", "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak"]
MLP = ("model.backbone=mlp", 'model.options={widths=[8], norm="batch", dropout=0.1}')


def hospitals(output, *overrides):
    """All 920 patients, two rounds."""
    usual = ["run.target=hungary", f"run.output={output}", "train.rounds=2"]
    return read_experiment("hospitals", [*usual, *MLP, *overrides], "all")


def test_processes_and_sites_give_the_numbers_of_one_process(tmp_path):
    rows = pd.read_csv(EMBEDDED["hospitals"].file, dtype=str, keep_default_na=False)[USED]
    folders = {}
    for domain, part in rows.groupby("hospital"):
        folders[domain] = tmp_path / f"at-{domain}"
        folders[domain].mkdir()
        part.to_csv(folders[domain] / "patients.csv", index=False)
    rows.to_csv(tmp_path / "all.csv", index=False)
    own = [
        "data.dataset=arrays",
        f"data.root={tmp_path / 'all.csv'}",
        "data.columns.label=disease",
        "data.columns.domain=hospital",
        'data.classes=["no","yes"]',
        f"data.domains={HOSPITALS}",
    ]
    one, _ = run_small(hospitals(tmp_path / "one", *own))
    embedded, _ = run_small(hospitals(tmp_path / "embedded"))
    columns = [name for name in numbers(one / "rounds.csv") if not name.startswith("bytes")]
    expected = numbers(one / "rounds.csv")[columns]
    pd.testing.assert_frame_equal(numbers(embedded / "rounds.csv")[columns], expected)

    forked = resolve(hospitals(tmp_path / "forked", *own, "run.processes=2"))
    grid = ForkedGrid(app, forked, len(forked.clients))
    try:
        serve(grid, forked)
    finally:
        grid.close()
    pd.testing.assert_frame_equal(numbers(forked.folder / "rounds.csv")[columns], expected)

    deployed = hospitals(tmp_path / "sites", *own, "run.evaluate_target=site", "run.runtime=deployment")
    deployed = deployed.replace(data={"root": str(tmp_path / "nowhere")})
    folder, grid = run_on_sites(deployed, tmp_path / "state", data=folders)
    pd.testing.assert_frame_equal(numbers(folder / "rounds.csv")[columns], expected)
    messages = [message for message, _ in grid.seen if message.metadata.message_type == "train"]
    assert len(messages[0].content.config_records["config"]["scale-mean"]) == 7


def test_a_site_says_what_its_own_table_holds_before_a_run(tmp_path):
    """`deploy check` asks it; its file has its own rows alone, and the experiment names domains and classes."""
    (tmp_path / "north.csv").write_text("x,label\n1,u\n2,u\n3,v\n")
    data = {"dataset": "arrays", "root": "/nowhere", "domains": ["north", "south"], "classes": ["u", "v"], "shape": [1]}
    experiment = from_table({"data": data})
    assert site_data(experiment.toml(), "north", str(tmp_path)) == (("u", "v"), (2, 1), [])
    with pytest.raises(UserError, match="no example of domain 'south' is here; did you mean 'north'"):
        site_data(experiment.toml(), "south", str(tmp_path))


def test_sites_fit_the_doubt_of_one_process(tmp_path):
    """The temperature and the threshold are those of a simulation; the unseen site keeps its predictions to itself."""
    asked = {"run": {"doubt": 0.2}, "train": {"rounds": 2}}
    one, _ = run_small(small_experiment(tmp_path / "one", **asked))
    run = {**asked["run"], "evaluate_target": "site", "runtime": "deployment"}
    deployed, _ = run_on_sites(small_experiment(tmp_path / "sites", **{**asked, "run": run}), tmp_path / "state")
    assert read_doubt(deployed) == read_doubt(one)
    columns = ["target_coverage", "target_set_size"]
    assert set(columns) <= set(pd.read_csv(one / "summary.csv").columns)
    assert not set(columns) & set(pd.read_csv(deployed / "summary.csv").columns)
