"""A folder or file of somebody else has no module outside fedsim imported without `--trust`."""

import contextlib
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from PIL import Image
from support import run_small, tiny_experiment
from untrained_run import untrained_run

import fedsim
from fedsim.commands.cli import app, main
from fedsim.commands.results import method_notes
from fedsim.common.errors import UserError
from fedsim.methods.registry import outside
from fedsim.records.reading import read_settings
from fedsim.runs.plan import resolve, run_folder
from fedsim.settings.experiment import from_table

PLANTED = """from dataclasses import dataclass
from pathlib import Path

Path(__file__).with_name("imported").touch()

from torch import Tensor
from clients.parts import Term
from clients.terms.proximal import Proximal
from fedsim.data import BENCHMARKS
from fedsim.methods.recipe import Recipe
from fedsim.models.backbones import BACKBONES
from fedsim.records.callbacks import RunCallback


@dataclass(frozen=True)
class Own(Term):
    weight: float = 0.1

    def begin(self, round):
        return None


row = Recipe(terms=(Proximal(0.1),), paper="a test")
data = BENCHMARKS["digits"]
net = BACKBONES["digits-cnn-bn"]


def changed(images: Tensor) -> Tensor:
    return images


class Told(RunCallback):
    pass
"""
# Every place of an experiment file that names a module which a command on a run's folder would import.
DOORS = {
    "method.name": {"method": {"name": "planted:row"}},
    "a+b": {"method": {"name": "mixstyle+planted:row"}},
    "a slot": {"method": {"name": "fedavg", "terms": ["planted:Own"]}},
    "method.add": {"method": {"name": "fedavg", "add": ["planted:Own"]}},
    "parts": {"parts": {"planted:Own": {"weight": 0.2}}},
    "data.dataset": {"data": {"dataset": "planted:data"}},
    "data.augment": {"data": {"augment": "planted:changed"}},
    "model.backbone": {"model": {"backbone": "planted:net"}},
}
COMMANDS = {
    "predict": ["predict", "RUN", "one.png"],
    "evaluate": ["evaluate", "RUN"],
    "export": ["export", "RUN", "--format", "torch"],
    "features": ["features", "RUN", "--per-domain", "5"],
    "deploy check": ["deploy", "check", "RUN/experiment.toml", "--target", "rot75"],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which fedsim is started, with a module that leaves a file when it is imported."""
    (tmp_path / "planted.py").write_text(PLANTED)
    Image.new("L", (28, 28)).save(tmp_path / "one.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "planted", raising=False)
    yield tmp_path
    sys.modules.pop("planted", None)


def name_modules(run: Path, changes: dict) -> None:
    """Change the settings in a run's folder, as somebody who hands it over may have done."""
    file = run / "experiment.toml"
    table = tomllib.loads(file.read_text())
    for section, values in changes.items():
        table[section] |= values
    file.write_text(tomli_w.dumps(table))


@pytest.fixture
def run(folder):
    return untrained_run(folder / "seed0", data={"domains": ["rot0", "rot15", "rot75"], "fraction": 0.05})


def called(words: list[str], run: Path, *more: str) -> None:
    app([*(word.replace("RUN", str(run)) for word in words), *more], standalone_mode=False)


@pytest.fixture
def sites(monkeypatch):
    """No federation is needed to see which experiment would be checked."""
    monkeypatch.setattr("fedsim.deploy.federation.read_federation", lambda file: None)
    monkeypatch.setattr("fedsim.deploy.check.check", lambda federation, experiment, *_: ([], [resolve(experiment)]))
    monkeypatch.setattr("fedsim.deploy.check.table", lambda *shown: "")
    monkeypatch.setattr("fedsim.deploy.check.warnings", lambda federation: [])


@pytest.mark.usefixtures("sites")
@pytest.mark.parametrize("door", DOORS)
def test_no_command_imports_what_a_folder_names_without_trust(door, run):
    name_modules(run, DOORS[door])
    (name,) = outside(read_settings(run))
    for words in COMMANDS.values():
        with pytest.raises(UserError, match=rf"names modules outside fedsim: {name}; their code .* --trust") as error:
            called(words, run)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="trust=True"):
        fedsim.load(run)
    assert not Path("imported").exists()
    model = fedsim.load(run, trust=True)
    assert Path("imported").exists()
    assert model(model.prepare(["one.png"])).shape == (1, 10)


@pytest.mark.usefixtures("sites")
@pytest.mark.parametrize("command", COMMANDS)
def test_with_trust_every_command_works(command, run, capsys):
    name_modules(run, DOORS["method.name"])
    with contextlib.suppress(SystemExit):
        called(COMMANDS[command], run, "--trust")
    assert Path("imported").exists()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["os:abort", "tempfile:mkdtemp", "subprocess:Popen"])
@pytest.mark.parametrize("section", ["model.backbone", "data.dataset", "data.augment", "method.name"])
def test_the_exit_code_is_2_with_trust_and_without(name, section, run, monkeypatch, capsys):
    part, _, key = section.partition(".")
    name_modules(run, {part: {key: name}})
    for more in ([], ["--trust"]):
        monkeypatch.setattr(sys, "argv", ["fedsim", "predict", str(run), "one.png", *more])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr().err
        assert (end.value.code, said.count("\n")) == (2, 1)
        assert name in said
        assert ("--trust" in said) == (not more)


def test_a_table_of_a_part_is_no_door(run):
    """A table of `[method]` called like a part of a module would be looked for to say how to add it."""
    name_modules(run, {"method": {"name": "fedavg", "planted:Own": {"weight": 0.2}}})
    with pytest.raises(UserError, match=r"names modules outside fedsim: planted:Own;"):
        fedsim.load(run)
    assert not Path("imported").exists()


def test_callbacks_are_not_loaded_from_a_folder(run):
    name_modules(run, {"run": {"callbacks": ["planted:Told"]}})
    called(COMMANDS["predict"], run)
    assert not Path("imported").exists()


def test_families_and_fedsims_own_modules_need_no_trust():
    named = {"method": {"name": "fedavg", "terms": ["clients.terms.proximal:Proximal", "clientside:Own"]}}
    assert outside(from_table({**named, "model": {"backbone": "timm:resnet18"}})) == ["clientside:Own"]
    assert outside(from_table({"method": {"name": "fedavg", "terms": ["timm:Own"]}})) == ["timm:Own"]


TABLE = """title = "a table"
deviation = "none"
seeds = [0]

[[blocks]]
config = "digits"
name = "small"
settings = ["data.domains=['rot0', 'rot30', 'rot45']"]
rows = [{ printed = "A", method = "fedavg" }, { printed = "B", method = "planted:row" }]
"""


@pytest.fixture
def finished(folder):
    """A finished run, whose folder then says that it is of a method from outside, with parts and data from there."""
    run, _ = run_small(tiny_experiment(folder / "outputs", rounds=1))
    for door in ("method.name", "parts", "data.augment", "model.backbone"):
        name_modules(run, DOORS[door])
    name_modules(run, {"run": {"callbacks": ["planted:Told"]}})
    return run


@pytest.mark.parametrize("words", [
    ["compare"], ["compare", "--baseline", "planted:row", "--format", "csv"], ["plot"], ["report"],
    ["compare", "--by", "model.backbone"],
])  # fmt: skip
def test_a_folder_that_is_handed_over_is_compared_without_its_modules(words, finished):
    command, *options = words
    called([command, str(finished.parents[2]), *options], finished)
    assert not Path("imported").exists()


def test_texts_of_a_folder_are_no_program_in_a_report(finished):
    """The experiment's name, a label of a run and a domain have the form of one."""
    small, planted = finished.parents[2], "<img src=x onerror=act()>"
    (finished / "experiment.toml").write_text(
        (finished / "experiment.toml").read_text().replace('name = "small"', f'name = "{planted}"')
    )
    summary = (finished / "summary.csv").read_text().replace("fedavg", planted)
    (finished / "summary.csv").write_text(summary)
    called(["report", str(small)], finished)
    page = (small / "report.html").read_text()
    assert planted not in page
    assert "&lt;img src=x onerror=act()" in page


def test_a_report_tells_what_methods_from_outside_are_with_trust_alone(finished):
    small = finished.parents[2]
    called(["report", str(small), "--trust"], finished)
    assert Path("imported").exists()
    assert "a test" in (small / "report.html").read_text()


def test_data_and_network_from_outside_take_nothing_from_what_a_report_says_of_a_method(finished):
    table = {"method": {"name": "scaffold"}, **DOORS["data.dataset"], **DOORS["model.backbone"]}
    assert method_notes([from_table(table)])["scaffold"]["group"]
    assert not Path("imported").exists()


def test_the_table_of_a_paper_in_a_folder_names_modules_too(finished):
    small = finished.parents[2]
    (small / "table.toml").write_text(TABLE)
    with pytest.raises(UserError, match=r"table\.toml names modules outside fedsim: planted:row;"):
        called(["compare", str(small)], finished)
    for words in (["plot"], ["report"], ["compare", "--baseline", "planted:row"]):
        called([words[0], str(small), *words[1:]], finished)
    assert not Path("imported").exists()
    called(["compare", str(small), "--trust"], finished)
    assert Path("imported").exists()


def test_a_run_beside_a_record_of_somebody_else_imports_nothing_of_it(finished):
    """`fedsim run` compares its settings with those in the folder; only what it names itself is imported."""
    asked = tiny_experiment(Path("outputs").absolute(), rounds=1)
    assert run_folder(asked) == finished
    with pytest.raises(UserError, match="holds a run with other settings"):
        run_small(asked)
    assert not Path("imported").exists()


def test_a_working_folder_is_not_searched_for_modules_of_fedsim(run):
    """A file `timm.py` next to a run would else be taken for the package, where this is not installed."""
    before = list(sys.path)
    fedsim.load(run)
    assert sys.path == before
    shutil.copy("planted.py", "other.py")
    name_modules(run, {"model": {"backbone": "other:net"}})
    fedsim.load(run, trust=True)
    assert str(Path.cwd()) in sys.path
    sys.modules.pop("other")
