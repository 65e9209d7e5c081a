"""Settings: precedence, overrides, presets, writing and reading, and errors that name the key and a similar one."""

import tomllib
from pathlib import Path

import pytest

from fedsim.apps.server import experiment_of
from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe
from fedsim.runs.plan import complete
from fedsim.settings.experiment import config_folders, find_config, from_table, read_experiment

CONFIG = """
data.dataset = "digits"
train = { rounds = 7, lr = 0.1 }
method.name = "fedprox"
presets.short.train.rounds = 2
parts.proximal.mu = 0.5
"""


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(CONFIG)
    return str(file)


def one_line(said, function, *words):
    with pytest.raises(UserError) as error:
        function(*words)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_file_is_read_first_then_the_preset_then_the_overrides(config):
    short = read_experiment(config, preset="short")
    assert (read_experiment(config).train.rounds, short.train.rounds) == (7, 2)
    assert read_experiment(config, ["preset=short"]) == read_experiment(config, ["preset=short"], "short") == short
    changed = read_experiment(config, ["train.rounds=3"], preset="short")
    assert (changed.train.rounds, changed.train.lr, changed.name) == (3, 0.1, "mine")
    said = "--set preset=long: --preset gives another one, 'short'"
    one_line(said, read_experiment, config, ["preset=long"], "short")


def test_part_values(config):
    """[parts] gives a data set's values to recipes that have the part; method settings have priority over them.

    A part may be given as a table: it is no section, of which all other settings would be lost.
    """
    for words, mu in (([], 0.5), (["method.proximal.mu=0.25"], 0.25), (["method.proximal={mu=0.25}"], 0.25)):
        assert build_recipe(read_experiment(config, words)).terms[0].mu == mu
    assert build_recipe(read_experiment(config, ["method.name=fedavg"])).terms == ()


@pytest.mark.parametrize(("override", "said"), [
    ("trian.rounds=3", "did you mean 'train'"),
    ("train.rounds=0", "train.rounds: at least 1, because a run trains; row 0"),
    ("rounds=1", "unknown setting 'rounds'; did you mean 'train.rounds'?"),
    ("proximal.mu=1", "unknown setting 'proximal'; if it is a part, write method.proximal.mu; known here: name, data,"),
    ("krum.malicious=1", "did you mean 'run'? if it is a part, write method.krum.malicious; known here: name, data,"),
    ("data.split=strat", "data.split"),
    ("preset=long", "no preset 'long'"),
    ("train={lr=0.1}", "train is a section; set single keys, for example --set train.lr=0.1"),
    ("run.output=n\udcff2", r"override 'run.output=n\udcff2' is not text in UTF-8; write other characters"),
    ("data.clients_per_domain=99999999999999999999999", "less than or equal to 100000"),
    # People who know Python write True and tuples.
    ("run.keep_predictions=True", "write true or false"),
    ("train.lr=nan", "override 'train.lr=nan': train.lr: Input should be"),
    ('data.root="a\\u0000b"', "data.root: it contains a NUL character; remove it"),
    ("data.domains=(1,2)", 'write a list such as ["a", "b"]'),
])  # fmt: skip
def test_a_wrong_override_is_one_clear_line(config, override, said):
    one_line(said, read_experiment, config, [override])


@pytest.mark.parametrize(("text", "said"), [
    ("train.rounds = true", "train.rounds"),
    ('method.name = ""', "method.name is missing"),
    ('method = "csac"', "name = 'csac'"),
    ("presets = 3", "presets"),
    ("parts.proximal = 3", "parts.proximal"),
])  # fmt: skip
def test_settings_of_a_wrong_type_are_one_short_line(tmp_path, text, said):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    assert len(one_line(said, read_experiment, str(file)).removeprefix(str(file))) < 200


def test_all_shipped_configs_are_valid(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))
    for number in range(345):  # names of DomainNet's classes are read from its folders
        (tmp_path / "domainnet" / "real" / f"class_{number:03d}").mkdir(parents=True)
    files = sorted(config_folders()[0].glob("*.toml"))
    assert {"digits", "pacs", "terra-incognita"} <= {file.stem for file in files}
    for file in files:
        for preset in ["", *tomllib.loads(file.read_text()).get("presets", {})]:
            build_recipe(complete(read_experiment(str(file), preset=preset)))


def test_flower_run_config():
    """`flwr run` passes names and one string of overrides; other runtimes pass the resolved text."""
    words = {"experiment": "digits", "method": "fedbn", "target": "rot0", "seed": 3, "output": ""}
    named = experiment_of(words | {"overrides": "train.rounds=5 data.holdout=0.2"})
    assert (named.method_name, named.run.target, named.run.seed, named.train.rounds) == ("fedbn", "rot0", 3, 5)
    assert experiment_of({"experiment": named.toml()}) == named
    other = experiment_of({**words, "experiment": CONFIG, "overrides": "train.lr=0.2"})
    assert (other.method_name, other.run.target, other.run.seed, other.train.lr) == ("fedbn", "rot0", 3, 0.2)
    assert other.train.rounds == 7  # of the text


@pytest.mark.parametrize("config", ["/no/such/digits.toml", "mine/pacs.toml", "./digits", "configs/tables/pacs"])
def test_a_missing_file_of_ones_own_is_not_replaced_by_a_shipped_one(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("pacs", "pacs.toml", "configs/pacs.toml", "configs/pacs"):
        assert find_config(name) == config_folders()[0] / "pacs.toml"
    one_line("no experiment file", find_config, config)


def test_a_file_with_a_slip_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("[data]\ndataset = folder\n")
    for slip in ("mine", "mine.tml"):
        one_line("no experiment file '" + slip + "'; did you mean 'mine.toml'?", find_config, slip)
    one_line('in quotes: dataset = "folder"', read_experiment, "mine.toml")


def test_a_slot_of_a_former_version_has_its_name_of_today():
    experiment = from_table({"method": {"name": "fedavg", "client": "episodic_step"}})
    assert experiment.method == {"name": "fedavg", "step": "episodic_step"}
    with pytest.raises(UserError, match="the slot `step` is given twice, because `client` is its former name"):
        from_table({"method": {"name": "fedavg", "client": "episodic_step", "step": "supervised_step"}})


@pytest.mark.parametrize("text", ["", "# dataset = 'folder'\n"])
def test_a_file_without_a_setting_is_no_experiment_on_digits(tmp_path, text):
    """`fedsim datasets TABLE > mine.toml` leaves an empty file where the table is refused."""
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        read_experiment(str(file), ["train.rounds=1"])
    assert str(refused.value) == f"{file}: no setting is in it, and without one the run would be on the data set digits"
