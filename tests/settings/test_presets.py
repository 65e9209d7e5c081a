"""The shipped presets have the hyper-parameters of their sources (docs/presets.md); the spaces that are searched."""

import dataclasses

import pytest

from fedsim.common.errors import PresetConflictError
from fedsim.methods.assembly import build_recipe
from fedsim.methods.part_settings import make, validated
from fedsim.methods.registry import parts_by_slot
from fedsim.runs.plan import complete, resolve
from fedsim.settings import TrainSettings
from fedsim.settings.effect import marks
from fedsim.settings.experiment import parse_override, read_experiment
from fedsim.settings.tuned import Tuned, spaces
from fedsim.studies.space import read_space

CSAC = {"data": "holdout=0.1 split=stratified augment=csac", "model": "backbone=resnet18 bottleneck=256"}
# By preset: the files that have it, and its values there.
SOURCES = {
    "fedig": ("pacs vlcs office-home", {
        "train": "rounds=40 iterations=200 batch_size=64 lr=0.01 momentum=0.5 local_checks=10",
        "data": "holdout=0.2 test_split=in augment=domainbed", "model": "backbone=resnet18 bottleneck=256",
    }),
    "fedig-30": ("pacs", {
        "train": "rounds=120 iterations=20 clients_per_round=10", "data": "clients_per_domain=10 test_split=in",
    }),
    "csac": ("pacs vlcs", CSAC | {"train": "rounds=40 epochs=10 iterations=0 batch_size=64 lr=0.01 momentum=0.5"}),
    "csac-code": ("pacs", CSAC | {"train": "rounds=40 iterations=200"}),
    "csac-alexnet": ("vlcs", CSAC | {"train": "epochs=10 lr=0.001", "model": "backbone=alexnet bottleneck=0"}),
    "gperxan": ("pacs office-home camelyon17", {
        "train": "rounds=100 epochs=1 batch_size=32 lr=0.002 momentum=0.9 weight_decay=5e-4 persist_optimizer=true",
        "data": "holdout=0.1 augment=flip-jitter", "model": "backbone=resnet50",
    }),
    "feddg-ga": ("pacs office-home terra-incognita", {
        "train": "rounds=40 epochs=5 batch_size=16 lr=0.001 schedule=step persist_optimizer=true",
        "data": "holdout=0.1 augment=feddg-ga",
    }),
    "fedsb": ("pacs vlcs office-home terra-incognita", {
        "train": "rounds=100 optimizer=adam lr=1e-4 batch_size=64", "data": "holdout=0.1 augment=fedsb",
        "model": "backbone=resnet18",
    }),
    "fisc": ("pacs office-home", {
        "train": "rounds=50 epochs=1 batch_size=32 optimizer=adam lr=3e-5 clients_per_round=20",
        "data": "clients_per_domain=33 mix=0.1 image_size=224", "model": "backbone=resnet50",
    }),
    "ccst": ("pacs office-home", {
        "train": "rounds=500 epochs=1 lr=0.001 momentum=0.0 weight_decay=0.0", "data": "image_size=222 augment=ccst",
        "model": "backbone=resnet50",
    }),
    "stablefdg": ("pacs vlcs office-home", {
        "train": "rounds=50 epochs=5 clients_per_round=10 batch_size=32 lr=0.001 momentum=0.9 weight_decay=5e-4 "
        "schedule=cosine",
        "data": "clients_per_domain=10", "model": "backbone=resnet18",
    }),
}  # fmt: skip
OTHERWISE = {
    ("gperxan", "camelyon17"): {"data": "holdout=0.2 image_size=96", "model": "backbone=densenet121"},
    ("feddg-ga", "terra-incognita"): {"train": "batch_size=64", "data": "holdout=0.2"},
    ("fedsb", "office-home"): {"model": "backbone=resnet50"},
    ("fedsb", "terra-incognita"): {"model": "backbone=resnet50"},
    ("ccst", "office-home"): {"model": "backbone=resnet18"},
    ("stablefdg", "office-home"): {"parts": "enlarged_batch={balanced='step'}"},
}


@pytest.mark.parametrize(
    ("preset", "config"), [(preset, config) for preset, own in SOURCES.items() for config in own[0].split()]
)
def test_preset_has_the_values_of_its_source(preset, config):
    table = read_experiment(config, preset=preset).model_dump()
    own, other = SOURCES[preset][1], OTHERWISE.get((preset, config), {})
    for section in {**own, **other}:
        words = f"{own.get(section, '')} {other.get(section, '')}".split()
        values = dict(map(parse_override, words))
        assert {key: table[section][key] for key in values} == values
    assert table["train"]["budget"] == "paper"
    assert read_experiment(config).train.budget == "images"  # without a preset the same for every method


def recipe_of(config, method, preset=""):
    return build_recipe(complete(read_experiment(config, [f"method.name={method}"], preset)))


def test_parts_of_the_files_and_presets():
    stages = {config: recipe_of(config, "mixstyle").inserts[0].stages for config in ("pacs", "office-home", "vlcs")}
    assert stages == {"pacs": (1, 2, 3), "office-home": (1, 2), "vlcs": (1, 2)}
    for preset in ("", "fisc"):
        weights = {config: recipe_of(config, "fisc", preset).terms[0].norm_weight for config in ("pacs", "office-home")}
        assert weights == {"pacs": 0.2, "office-home": 0.1}
    step, code = (recipe_of("pacs", "csac", preset).step for preset in ("csac", "csac-code"))
    assert (step.acquire_iterations, step.acquire_epochs, step.smoothing) == (0, 30, 0.1)
    assert (code.acquire_iterations, code.smoothing, code.align) == (1800, 0.0, "logits")
    norms = {name: recipe_of(name, "gperxan", "gperxan").norm for name in ("pacs", "office-home", "camelyon17")}
    assert {name: (norm.stages, norm.stem) for name, norm in norms.items()} == {
        "pacs": ((1, 2, 3, 4), True), "office-home": ((1, 2), True), "camelyon17": ((1,), False),
    }  # fmt: skip


def weights_of(method, preset, *words, **run):
    experiment = read_experiment("pacs", [f"method.name={method}", *words], preset)
    return type(resolve(experiment.replace(run=run)).recipe.weights).__name__


@pytest.mark.parametrize("method", ["feddg-ga", "fedprox+feddg-ga"])
def test_a_preset_does_not_replace_a_part_that_makes_a_method(method):
    """CCST's uniform weights are for methods with FedAvg's weights; who wants them elsewhere says so."""
    with pytest.raises(PresetConflictError, match=r"^the preset 'ccst' sets method.weights, which takes generaliz.*\Z"):
        weights_of(method, "ccst")
    assert weights_of(method, "ccst", "method.weights=uniform") == "Uniform"
    assert weights_of(method, "feddg-ga") == "GeneralizationAdjustment"


KINDS = dict.fromkeys(kind for kinds in parts_by_slot().values() for kind in kinds.values() if marks(kind, Tuned))


def ends_of(key, space):
    (knob,) = read_space([f"{key}={space.space}"])
    return [parse_override(f"{key}={text}")[1] for text in knob.ends]


def test_the_ends_of_every_declared_space_are_allowed():
    """A space is read like --space, and names where it comes from."""
    assert len(KINDS) > 30
    for kind in KINDS:
        for name, own in marks(kind, Tuned).items():
            for space in own:
                assert space.source
                for value in ends_of(f"method.part.{name}", space):
                    changed = validated(make(kind), {name: value}, "part")
                    assert getattr(changed, name) == pytest.approx(value)
    for name, own in marks(TrainSettings, Tuned).items():
        for value in (value for space in own for value in ends_of(f"train.{name}", space)):
            assert getattr(TrainSettings.model_validate({name: value}), name) == value


def test_a_space_belongs_to_values_of_other_settings():
    """Adam has another range of lr than SGD, and RSC's shares have an effect in one of its forms only."""
    sgd, adam = (spaces(TrainSettings(optimizer=name), {})["lr"].space for name in ("sgd", "adamw"))
    assert (sgd, adam) == ("log:0.001:0.1", "log:1e-5:3e-3")
    (kind,) = (kind for kind in KINDS if kind.__name__ == "SelfChallenging")
    assert list(spaces(kind(), {})) == ["f", "b"]
    assert spaces(dataclasses.replace(kind(), variant="official"), {}) == {}
