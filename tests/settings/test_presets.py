"""The shipped presets have the hyper-parameters of their sources (docs/presets.md lists them with their pages)."""

import pytest

from fedsim.common.errors import PresetConflictError
from fedsim.methods.assembly import build_recipe
from fedsim.run.plan import complete, resolve
from fedsim.settings.experiment import read_experiment
from fedsim.sweep import Axes
from fedsim.sweep.plan import plan_cells

FEDIG = {
    "train": {"rounds": 40, "iterations": 200, "batch_size": 64, "lr": 0.01, "momentum": 0.5, "local_checks": 10},
    "data": {"holdout": 0.2, "test_split": "in", "augment": "domainbed"},
    "model": {"backbone": "resnet18", "bottleneck": 256},
}
CSAC = {
    "train": {"rounds": 40, "epochs": 10, "iterations": 0, "batch_size": 64, "lr": 0.01, "momentum": 0.5},
    "data": {"holdout": 0.1, "split": "stratified", "augment": "csac"},
    "model": {"backbone": "resnet18", "bottleneck": 256},
}
GPERXAN = {
    "train": {
        "rounds": 100,
        "epochs": 1,
        "batch_size": 32,
        "lr": 0.002,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "persist_optimizer": True,
    },
    "data": {"holdout": 0.1, "augment": "flip-jitter"},
    "model": {"backbone": "resnet50"},
}
GA = {
    "train": {"rounds": 40, "epochs": 5, "batch_size": 16, "lr": 0.001, "schedule": "step", "persist_optimizer": True},
    "data": {"holdout": 0.1, "augment": "feddg-ga"},
}
FEDSB = {
    "train": {"rounds": 100, "optimizer": "adam", "lr": 1e-4, "batch_size": 64},
    "data": {"holdout": 0.1, "augment": "fedsb"},
}
FISC = {
    "train": {"rounds": 50, "epochs": 1, "batch_size": 32, "optimizer": "adam", "lr": 3e-5, "clients_per_round": 20},
    "data": {"clients_per_domain": 33, "mix": 0.1, "image_size": 224},
    "model": {"backbone": "resnet50"},
}
CCST = {
    "train": {"rounds": 500, "epochs": 1, "lr": 0.001, "momentum": 0.0, "weight_decay": 0.0},
    "data": {"image_size": 222, "augment": "ccst"},
}
STABLE = {
    "train": {"rounds": 50, "epochs": 5, "clients_per_round": 10, "batch_size": 32, "lr": 0.001, "momentum": 0.9,
              "weight_decay": 5e-4, "schedule": "cosine"},
    "data": {"clients_per_domain": 10},
    "model": {"backbone": "resnet18"},
}  # fmt: skip
SOURCES = {
    ("pacs", "fedig"): FEDIG,
    ("vlcs", "fedig"): FEDIG,
    ("office-home", "fedig"): FEDIG,
    ("pacs", "fedig-30"): {
        "train": {"rounds": 120, "iterations": 20, "clients_per_round": 10},
        "data": {"clients_per_domain": 10, "test_split": "in"},
    },
    ("pacs", "csac"): CSAC,
    ("vlcs", "csac"): CSAC,
    ("pacs", "csac-code"): {**CSAC, "train": {"rounds": 40, "iterations": 200}},
    ("vlcs", "csac-alexnet"): {
        **CSAC,
        "train": {"epochs": 10, "lr": 0.001},
        "model": {"backbone": "alexnet", "bottleneck": 0},
    },
    ("pacs", "gperxan"): GPERXAN,
    ("office-home", "gperxan"): GPERXAN,
    ("camelyon17", "gperxan"): {
        **GPERXAN,
        "model": {"backbone": "densenet121"},
        "data": {"holdout": 0.2, "image_size": 96, "augment": "flip-jitter"},
    },
    ("pacs", "feddg-ga"): GA,
    ("office-home", "feddg-ga"): GA,
    ("terra-incognita", "feddg-ga"): {"train": {"batch_size": 64}, "data": {"holdout": 0.2}},
    ("pacs", "fedsb"): {**FEDSB, "model": {"backbone": "resnet18"}},
    ("vlcs", "fedsb"): {**FEDSB, "model": {"backbone": "resnet18"}},
    ("office-home", "fedsb"): {**FEDSB, "model": {"backbone": "resnet50"}},
    ("terra-incognita", "fedsb"): {**FEDSB, "model": {"backbone": "resnet50"}},
    ("pacs", "fisc"): FISC,
    ("office-home", "fisc"): FISC,
    ("pacs", "ccst"): {**CCST, "model": {"backbone": "resnet50"}},
    ("office-home", "ccst"): {**CCST, "model": {"backbone": "resnet18"}},
    ("pacs", "stablefdg"): STABLE,
    ("vlcs", "stablefdg"): STABLE,
    ("office-home", "stablefdg"): {**STABLE, "parts": {"enlarged_batch": {"balanced": "step"}}},
}


@pytest.mark.parametrize(("config", "preset"), SOURCES)
def test_preset_has_the_values_of_its_source(config, preset):
    table = read_experiment(config, preset=preset).model_dump()
    for section, values in SOURCES[config, preset].items():
        assert {key: table[section][key] for key in values} == values
    assert table["train"]["budget"] == "paper"


@pytest.mark.parametrize("config", ["pacs", "vlcs", "office-home", "terra-incognita"])
def test_base_settings_give_every_method_the_same_budget(config):
    assert read_experiment(config).train.budget == "images"


@pytest.mark.parametrize(("config", "stages"), [("pacs", (1, 2, 3)), ("office-home", (1, 2)), ("vlcs", (1, 2))])
def test_mixstyles_stages(config, stages):
    recipe = build_recipe(complete(read_experiment(config, ["method.name=mixstyle"])))
    assert recipe.inserts[0].stages == stages


@pytest.mark.parametrize(("config", "weight"), [("pacs", 0.2), ("office-home", 0.1)])
def test_fiscs_second_weight(config, weight):
    for preset in ("", "fisc"):
        recipe = build_recipe(complete(read_experiment(config, ["method.name=fisc"], preset)))
        assert recipe.terms[0].norm_weight == weight


def test_parts_of_the_presets():
    def step(preset):
        return build_recipe(complete(read_experiment("pacs", ["method.name=csac"], preset))).client

    assert (step("csac").acquire_iterations, step("csac").acquire_epochs, step("csac").smoothing) == (0, 30, 0.1)
    code = step("csac-code")
    assert (code.acquire_iterations, code.smoothing, code.align) == (1800, 0.0, "logits")
    layers = {name: build_recipe(complete(read_experiment(name, ["method.name=gperxan"], "gperxan"))).norm
              for name in ("pacs", "office-home", "camelyon17")}  # fmt: skip
    assert {name: (norm.stages, norm.stem) for name, norm in layers.items()} == {
        "pacs": ((1, 2, 3, 4), True),
        "office-home": ((1, 2), True),
        "camelyon17": ((1,), False),
    }
    ccst = build_recipe(complete(read_experiment("pacs", ["method.name=ccst"], "ccst")))
    assert type(ccst.weights).__name__ == "Uniform"


@pytest.mark.parametrize(
    ("method", "part"), [("feddg-ga", "generalization_adjustment"), ("fedprox+feddg-ga", "generaliz")]
)
def test_a_preset_does_not_replace_a_part_that_makes_a_method(method, part):
    """CCST's uniform weights are for methods with FedAvg's weights; who wants them elsewhere says so."""
    with pytest.raises(
        PresetConflictError, match=rf"^the preset 'ccst' sets method.weights, which takes {part}"
    ) as error:
        resolve(read_experiment("pacs", [f"method.name={method}"], "ccst"))
    assert "\n" not in str(error.value)
    asked = resolve(read_experiment("pacs", [f"method.name={method}", "method.weights=uniform"], "ccst"))
    assert type(asked.recipe.weights).__name__ == "Uniform"
    own = resolve(read_experiment("pacs", [f"method.name={method}"], "feddg-ga"))
    assert type(own.recipe.weights).__name__ == "GeneralizationAdjustment"


@pytest.mark.parametrize("method", ["fedavg", "ccst", "elcfs", "fedsb"])
def test_methods_without_own_weights_take_the_presets(method):
    experiment = read_experiment("pacs", [f"method.name={method}"], "ccst")
    assert type(resolve(experiment).recipe.weights).__name__ == "Uniform"
    assert type(resolve(experiment.replace(run={"seed": 1})).recipe.weights).__name__ == "Uniform"


def test_a_sweep_reports_the_method_that_the_preset_does_not_fit(tmp_path):
    axes = Axes(["fedavg", "feddg-ga"], ["photo"], [0])
    cells = plan_cells("pacs", axes, [f"run.output={tmp_path}"], "ccst")
    assert [cell.state for cell in cells] == ["waiting", "failed"]
    assert cells[1].reason.startswith("the preset 'ccst' sets method.weights")
