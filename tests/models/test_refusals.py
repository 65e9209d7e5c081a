"""Backbones, settings, norms and inserts that do not fit each other are refused in one line that says what to do."""

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
from fedsim.settings import ModelSettings

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
    ("timm:resnet18", {"options": {"wings": 2}}, "cannot build 'resnet18'.*wings"),
    ("timm:inception_v3", {}, "inception_v3 cannot take images of 32 px"),
    *(("digits-cnn", {"norm": norm}, NO_NORM) for norm in (XAN(), IBN(), DSON(), BIN(), MixIG())),
    *((f"timm:{name}", {"norm": XAN(), "size": 64}, NO_NORM) for name in ("convnext_atto", "vit_tiny_patch16_224")),
    ("densenet121", {"norm": IBN("b")}, "variant 'b' is defined for ResNets only"),
    ("timm:tf_efficientnet_lite0", {"norm": IBN("b")}, "variant 'b' is defined for ResNets only"),
    ("resnet18", {"norm": IBN("c")}, "'a' or 'b'"),
    ("resnet18", {"norm": XAN(stages=(), stem=False)}, "hold no batch norm"),
    ("digits-cnn", {"insert": Adapters()}, "no blocks with batch norm"),
    ("digits-cnn", {"insert": FeatureHighlighter()}, "no stages"),
    ("digits-cnn", {"insert": MixStyle()}, "none of the stages"),
    *((name, {"insert": StyleExploration()}, "no stage 1") for name in ("digits-cnn", "alexnet")),
])  # fmt: skip
def test_networks_that_cannot_be(backbone, changes, message):
    with torch.device("meta"), pytest.raises(UserError, match=message) as refused:
        make(backbone, **changes)
    assert "\n" not in str(refused.value)


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
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'feddg-sim\[timm\]'"):
        build("timm:resnet18")
