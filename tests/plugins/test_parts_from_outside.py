"""A part from outside is set by `[parts]`, required by other parts and recorded under each of its names."""

import json
from pathlib import Path

import pytest
from support import interrupt, run_small, small_experiment

from fedsim.analysis import compare
from fedsim.apps.client import app
from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe, find_recipe
from fedsim.methods.registry import packages_of
from fedsim.methods.variants import method_label
from fedsim.parts.part import named_part
from fedsim.records import read_runs
from fedsim.runs.notes import code_notes
from fedsim.runs.plan import resolve
from fedsim.runtime.local_grid import InlineGrid
from fedsim.settings.experiment import Experiment, read_experiment
from fedsim.settings.plugins import Package, outside_versions, package_of
from strategies.wire.handshake import Roster


@pytest.fixture(autouse=True)
def own(offer, tmp_path, monkeypatch):
    """The part has an entry point; the test's own folder holds modules, too."""
    offer({"parts": [("my_shrink", "outside:Shrink")]})
    monkeypatch.setenv("FEDSIM_PLUGINS", f"{Path(__file__).parent}:{tmp_path}")


@pytest.fixture
def read(tmp_path):
    (tmp_path / "mine.toml").write_text("[train]\nrounds = 1\n")
    return lambda *overrides: read_experiment(str(tmp_path / "mine.toml"), overrides)


@pytest.mark.parametrize("spelling", ["outside:Shrink", '"outside:Shrink"', "my_shrink", "shrink"])
def test_each_spelling_sets_the_part(read, spelling):
    """A method without the part goes on without its values; the module's package is one that every machine needs."""
    for method in (["outside:shrunk"], ["fedavg", 'method.add=["outside:Shrink"]']):
        experiment = read(f"method.name={method[0]}", *method[1:], f"parts.{spelling}.weight=0.7")
        assert build_recipe(experiment).terms[0].weight == 0.7
        assert "0.7" not in method_label(experiment)  # the value is the experiment's, not a change of the method
    if spelling != "shrink":
        experiment = read(f"parts.{spelling}.weight=0.7")
        assert build_recipe(experiment).terms == ()
        assert "outside" in [package.module for package in packages_of(experiment)]
    assert named_part(spelling.strip('"')) == "shrink"


@pytest.mark.parametrize(("overrides", "said"), [
    (["parts.shrink.weight=0.7"], r'write \[parts."module:Class"\] for shrink'),  # no shipped part has this name
    (["parts.my_shrink.weight=0.7", "parts.outside:Shrink.weight=0.1"], "are one part"),
    (["parts.outside:Shrink.weight=-1"], "weight"), (["parts.outside:Shrink.wait=1"], "has no field 'wait'"),
])  # fmt: skip
def test_what_is_wrong_is_one_line(read, overrides, said):
    with pytest.raises(UserError, match=said):
        build_recipe(read(*overrides))


REQUIRING = """from dataclasses import dataclass
from clients.parts import Term
from fedsim.methods.recipe import Recipe

@dataclass(frozen=True)
class Needs(Term):
    requires = {{"terms": "{name}"}}

    def begin(self, round):
        return None

row = Recipe(terms=(Needs(),), paper="a test")
"""


@pytest.mark.parametrize("name", ["outside:Shrink", "my_shrink"])
def test_a_part_that_another_one_requires_is_added_once(name, tmp_path):
    """Earlier such a name was compared with settings names, and the part was added without end."""
    module = f"requiring_{name[-4:].lower()}"
    (tmp_path / f"{module}.py").write_text(REQUIRING.format(name=name))
    for row in (f"{module}:row", f"{module}:row+outside:shrunk"):
        assert [type(part).__name__ for part in find_recipe(row).terms] == ["Needs", "Shrink"]
    assert method_label(Experiment(method={"name": f"{module}:row"})) == f"{module}:row"


MODULE = """from clients.terms.proximal import Proximal
from fedsim.methods.recipe import Recipe
row = Recipe(terms=(Proximal(0.1),), paper="a test")
"""
OWN = [Package("ownrow", "", "")]


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "ownrow.py").write_text(MODULE)
    return tmp_path / "ownrow.py"


def test_versions_of_packages_and_hashes_of_files(module, monkeypatch):
    first = outside_versions(OWN)["ownrow"]
    assert first.startswith("sha256:")
    module.write_bytes(MODULE.replace("\n", "\r\n").encode())  # as a checkout on another system has it
    assert outside_versions(OWN) == {"ownrow": first}
    module.write_text(MODULE.replace("0.1", "0.2"))
    assert outside_versions(OWN)["ownrow"] != first
    folder = module.parent / "ownrows"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    whole = outside_versions([Package("ownrows.row", "", "")])
    (folder / "helper.py").write_text("x = 1\n")
    assert outside_versions([Package("ownrows.row", "", "")]) != whole  # what the row imports counts too
    monkeypatch.setattr("fedsim.settings.plugins.installed_packages", lambda: {"ownrow": ["own-methods"]})
    assert outside_versions([package_of("ownrow:row")]) == {"own-methods": "1.5"}


def test_a_run_that_goes_on_with_other_code_says_so(module, tmp_path):
    data = {"domains": ["rot0", "rot15", "rot45"], "fraction": 0.05}
    experiment = small_experiment(tmp_path / "out", "ownrow:row", data=data, train={"rounds": 2})
    interrupt(experiment, 1)
    module.write_text(MODULE + "# changed\n")
    folder, _ = run_small(experiment)
    record = json.loads((folder / "environment.json").read_text())
    (first,) = record["earlier"]
    assert first["packages"]["ownrow"] != record["packages"]["ownrow"]
    assert f"ownrow {first['packages']['ownrow']}" in " ".join(compare(read_runs(tmp_path / "out")).notes)


def test_a_site_says_which_code_it_has(module, tmp_path):
    plan = resolve(small_experiment(tmp_path, "ownrow:row"))
    grid, name = InlineGrid(app, 1), plan.clients[0]
    (node,) = grid.get_node_ids()
    grid.contexts[node].node_config = {"domain": name, "site": "a", "data-dir": "", "state-dir": str(tmp_path)}
    config = {"experiment": plan.experiment.toml(), "state-dir": str(tmp_path), "token": "0" * 16, "timeout": 60.0}
    roster = Roster(grid, [name], len(plan.data.classes), config)
    assert roster.call(60.0) == []
    own, versions = outside_versions(OWN), {name: roster.sites[name].versions}
    assert versions[name]["ownrow"] == own["ownrow"]
    assert code_notes(own, versions) == []
    (said,) = code_notes({"ownrow": "sha256:0"}, versions)
    assert said.startswith(f"the site of {name} has ownrow {own['ownrow']}, the server sha256:0;")
