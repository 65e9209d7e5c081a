"""CLIP's encoders as a backbone and a head of class names, with a tiny CLIP of random weights."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import numbers, small_experiment

from fedsim.common.errors import UserError
from fedsim.common.seeding import stream_seed
from fedsim.models import build_model
from fedsim.models.backbones import find_backbone
from fedsim.models.build import initial_state
from fedsim.models.clip_family import TextHead
from fedsim.models.inserts.feature_attention import Attended, FeatureAttention
from fedsim.models.inserts.learned_prompts import LearnedPrompts
from fedsim.models.inserts.prompt_sets import PromptSets
from fedsim.models.net import Net
from fedsim.run.plan import resolve
from fedsim.run.workspace import Workspace
from fedsim.runtime.launch import launch
from fedsim.settings import ModelSettings

open_clip = pytest.importorskip("open_clip")
TINY = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
NAMES = ("dog", "alarm_clock", "horse")


@pytest.fixture(scope="module", autouse=True)
def tiny(tmp_path_factory):
    """The name of a tiny CLIP model, `open_clip:tiny-clip`; one whose texts are read in both directions, and one with a
    ResNet."""
    resnet = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8}
    for name, changes in (
        ("tiny-clip", {}),
        ("two-ways", {"text_cfg": {**TINY["text_cfg"], "no_causal_mask": True}}),
        ("convolutional", {"vision_cfg": resnet}),
    ):
        file = tmp_path_factory.mktemp("clip") / f"{name}.json"
        file.write_text(json.dumps({**TINY, **changes}))
        open_clip.add_model_config(file)


def settings(**more):
    return ModelSettings(backbone="open_clip:tiny-clip", head="text", **more)


def build(names=NAMES, **more):
    return build_model(settings(**more), len(names), 3, 32, names=names)


def own_clip(seed=0):
    torch.manual_seed(stream_seed(seed, "init"))
    return open_clip.create_model("tiny-clip", load_weights=False).eval()


def logits_of(clip, images, names=NAMES):
    """The logits by which CLIP itself compares images with texts."""
    texts = open_clip.get_tokenizer("tiny-clip")([f"a photo of a {name.replace('_', ' ')}." for name in names])
    with torch.no_grad():
        return clip.get_logits(images, texts)[0]


IMAGES = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def test_untrained_it_is_zero_shot_clip():
    net = build().eval()
    with torch.no_grad():
        assert torch.allclose(net(IMAGES), logits_of(own_clip(), IMAGES), atol=1e-5)
    assert not any("transformer.resblocks" in name and "visual" not in name for name in net.state_dict())
    assert not any(name.startswith("head.") for name in net.state_dict())  # every process computes the texts


def test_weights_of_a_file_go_into_both_encoders(tmp_path):
    other = own_clip(seed=7)
    save_file({name: value.contiguous() for name, value in other.state_dict().items()}, tmp_path / "w.safetensors")
    net = build(weights=str(tmp_path / "w.safetensors")).eval()
    with torch.no_grad():
        assert torch.allclose(net(IMAGES), logits_of(other, IMAGES), atol=1e-5)
        assert not torch.allclose(net(IMAGES), build().eval()(IMAGES), atol=1e-2)


def test_other_names_and_other_order():
    first, turned = build().eval(), build(names=NAMES[::-1]).eval()
    with torch.no_grad():
        assert torch.allclose(first(IMAGES).flip(1), turned(IMAGES), atol=1e-5)


def test_attention_and_cosines_on_numbers():
    """W = 1, b = 0, f = (1, 2, 2) and the texts e1, e2 (worked out by hand)."""
    attended = Attended(3)
    with torch.no_grad():
        for layer in (attended.first, attended.second):
            layer.weight.copy_(torch.eye(3))
            layer.bias.zero_()
        f = torch.tensor([[1.0, 2.0, 2.0]])
        found = attended(f)
        assert torch.allclose(found / f, torch.tensor([[0.289960, 0.355020, 0.355020]]), atol=1e-6)
        head = TextHead(2 * torch.eye(3)[:2], 100)
        assert torch.allclose(head(found), torch.tensor([[27.742669, 67.935058]]), atol=1e-4)
        attended.second.weight.zero_()
        assert torch.allclose(head(attended(f)), torch.tensor([[33.333333, 66.666667]]), atol=1e-4)
        assert torch.allclose(head(attended(f)), head(f), atol=1e-4)  # zero-shot


def test_the_attention_follows_a_bottleneck():
    net = Net(torch.nn.Flatten(), 4, 3, bottleneck=2).eval()
    FeatureAttention().apply(net)
    features = net.features(torch.randn(2, 1, 2, 2))
    assert features.shape == (2, 2)
    assert [name for name, _ in net.bottleneck.named_children()] == ["0", "1"]


def test_fedclip_sends_its_attention_alone(tmp_path):
    """These are 2 (e^2 + e) values; after the run every other tensor is still the one that follows from the seed."""
    model = {"backbone": "open_clip:tiny-clip", "head": "text", "train": "head"}
    experiment = small_experiment(
        tmp_path, "fedclip", model=model, data={"image_size": 32, "domains": ["rot0", "rot45"], "fraction": 0.05},
        train={"rounds": 1},
    )  # fmt: skip
    space = Workspace(resolve(experiment))
    sent = {f"bottleneck.{layer}.{kind}" for layer in ("first", "second") for kind in ("weight", "bias")}
    assert set(space.travelling) == sent
    run = launch(experiment)
    assert set(load_file(run / "last.safetensors")) == sent
    clients = numbers(run / "clients.csv")
    assert 4 * 544 <= clients["bytes_up"].max() < 4 * 544 + 4000  # and the .npy headers
    assert np.isfinite(numbers(run / "rounds.csv")["target_accuracy"]).all()
    net = Workspace(resolve(experiment)).net
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in space.net.state_dict().items())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"backbone": "resnet18", "head": "text"}, r"needs a backbone with a text encoder, resnet18 has none"),
        ({"backbone": "open_clip:tiny-clip", "head": "text", "bottleneck": 8}, r"set model.bottleneck to 0"),
        ({"backbone": "open_clip:tiny-clap"}, r"has no model 'tiny-clap'.*did you mean 'tiny-clip'"),
        ({"backbone": "open_clip:ViT-B-32", "options": {"pretrained": "openal"}}, r"no weights 'openal'; did you mean"),
        ({"backbone": "open_clip:tiny-clip", "options": {"depth": 3}}, r"takes 'pretrained' alone, not 'depth'"),
        ({"backbone": "open_clip:tiny-clip", "weights": "hub"}, r"use none or a local file"),
        ({"backbone": "open_clip:tiny-clip", "head": "text", "prompt": "one of many words " * 4 + "{}"}, r"16 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(model, message):
    with pytest.raises(UserError, match=message):
        build_model(ModelSettings(**model), 3, 3, 32, names=NAMES)


def test_classes_of_equal_texts_are_refused():
    with pytest.raises(UserError, match=r"'Alarm_Clock' and 'alarm clock' are the same text for open_clip:tiny-clip"):
        build(names=("Alarm_Clock", "alarm clock", "dog"))


def test_a_local_file_needs_a_tag_where_published_weights_differ(tmp_path):
    """The file does not say its activation and normalization; with a tag it is read, and tiny CLIP has no tags."""
    file = str(tmp_path / "none.pt")
    for name, options, message in (
        ("ViT-B-16", {}, "model.options: .*ViT-B-16 differ in activation.*known: openai, .*laion2b_s34b_b88k"),
        ("ViT-B-16", {"pretrained": "laion2b_s34b_b88k"}, "no file"),
        ("RN50x4", {}, "no file"),  # its weights agree
        ("tiny-clip", {}, "no file"),
    ):
        model = ModelSettings(backbone=f"open_clip:{name}", weights=file, options=options)
        with pytest.raises(UserError, match=message) as refused:
            initial_state(model, find_backbone(model), torch.nn.ModuleDict({"clip": torch.nn.Identity()}), 32)
        assert "\n" not in str(refused.value)


def test_learned_texts_begin_as_those_of_open_clip():
    """From the words of the template they are those that open_clip computes itself, of the full 16 tokens."""
    net = build()
    text = net.head.text
    LearnedPrompts(init="template").apply(net)
    assert torch.allclose(net.head.read(net.head.context), text, atol=1e-5)
    assert net.head.tails.shape[1] == 4  # alarm, clock, the full stop and the end
    assert net.state_dict().keys() - net.frozen == {"head.context", *dict(net.backbone.state_dict(prefix="backbone."))}
    with pytest.raises(UserError, match=r"13 tokens .* longest text has 18 tokens .*open_clip:tiny-clip reads 16"):
        LearnedPrompts(L=13).apply(build())
    net = build_model(ModelSettings(backbone="open_clip:two-ways", head="text"), 3, 3, 32, names=NAMES)
    with pytest.raises(UserError, match="texts of open_clip:two-ways cannot be learned"):
        LearnedPrompts().apply(net)


def test_prompts_reach_all_layers_of_open_clip():
    """Without prompts the images are those of zero-shot CLIP; with a client's own, each layer's have a gradient."""
    net = build().eval()
    net.clients = 2
    with torch.no_grad():
        expected = net(IMAGES)
        PromptSets(n=2, heads=4).apply(net)
        with net.prompts.holding(None):
            assert torch.allclose(net.head.logits(net.features(IMAGES), net.head.zero_shot), expected, atol=1e-5)
    net.prompts.train().client = 1
    loss = torch.nn.functional.cross_entropy(net(IMAGES), torch.tensor([0, 1, 2, 0, 1]))
    for gradient in torch.autograd.grad(loss, [net.prompts.text, net.prompts.vision]):
        assert gradient[0].abs().sum() == 0
        assert (gradient[1].abs().sum(dim=2) > 0).all()  # [layers, prompts]
    net = build_model(ModelSettings(backbone="open_clip:convolutional", head="text"), 3, 3, 32, names=NAMES)
    with pytest.raises(UserError, match="image encoder that is a transformer"):
        PromptSets().apply(net)


def test_nothing_to_train_is_refused(tmp_path):
    model = {"backbone": "open_clip:tiny-clip", "head": "text", "train": "head"}
    with pytest.raises(UserError, match="trains nothing"):
        Workspace(resolve(small_experiment(tmp_path, model=model, data={"image_size": 32})))
    with pytest.raises(UserError, match="makes a head of its own"):
        Workspace(
            resolve(small_experiment(tmp_path, "fedsr", model={**model, "train": "all"}, data={"image_size": 32}))
        )
    with pytest.raises(ValueError, match=r"exactly one \{\} for its name"):
        settings(prompt="a photo")


def test_facts_come_with_the_weights():
    row = find_backbone(ModelSettings(backbone="open_clip:ViT-B-32", options={"pretrained": "openai"}))
    assert row.input_size == 224
    assert row.statistics.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
