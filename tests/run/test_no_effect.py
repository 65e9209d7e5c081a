"""Settings on which nothing depends are refused; where they have an effect, they are accepted."""

import pytest
from support import small_experiment

from fedsim.common.errors import UserError
from fedsim.methods.recipe import Recipe
from fedsim.methods.table import METHODS
from fedsim.models import build_model
from fedsim.run.no_effect import no_effect_remarks, share_remarks
from fedsim.run.plan import resolve
from fedsim.settings import DataSettings, ModelSettings
from fedsim.settings.effect import Scene, Size
from fedsim.settings.experiment import Experiment

MASKS = {"dataset": "digit-masks", "image_size": 32}
COLOURLESS = {Scene.COLOURS: False, Scene.MASKS: False, Scene.STEM: False, Scene.BOTTLENECK: False}


@pytest.mark.parametrize(("section", "values", "said"), [
    ("data", {"classes": ["0", "1"]}, "data.classes has an effect only with data.dataset = 'folder' or 'table' or"),
    ("data", {"structures": {"x": [1]}}, "data.structures has an effect only with data.dataset = 'masks'"),
    ("train", {"dp_epsilon": 0.5}, "train.dp_epsilon has an effect only with train.dp_clip above 0"),
    ("data", {"dataset": "pacs", "lists": "x"}, "data.lists .* only with .* and data.split = 'lists' or"),
    ("data", {"dataset": "digits-dg", "lists": "x", "split": "lists"}, "data.lists .* only with images in folders"),
])  # fmt: skip
def test_a_setting_without_effect_is_refused(section, values, said):
    with pytest.raises(UserError, match=rf"^{said}.*; leave it out$"):
        resolve(Experiment(**{section: values}))


@pytest.mark.parametrize("settings", [
    {"data": {"partition": "dirichlet", "alpha": 0.1, "mix": 0.5}},
    {"data": {"partition": "iid", "alpha": 0.1, "clients_per_domain": 2}},  # a grid over both partitions
    {"data": {**MASKS, "mask_threshold": 0.9, "largest_component": True}, "model": {"backbone": "unet-small"}},
    {"train": {"dp_epsilon": 0.5}, "run": {"label": "train.dp_clip=0"}},  # a grid over the clip, with runs without it
    {"data": {"dataset": "pacs", "lists": "x", "test_split": "list"}},
    {"data": DataSettings().model_dump()},  # defaults may be written down
])  # fmt: skip
def test_the_same_setting_with_an_effect_is_accepted(settings):
    experiment = Experiment(**settings)
    kept = resolve(experiment).experiment
    assert (kept.data, kept.model) == (experiment.data, experiment.model)


def test_what_a_sweep_over_the_other_setting_has_is_said():
    """One and four clients per domain with the same partition are a usual sweep, which is not refused."""
    data = {"partition": "dirichlet", "alpha": 0.1}
    resolve(Experiment(data=data))
    said = no_effect_remarks(Experiment(data=data, model={"prompt": "{} x"}), Recipe(), {})
    assert [text.split(" has no effect here")[0] for text in said] == ["data.partition", "data.alpha", "model.prompt"]
    assert no_effect_remarks(Experiment(data={**data, "clients_per_domain": 4}), Recipe(), {}) == []
    drawn = Experiment(train={"clients_per_round": 2})  # one client with all data is never drawn
    assert [len(no_effect_remarks(drawn, METHODS[name], {})) for name in ("fedavg", "deepall")] == [0, 1]
    train = {"dp_epsilon": 0.5}
    grid = Experiment(train=train, run={"label": "train.lr=0.1,train.dp_clip=0.0"})
    said = ["train.dp_epsilon has no effect here, only with train.dp_clip above 0"]
    assert no_effect_remarks(grid, Recipe(), {}) == said
    with pytest.raises(UserError, match=r"^train\.dp_epsilon has an effect only with"):
        resolve(Experiment(train=train, run={"label": "train.dp_epsilon=0.5"}))


@pytest.mark.parametrize(("method", "setting", "value", "facts", "needed"), [
    ("randconv", "random_convolution.p", 0.1, {}, "method.random_convolution.variant = 'img_p'"),
    ("fedbn", "without_batch_norm.share_scores", True, {}, "method.norm = 'xan'"),
    ("gperxan", "xan.stem", False, COLOURLESS, "a backbone with batch norm before its first stage"),
    ("moon", "projection_head.always", True, COLOURLESS, "model.bottleneck above 0"),
    ("jigen", "jigsaw.grey", 0.5, COLOURLESS, "images of three channels"),
    ("elcfs", "episodic_step.gamma", 0.5, COLOURLESS, "data that have masks"),
    ("fada", "adversarial_target.sample", 600, {Size.TARGET_IMAGES: 512}, "a value below the number of images"),
    ("fada", "adversarial_target.sample", 600, {Size.TARGET_IMAGES: 513}, ""),
    ("feddg-ga", "generalization_gap.max_samples", 80, {Size.CLIENT_IMAGES: 80}, "a value below"),  # 0 is all
])  # fmt: skip
def test_a_parts_setting_without_effect_is_said(method, setting, value, facts, needed):
    part, field = setting.split(".")
    plan = resolve(small_experiment("unused", {"name": method, part: {field: value}}))
    said = no_effect_remarks(plan.experiment, plan.recipe, facts)
    starts = [text.startswith(f"method.{setting} has no effect here, only with {needed}") for text in said]
    assert starts == [True] * bool(needed)


@pytest.mark.parametrize(("method", "backbone", "said"), [
    ("fedavg", "digits-cnn", 0), ("feddrop", "digits-cnn", 0), ("copa", "digits-cnn", 0), ("fedbn", "digits-cnn-bn", 0),
    ("fedbn", "digits-cnn", 1), ("silobn", "digits-cnn", 1),
])  # fmt: skip
def test_a_share_rule_that_keeps_nothing_back_is_said(method, backbone, said):
    net = build_model(ModelSettings(backbone=backbone), 10, 1, 28)
    remarks = share_remarks(net, METHODS[method].share)
    assert [text.startswith("method.share has no effect here: without_") for text in remarks] == [True] * said


def test_a_recorded_run_may_have_what_a_new_one_may_not():
    """Models of older runs can still be exported and evaluated."""
    data, run = {"variant": "domainbed"}, {"target": "rot75", "validation_domain": "rot0"}
    assert resolve(Experiment(data=data, run=run), recorded=True).clients == ("rot15", "rot30", "rot45", "rot60")
    shared = Experiment(data={"test_split": "list", "fraction": 0.5})
    resolve(shared, recorded=True)
    said = r"^data.fraction takes no share of the images that data.test_split = 'list' tests; leave it at 1$"
    with pytest.raises(UserError, match=said):
        resolve(shared)
    refused = Experiment(method={"name": "feddyn", "fuse": "coordinate_median"})
    with pytest.raises(UserError, match="use one of the two"):
        resolve(refused)
    assert resolve(refused, recorded=True).recipe.refine
