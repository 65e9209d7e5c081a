"""Code from outside is recorded with its version, or with a hash of its source, and a change of it is told."""

import json
import sys
from importlib import metadata

import pytest
from support import Interrupt, run_small, small_experiment

from fedsim.client_app import app
from fedsim.results import compare, read_runs
from fedsim.run.plan import resolve
from fedsim.run.remarks import code_remarks
from fedsim.runtime.inline import InlineGrid
from fedsim.settings.plugins import Package, outside_versions, package_of
from strategies.wire.handshake import Roster

MODULE = """from clients.terms.proximal import Proximal
from fedsim.methods.recipe import Recipe
row = Recipe(terms=(Proximal(0.1),), paper="a test")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The file of a user's own row."""
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("FEDSIM_PLUGINS", str(tmp_path / "here"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "here")])
    monkeypatch.delitem(sys.modules, "ownrow", raising=False)
    file = tmp_path / "here" / "ownrow.py"
    file.write_text(MODULE)
    return file


def test_versions_of_packages_and_hashes_of_files(module, monkeypatch):
    first = outside_versions([Package("ownrow", "", "")])["ownrow"]
    assert first.startswith("sha256:")
    module.write_bytes(MODULE.replace("\n", "\r\n").encode())  # as a checkout on another system has it
    assert outside_versions([Package("ownrow", "", "")]) == {"ownrow": first}
    module.write_text(MODULE.replace("0.1", "0.2"))
    assert outside_versions([Package("ownrow", "", "")])["ownrow"] != first
    folder = module.parent / "ownrows"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    whole = outside_versions([Package("ownrows.row", "", "")])
    (folder / "helper.py").write_text("x = 1\n")
    assert outside_versions([Package("ownrows.row", "", "")]) != whole  # what the row imports counts too
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"ownrow": ["own-methods"]})
    monkeypatch.setattr(metadata, "version", lambda name: "1.5")
    assert outside_versions([package_of("ownrow:row")]) == {"own-methods": "1.5"}


def test_a_run_that_goes_on_with_other_code_says_so(module, tmp_path):
    experiment = small_experiment(tmp_path, "ownrow:row")
    with pytest.raises(KeyboardInterrupt):
        run_small(experiment, Interrupt(1))
    module.write_text(MODULE + "# changed\n")
    folder, _ = run_small(experiment)
    record = json.loads((folder / "environment.json").read_text())
    (first,) = record["earlier"]
    assert first["packages"]["ownrow"] != record["packages"]["ownrow"]
    notes = " ".join(compare(read_runs(tmp_path)).notes)
    assert f"ownrow {first['packages']['ownrow']}" in notes


def test_a_site_says_which_code_it_has(module, tmp_path):
    plan = resolve(small_experiment(tmp_path, "ownrow:row"))
    grid = InlineGrid(app, 1)
    (node,) = grid.get_node_ids()
    name = plan.clients[0]
    grid.contexts[node].node_config = {"domain": name, "site": "a", "data-dir": "", "state-dir": str(tmp_path)}
    config = {"experiment": plan.experiment.toml(), "state-dir": str(tmp_path), "token": "t", "timeout": 60.0}
    roster = Roster(grid, [name], len(plan.data.classes), config)
    assert roster.call(60.0) == []
    own = outside_versions([Package("ownrow", "", "")])
    versions = {name: roster.sites[name].versions}
    assert versions[name]["ownrow"] == own["ownrow"]
    assert code_remarks(own, versions) == []
    (said,) = code_remarks({"ownrow": "sha256:0"}, versions)
    assert said.startswith(f"the site of {name} has ownrow {own['ownrow']}, the server sha256:0;")
