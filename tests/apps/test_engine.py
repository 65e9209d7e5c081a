"""The example apps in Flower's own engine, as `flwr run .` starts them."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
import tomli_w
from apps import EXAMPLES

from fedsim.flower.processes import SuperLink

ROOT = Path(__file__).parents[2]


@pytest.mark.flower
@pytest.mark.parametrize("example", ["any-client", "our-client"])
def test_an_example_runs_as_it_is(example, tmp_path):
    app = tmp_path / "app"
    shutil.copytree(EXAMPLES / example, app, ignore=shutil.ignore_patterns("__pycache__"))
    settings = tmp_path / "settings.toml"
    settings.write_text(tomli_w.dumps({"output": str(tmp_path / "out")}))
    with SuperLink(tmp_path, {"PYTHONPATH": str(ROOT)}) as link:
        run = link.submit(app, settings, "num-supernodes=3 client-resources-num-cpus=1")
        lines = list(link.log(run))
        status, details = link.verdict(run)
    assert status == "finished:completed", (details, lines[-30:])
    (folder,) = (tmp_path / "out").rglob("clients.csv")
    clients = pd.read_csv(folder)
    assert sorted(set(clients["client"])) == ["scanner-a", "scanner-b", "scanner-c"]
    assert set(clients["status"]) == {"ok"}
    assert pd.read_csv(folder.with_name("rounds.csv"))["target_accuracy"].notna().all()
