"""Backbones, settings, norms and inserts that do not fit each other are refused in one line that says what to do."""

import sys

import pytest
import torch
from networks import build, make

from fedsim.common.errors import UserError
from fedsim.models import build_model
from fedsim.models.inserts.adapters import Adapters
from fedsim.models.inserts.feature_highlighter import FeatureHighlighter
from fedsim.models.inserts.mixstyle import MixStyle
from fedsim.models.inserts.style_exploration import StyleExploration
from fedsim.models.norms import BIN, DSON, IBN, XAN, MixIG
from fedsim.models.tasks import CLASSIFIES, Segmentation
from fedsim.models.timm_family import WEIGHT_OPTIONS
from fedsim.settings import ModelSettings
from fedsim.testing.contract import small_plan

NO_NORM = "needs a backbone with batch norm"
NO_LAYER = "model.train: the backbone has no normalization layers"


@pytest.mark.parametrize(("backbone", "changes", "message"), [
    ("resnet19", {}, "did you mean 'resnet18'.*known: .*timm:NAME"),
    ("vit-b-16", {"size": 28}, "data.image_size = 28; use 32"),
    ("digits-cnn", {"size": 14}, "at least 16 px"),
    ("digits-cnn", {"channels": 2}, "1 or 3 channels"),
    ("digits-cnn", {"weights": "imagenet"}, "no ImageNet weights"),
    ("digits-cnn", {"weights": "nowhere.pth"}, "no file 'nowhere.pth'"),
    ("resnet18", {"options": {"drop_rate": 0.1}}, "model.options: resnet18 takes none"),
    ("resnet18", {"head": "text"}, "needs a backbone with a text encoder, resnet18 has none"),
    ("resnet18", {"train": "backbone.layer5.*"}, r"model.train: no parameter is called 'backbone.layer5.\*'"),
    *((name, {"train": train}, NO_LAYER) for name in ("digits-cnn", "alexnet") for train in ("norm", "norm+head")),
    ("timm:resnet19", {}, "has no model 'resnet19'; did you mean"),
    ("timm:resnet18", {"weights": "package"}, "no ImageNet weights .'package'."),
    *(("timm:resnet18", {"options": {key: "x"}}, f"{key!r} would bring other weights") for key in WEIGHT_OPTIONS),
    ("timm:resnet18", {"options": {"wings": 2}}, "cannot build 'resnet18'.*wings"),
    ("timm:inception_v3", {}, "inception_v3 cannot take images of 32 px"),
    *(("digits-cnn", {"norm": norm}, NO_NORM) for norm in (XAN(), IBN(), DSON(), BIN(), MixIG())),
    *((f"timm:{name}", {"norm": XAN(), "size": 64}, NO_NORM) for name in ("convnext_atto", "vit_tiny_patch16_224")),
    ("densenet121", {"norm": IBN("b")}, "variant 'b' is defined for ResNets only"),
    ("timm:tf_efficientnet_lite0", {"norm": IBN("b")}, "variant 'b' is defined for ResNets only"),
    ("resnet18", {"norm": XAN(stages=(), stem=False)}, "hold no batch norm"),
    ("digits-cnn", {"insert": Adapters()}, "no blocks with batch norm"),
    ("digits-cnn", {"insert": FeatureHighlighter()}, "no stages"),
    ("digits-cnn", {"insert": MixStyle()}, "none of the stages"),
    *((name, {"insert": StyleExploration()}, "no stage 1") for name in ("digits-cnn", "alexnet")),
])  # fmt: skip
def test_networks_that_cannot_be(backbone, changes, message):
    with torch.device("meta"), pytest.raises(UserError, match=rf"\A.*(?:{message}).*\Z"):
        make(backbone, **changes)


@pytest.mark.parametrize(("backbone", "task", "settings", "message"), [
    ("resnet18", Segmentation(), {}, "one vector per image"),
    ("unet", CLASSIFIES, {}, "features of every pixel, for data sets with masks"),
    ("unet-resnet18", CLASSIFIES, {}, "for data sets with masks"),
    ("unet", Segmentation(), {"bottleneck": 8}, "model.bottleneck"),
])  # fmt: skip
def test_backbone_and_task_that_do_not_fit(backbone, task, settings, message):
    with pytest.raises(UserError, match=message):
        build_model(ModelSettings(backbone=backbone, **settings), 2, 3, 32, task=task)


def test_missing_timm_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match=r"pip install 'feddg-sim\[timm\]'"):
        build("timm:resnet18")


@pytest.mark.parametrize(("method", "changes", "message"), [
    # FedDyn's H, FedCM's D and the moments of a second optimizer would grow without bound
    ("feddyn+fedomg", [], "dynamic_correction assumes that the fused model is the weighted mean"),
    ("fedig-a+feddyn", [], r"dynamic_correction assumes that one step .* not hold with mix_ig"),
    ("feddyn+fedavgm", [], "dynamic_correction and fed_avg_m cannot both change that"),
    *((pair, [], f"global_direction .* not hold with {part}")
      for pair, part in (("fedcm+fedadam", "fed_adam"), ("fedomg+fedcm", "gradient_matching"))),
    # rows, and the models of teachers, would be in the model that predicts all the same
    *((method, [*more, f"method.fuse={fuse}"], f"assumes that no client is left out .* not hold with {fuse}")
      for method, more in (("plan", []), ("fedavg", ['method.add=["ensemble_distillation"]']))
      for fuse in ("krum", "bulyan", "coordinate_median", "trimmed_mean")),
    *((method, ['method.add=["upload_cache"]'], words) for method, words in (
        ("fedavg", "clients upload tensors that they keep"), ("fedbn+krum", "weighted mean .* not hold with krum"),
        ("feddg-ga+fedbn", "examples, which does not hold with generalization_adjustment"))),
    *((f"feddrop+{name}", [], "trains the whole model") for name in ("scaffold", "ditto", "feddg-ga", "afl", "moon")),
    *((pair, [], r"kept_scale assumes .* not hold with") for name in ("l2d", "fedsr", "fedl2r", "fedclip")
      for pair in (f"feddrop+{name}", f"{name}+feddrop")),
    # momentum of the round before would move units that are left out in this one away from 0
    *(("feddrop", ["train.persist_optimizer=true", *more], "persist_optimizer = false")
      for more in (["train.momentum=0.9"], ["train.momentum=0", "train.optimizer=adam"])),
    *(("fedavg", [f"method.fuse={fuse}", f"method.{fuse}.malicious=1"], f"needs {least} clients")
      for fuse, least in (("krum", 5), ("bulyan", 7))),
    ("fedavg", ["method.fuse=trimmed_mean", "method.trimmed_mean.beta=0.2"], "leaves out none of 3 clients"),
    ("fedavg", ["method.fuse=private_mean"], "batch-norm"),
    ("feddg-ga", ["method.fuse=coordinate_median"], "not hold with coordinate_median"),
    ("fedavg", ['method.add=["server_step"]', "method.server_step.eta=0"], "server_step.eta: Input should be greater"),
    *(("perada", [f"method.norm={norm}"], f"norm layers are those of the backbone, which does not hold with {norm}")
      for norm in ("xan", "bin", "mix_ig", "ibn", "dson")),  # whose layers would not call their adapters
    # a model for the unseen domain must exist in every tensor: no rule computes gamma and beta again
    *(("fedbn", [f"method.infer={infer}", "method.without_batch_norm.upload=false"],
       r"keep upload = true, or set method\.share = 'without_statistics'") for infer in ("eval_mode", "recompute")),
    *(("silobn", [f"method.infer={infer}", "method.without_statistics.upload=false"],
       r"keep upload = true, or set method\.infer = 'recompute'") for infer in ("eval_mode", "tsmo_bn")),
    *(("gperxan", [f"method.infer={infer}"], "by their own statistics, which does not hold with xan")
      for infer in ("tsmo_bn", "tent")),
    ("fedavg", ["method.infer=zero_shot_adapter"], "adapter"),
    *(("fedig", ["method.infer=random_alpha", *(f"method.random_alpha.{each}" for each in own)],
       r"random_alpha\.(low|high)") for own in (["low=0.6", "high=0.4"], ["low=-0.1"], ["high=1.1"])),
    *((f"{name}+promptfl", [], "cannot both change that the texts") for name in ("fedapt", "plan")),
    *((f"deepall+{name}", [], "pooled on one client") for name in ("fedapt", "plan")),
    ("promptfl+fedsr", [], "makes a head of its own"), ("plan+moon", [], "moon makes a head of its own"),
    ("promptfl+fediir", [], "gradients of a linear classifier"),
    ("promptfl+feddrop", [], "no fully connected hidden layer"),
    ("promptfl", ["model.backbone=digits-cnn", "model.train=all"],
     "needs a backbone with a text encoder, digits-cnn has none"),
    ("promptfl", ["model.head=linear"], r"set model\.head = 'text'"),
    *(("promptfl", ["method.learned_prompts.init=template", f"method.learned_prompts.{key}={value}"],
       rf"learned_prompts.{key} .* init = 'template'.*; leave {key} out") for key, value in (("L", 4), ("std", 0.5))),
    *(("plan", [f"model.train={trained}"], r"prompt_sets .* model.train = .* set model.train = 'head'")
      for trained in ("all", "norm")),
    ("fedclip+plan", [], r"prompt_stages .* not hold with feature_attention"),
    ("plan", ["train.compile=default"], r"set train.compile = 'off'"),
    *((name, [f'method.add=["{part}"]'], f"{part} acts only together with {other}") for name, part, other in (
        ("promptfl", "query_loss", "keyed_prompts"), ("fedavg", "prompt_stages", "prompt_sets"),
        ("fedavg", "own_rows", "prompt_sets"))),
])  # fmt: skip
def test_recipes_that_do_not_fit(tmp_path, method, changes, message):
    with pytest.raises(UserError, match=message):
        small_plan(method, tmp_path, changes).build_net()
