"""CLIP's encoders as a backbone and a head of class names, with a tiny CLIP of random weights."""

import functools
import json

import pytest
import torch
from networks import saved
from torch import nn

from fedsim.common.errors import UserError
from fedsim.common.seeding import stream_seed
from fedsim.models import build_model
from fedsim.models.backbones import find_backbone
from fedsim.models.build import initial_state
from fedsim.models.clip_family import TextHead
from fedsim.models.inserts.feature_attention import Attended
from fedsim.models.inserts.learned_prompts import LearnedPrompts
from fedsim.models.inserts.prompt_sets import PromptSets
from fedsim.settings import ModelSettings

TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
NAMES = ("dog", "alarm_clock", "horse")
IMAGES = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", autouse=True)
def tiny(tmp_path_factory):
    """Models of open_clip: a tiny CLIP; one whose texts are read in both directions, and one with a ResNet."""
    open_clip = pytest.importorskip("open_clip")
    resnet = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8}
    for name, changes in (("tiny-clip", {}), ("two-ways", {"text_cfg": {**TINY["text_cfg"], "no_causal_mask": True}}),
                          ("convolutional", {"vision_cfg": resnet})):  # fmt: skip
        file = tmp_path_factory.mktemp("clip") / f"{name}.json"
        file.write_text(json.dumps({**TINY, **changes}))
        open_clip.add_model_config(file)


def build(backbone="tiny-clip", names=NAMES, **more):
    model = {"backbone": f"open_clip:{backbone}", "head": "text"} | more
    return build_model(ModelSettings(**model), len(names), 3, 32, names=names).eval()


@functools.cache
def own_clip(seed=0):
    import open_clip

    torch.manual_seed(stream_seed(seed, "init"))
    return open_clip.create_model("tiny-clip", load_weights=False).eval()


@torch.no_grad()
def is_zero_shot(net, clip):
    """Whether the network has the logits by which CLIP itself compares images with texts."""
    from open_clip import get_tokenizer

    texts = get_tokenizer("tiny-clip")([f"a photo of a {name.replace('_', ' ')}." for name in NAMES])
    return torch.allclose(net(IMAGES), clip.get_logits(IMAGES, texts)[0], atol=1e-5)


def test_it_is_zero_shot_clip_with_drawn_weights_and_with_those_of_a_file(tmp_path):
    net, other = build(), own_clip(seed=7)
    assert is_zero_shot(net, own_clip())
    assert not any("transformer.resblocks" in name and "visual" not in name for name in net.state_dict())
    assert not any(name.startswith("head.") for name in net.state_dict())  # every process computes the texts
    assert is_zero_shot(build(weights=saved(tmp_path / "w.safetensors", other.state_dict())), other)


@torch.no_grad()
def test_attention_and_cosines_on_numbers():
    """W = 1, b = 0, f = (1, 2, 2) and the texts e1, e2; with a second layer of zeros it is zero-shot."""
    attended, f, head = Attended(3), torch.tensor([[1.0, 2.0, 2.0]]), TextHead(2 * torch.eye(3)[:2], 100)
    for layer in (attended.first, attended.second):
        layer.weight.copy_(torch.eye(3))
        layer.bias.zero_()
    found = attended(f)
    assert torch.allclose(found / f, torch.tensor([[0.289960, 0.355020, 0.355020]]), atol=1e-6)
    assert torch.allclose(head(found), torch.tensor([[27.742669, 67.935058]]), atol=1e-4)
    attended.second.weight.zero_()
    assert torch.allclose(head(attended(f)), torch.tensor([[33.333333, 66.666667]]), atol=1e-4)


@pytest.mark.parametrize(("model", "message"), [
    ({"backbone": "tiny-clip", "bottleneck": 8}, r"set model.bottleneck to 0"),
    ({"backbone": "tiny-clap", "head": "linear"}, r"has no model 'tiny-clap'.*did you mean 'tiny-clip'"),
    ({"backbone": "ViT-B-32", "options": {"pretrained": "openal"}}, r"no weights 'openal'; did you mean"),
    ({"options": {"depth": 3}}, r"takes 'pretrained' alone, not 'depth'"),
    ({"weights": "hub", "head": "linear"}, r"use none or a local file"),
    ({"prompt": "one of many words " * 4 + "{}"}, r"16 tokens"),
    ({"prompt": "a photo"}, r"exactly one \{\} for its name"),
    ({"names": ("Alarm_Clock", "alarm clock", "dog")},
     r"'Alarm_Clock' and 'alarm clock' are the same text for open_clip:tiny-clip"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(model, message):
    with pytest.raises((UserError, ValueError), match=message):
        build(**model)


@pytest.mark.parametrize(("name", "options", "message"), [
    ("ViT-B-16", {}, "model.options: .*ViT-B-16 differ in activation.*known: openai, .*laion2b_s34b_b88k"),
    ("ViT-B-16", {"pretrained": "laion2b_s34b_b88k"}, "no file"), ("RN50x4", {}, "no file"),  # its weights agree
    ("tiny-clip", {}, "no file"),  # without tags
])  # fmt: skip
def test_a_local_file_needs_a_tag_where_published_weights_differ(name, options, message):
    model = ModelSettings(backbone=f"open_clip:{name}", weights="none.pt", options=options)
    with pytest.raises(UserError, match=rf"\A.*(?:{message}).*\Z"):
        initial_state(model, find_backbone(model), nn.ModuleDict({"clip": nn.Identity()}), 32)


def test_learned_texts_begin_as_those_of_open_clip():
    """From the words of the template they are those that open_clip computes itself, of the full 16 tokens."""
    net = build()
    text = net.head.text
    with pytest.raises(UserError, match=r"13 tokens .* longest text has 18 tokens .*open_clip:tiny-clip reads 16"):
        LearnedPrompts(L=13).apply(net)
    LearnedPrompts(init="template").apply(net)
    assert torch.allclose(net.head.read(net.head.context), text, atol=1e-5)
    assert net.head.tails.shape[1] == 4  # alarm, clock, the full stop and the end
    assert net.state_dict().keys() - net.frozen == {"head.context", *dict(net.backbone.state_dict(prefix="backbone."))}
    with pytest.raises(UserError, match="texts of open_clip:two-ways cannot be learned"):
        LearnedPrompts().apply(build("two-ways"))


def test_prompts_reach_all_layers_of_open_clip():
    """Without prompts the images are those of zero-shot CLIP; with a client's own, each layer's have a gradient."""
    net = build()
    net.clients = 2
    with torch.no_grad():
        expected = net(IMAGES)
        PromptSets(n=2, heads=4).apply(net)
        with net.prompts.holding("vision", None):
            assert torch.allclose(net.head.logits(net.features(IMAGES), net.head.zero_shot), expected, atol=1e-5)
    net.prompts.train().client = 1
    loss = nn.functional.cross_entropy(net(IMAGES), torch.tensor([0, 1, 2, 0, 1]))
    for gradient in torch.autograd.grad(loss, [net.prompts.text, net.prompts.vision]):
        assert gradient[0].abs().sum() == 0
        assert (gradient[1].abs().sum(dim=2) > 0).all()  # [layers, prompts]
    with pytest.raises(UserError, match="image encoder that is a transformer"):
        PromptSets().apply(build("convolutional"))
