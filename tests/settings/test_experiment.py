"""Settings: precedence, overrides, presets, writing and reading, and errors that name the key and a similar one."""

import pytest

from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe, find_recipe
from fedsim.run.plan import complete
from fedsim.server_app import experiment_of
from fedsim.settings.experiment import (
    config_folders,
    find_config,
    parse_experiment,
    parse_override,
    read_experiment,
    with_options,
)

CONFIG = """
[data]
dataset = "digits"
[train]
rounds = 7
lr = 0.1
[method]
name = "fedprox"
[presets.short.train]
rounds = 2
[parts.proximal]
mu = 0.5
"""


@pytest.fixture
def config(tmp_path):
    """A file with a preset and a part's value."""
    file = tmp_path / "mine.toml"
    file.write_text(CONFIG)
    return str(file)


def test_precedence_file_preset_override(config):
    """The file is read first, then the preset, then --set."""
    assert read_experiment(config).train.rounds == 7
    assert read_experiment(config, preset="short").train.rounds == 2
    assert read_experiment(config, ["preset=short"]).train.rounds == 2
    changed = read_experiment(config, ["train.rounds=3"], preset="short")
    assert (changed.train.rounds, changed.train.lr, changed.name) == (3, 0.1, "mine")


def test_a_part_may_be_given_as_a_table(config):
    """It is no section, of which all other settings would be lost."""
    assert build_recipe(read_experiment(config, ["method.proximal={mu=0.25}"])).terms[0].mu == 0.25


def test_two_presets_are_refused(config):
    assert read_experiment(config, ["preset=short"], preset="short").train.rounds == 2
    with pytest.raises(UserError, match="--set preset=long: --preset gives another one, 'short'"):
        read_experiment(config, ["preset=long"], preset="short")


def test_an_option_and_an_override_with_another_value_are_refused():
    """Without a word, the option would win."""
    given = ["method.name=fedavg", "run.seed=3", "run.target=100"]
    assert with_options(given, ['method.name="fedavg"', "run.seed=3", 'run.target="100"'])[:3] == given
    with pytest.raises(UserError, match=r"^--set run\.seed=3: an option gives run\.seed another value, 4;"):
        with_options(given, ["run.seed=4"])


def test_toml_round_trip(config):
    """The resolved settings read back unchanged."""
    experiment = read_experiment(config, ["method.proximal.mu=0.25", 'data.domains=["rot0", "rot15"]'])
    assert parse_experiment(experiment.toml()) == experiment


def test_part_values(config):
    """[parts] gives a data set's values to recipes that have the part; method settings have priority over them."""
    assert build_recipe(read_experiment(config)).terms[0].mu == 0.5
    assert build_recipe(read_experiment(config, ["method.proximal.mu=0.25"])).terms[0].mu == 0.25
    assert build_recipe(read_experiment(config, ["method.name=fedavg"])).terms == ()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=3", 3),
        ("a.b=0.5", 0.5),
        ("a.b=true", True),
        ("a.b=x", "x"),
        ("a.b='x y'", "x y"),
        ("a.b=[1, 2]", [1, 2]),
        ("a.b=", ""),
    ],
)
def test_override_values(text, value):
    """A value is TOML; if it is not valid TOML, it is text."""
    assert parse_override(text) == ("a.b", value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.round=3"], "did you mean 'rounds'"),
        (["trian.rounds=3"], "did you mean 'train'"),
        (["train.rounds=0"], "train.rounds: a run trains; row 0"),
        (["train.lr=fast"], "train.lr"),
        (["data.split=strat"], "data.split"),
        (["rounds"], "not of the form"),
        (["name.x=1"], "is a value, not a section"),
        (["preset=long"], "no preset 'long'"),
        (["train={lr=0.1}"], "train is a section; set single keys, for example --set train.lr=0.1"),
        (['method={name="fedavg"}'], "method is a section; set single keys, for example --set method.name=fedavg"),
        (["parts={proximal={mu=0.1}}"], "parts is a section"),
        (['run={target="rot0"}'], "run is a section"),
        (["data=digits"], "data is a section"),
        (["model={}"], "model is a section"),
        (["run.output=n\udcff2"], r"override 'run.output=n\udcff2' is not text in UTF-8; write other characters"),
    ],
)
def test_typos_are_one_clear_line(config, overrides, said):
    """An unknown key is named together with the most similar correct one."""
    with pytest.raises(UserError) as error:
        read_experiment(config, overrides)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["method.name=gperxn"], "did you mean 'gperxan'"),
        (["method.guiding_head.weight=1"], "add it with method.add"),
        (["method.guide=1"], "has no part 'guide'"),
        (["method.proximal.nu=1"], "known: mu"),
        (["method.proximal.mu=strong"], "method.proximal.mu"),
        (["method.proximal=1"], "is a part"),
        (["method.weights=unifrom"], "did you mean 'uniform'"),
        (["parts.proxmal.mu=1"], "did you mean 'proximal'"),
        (["method.name=csac", "method.weights=generalization_adjustment"], "use one of the two"),
        (["method.name=gperxan", "method.norm=batch_norm"], "needs norm 'xan'"),
        (["method.name=gperxan+gfedavg-ibn"], "cannot be combined"),
        (["method.name=deepall+fedbn"], "pooled"),
        (["method.name=fedbn", "method.without_batch_norm.upload=false"], "no model for the unseen domain"),
    ],
)
def test_recipes_that_cannot_work_are_refused(config, overrides, said):
    """Combinations that make no sense are refused when the experiment is read."""
    with pytest.raises(UserError) as error:
        build_recipe(read_experiment(config, overrides))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_combinations_and_exchange(config):
    """a+b, exchanged and added parts, and parts that add other parts which they require."""
    both = find_recipe("gperxan+feddg-ga")
    assert type(both.norm).__name__ == "XAN"
    assert type(both.weights).__name__ == "GeneralizationAdjustment"
    assert [type(report).__name__ for report in both.reports] == ["GeneralizationGap"]
    exchanged = build_recipe(
        read_experiment(
            config,
            [
                "method.weights=generalization_adjustment",
                'method.add=["guiding_head"]',
                "method.guiding_head.weight=0.25",
            ],
        )
    )
    assert [type(report).__name__ for report in exchanged.reports] == ["GeneralizationGap"]
    assert [term.weight for term in exchanged.terms if hasattr(term, "weight")] == [0.25]


def test_all_shipped_configs_are_valid():
    """Every shipped file resolves, with every preset, and names a known method."""
    import tomllib

    files = sorted(config_folders()[0].glob("*.toml"))
    assert {"digits", "rotated-mnist", "pacs", "vlcs", "office-home", "terra-incognita"} <= {
        file.stem for file in files
    }
    for file in files:
        for preset in ["", *tomllib.loads(file.read_text()).get("presets", {})]:
            experiment = complete(read_experiment(str(file), preset=preset))
            build_recipe(experiment)


def test_flower_run_config():
    """`flwr run` passes names and one string of overrides; other runtimes pass the resolved text."""
    named = experiment_of(
        {
            "experiment": "digits",
            "method": "fedbn",
            "target": "rot0",
            "seed": 3,
            "output": "",
            "overrides": "train.rounds=5 data.holdout=0.2",
        }
    )
    assert (named.method_name, named.run.target, named.run.seed, named.train.rounds) == ("fedbn", "rot0", 3, 5)
    assert experiment_of({"experiment": named.toml()}) == named


def test_settings_hash_ignores_method_target_and_seed():
    """Runs that may be in one table have the same hash."""
    base = read_experiment("digits")
    same = read_experiment("digits", ["method.name=fedbn", "run.target=rot0", "run.seed=4", "run.output=x"])
    assert base.settings_hash() == same.settings_hash()
    assert base.settings_hash() != read_experiment("digits", ["train.lr=0.2"]).settings_hash()


@pytest.mark.parametrize("config", ["/no/such/digits.toml", "mine/pacs.toml", "./digits", "configs/tables/pacs"])
def test_a_missing_file_of_ones_own_is_not_replaced_by_a_shipped_one(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("pacs", "pacs.toml", "configs/pacs.toml", "configs/pacs"):
        assert find_config(name) == config_folders()[0] / "pacs.toml"
    with pytest.raises(UserError, match="no experiment file"):
        find_config(config)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("run.keep_predictions=True", "write true or false"),
        ("data.domains=(1,2)", r'write a list such as \["a", "b"\]'),
    ],
)
def test_a_value_of_the_wrong_kind_says_how_it_is_written(override, hint):
    """People who know Python write True and tuples."""
    with pytest.raises(UserError, match=hint):
        read_experiment("digits", [override])
