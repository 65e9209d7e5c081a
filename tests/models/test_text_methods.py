"""Methods that learn texts: what they are refused with, and that they train beside other methods."""

import functools

import numpy as np
import pytest
from small_texts import build
from support import small_experiment
from torch import nn

from fedsim.commands.contract import run_watched, small_plan
from fedsim.common.errors import UserError
from fedsim.methods.assembly import build_recipe
from fedsim.models.inserts.keyed_prompts import KeyedPrompts
from fedsim.models.inserts.learned_prompts import LearnedPrompts
from fedsim.models.inserts.prompt_sets import PromptSets
from fedsim.run.plan import resolve
from fedsim.settings.experiment import Experiment


@pytest.mark.parametrize(("part", "model", "message"), [
    (LearnedPrompts(L=60), {}, r"learned_prompts.L: with 60 tokens .* 69 tokens .* tiny-clip reads 48"),
    (LearnedPrompts(init="template"), {"prompt": "{}"}, "no word in front of the name"),
    (LearnedPrompts(), {"head": "linear"}, r"insert learned_prompts: .* set model.head = 'text'"),
    (LearnedPrompts(), {"prompt": "a photo of a dog{}"}, "begins inside a token; put a space"),
    (KeyedPrompts(L=60), {"clients": 3}, r"keyed_prompts.L: with 60 tokens .* tiny-clip reads 48"),
    (PromptSets(heads=5), {"clients": 3}, "5 does not divide the encoder's width of 32"),
    (None, {"names": ("dog", "Alarm_Clock", "alarm clock")},
     r"^model.head = 'text': the classes 'Alarm_Clock' and 'alarm clock' are the same text for tiny-clip; give"),
])  # fmt: skip
def test_parts_that_do_not_fit(part, model, message):
    with pytest.raises(UserError, match=message):
        build(part, **model)


@pytest.mark.parametrize(("method", "changes", "message"), [
    *((f"{name}+promptfl", [], "cannot both change that the texts") for name in ("fedapt", "plan")),
    *((f"deepall+{name}", [], "pooled on one client") for name in ("fedapt", "plan")),
    ("promptfl+fedsr", [], "makes a head of its own"),
    ("plan+moon", [], "moon makes a head of its own"),
    ("promptfl+fediir", [], "gradients of a linear classifier"),
    ("promptfl+feddrop", [], "no fully connected hidden layer"),
    ("promptfl", ["model.backbone=digits-cnn", "model.train=all"],
     "needs a backbone with a text encoder, digits-cnn has none"),
    *(("promptfl", ["method.learned_prompts.init=template", f"method.learned_prompts.{key}={value}"],
       rf"learned_prompts.{key} .* init = 'template'.*; leave {key} out") for key, value in (("L", 4), ("std", 0.5))),
    *(("plan", [f"model.train={trained}"], r"prompt_sets .* model.train = .* set model.train = 'head'")
      for trained in ("all", "norm")),
    ("fedclip+plan", [], r"prompt_stages .* not hold with feature_attention"),
    ("plan", ["train.compile=default"], r"set train.compile = 'off'"),
])  # fmt: skip
def test_methods_and_settings_that_do_not_fit(tmp_path, method, changes, message):
    with pytest.raises(UserError, match=message):
        small_plan(method, tmp_path, changes).build_net()


@pytest.mark.parametrize(("name", "added", "message"), [
    ("promptfl", "query_loss", "query_loss acts only beside keyed_prompts"),
    *(("fedavg", name, f"{name} acts only beside prompt_sets") for name in ("prompt_stages", "own_rows")),
])  # fmt: skip
def test_parts_that_act_only_beside_others(name, added, message):
    with pytest.raises(UserError, match=message):
        build_recipe(Experiment(method={"name": name, "add": [added]}))


def test_networks_that_do_not_fit(tmp_path):
    net = build()
    net.backbone = nn.Identity()
    with pytest.raises(UserError, match="image encoder that is a transformer"):
        PromptSets().apply(net)
    with pytest.raises(UserError, match=r"set model\.head = 'text'"):
        resolve(small_experiment(tmp_path, "promptfl")).build_net()


@functools.cache
def trained(method, folder, *changes):
    """A short run of a method."""
    few = ['data.domains=["rot0", "rot15", "rot45"]', "data.fraction=0.05", "train.rounds=1", "train.iterations=1"]
    return run_watched(small_plan(method, folder / method, [*few, *changes]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("pair", ["fedsam+promptfl", "fedomg+fedapt", "fedclip+promptfl", "feddyn+fedapt",
                                  "fedomg+plan"])  # fmt: skip
def test_joins_other_methods(pair, folder):
    """Steps, fusions, terms and FedCLIP's attention: the model is that of neither half."""
    changes = ["train.rounds=2"] if "plan" in pair else []  # its first round is equal
    both, alone = (trained(name, folder, *changes) for name in (pair, pair.split("+")[1]))
    assert np.isfinite(both.rounds["target_loss"]).all()
    assert any(not np.array_equal(both.last[name], alone.last[name]) for name in alone.last)
    assert len(both.last) - len(alone.last) == (4 if "fedclip" in pair else 0)
    assert ("query_loss" in both.clients) == ("fedapt" in pair)
