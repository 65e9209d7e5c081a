"""Learned vectors in the texts of class names, on a tiny CLIP and on numbers worked out by hand."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_texts import IMAGES, NAMES, TINY, build, simple_texts
from support import numbers, small_experiment

from fedsim.commands.contract import run_watched, small_plan
from fedsim.common.errors import UserError
from fedsim.export.files import export
from fedsim.export.trained import load_trained
from fedsim.methods.assembly import build_recipe
from fedsim.models.hidden import hidden_layers
from fedsim.models.inserts.learned_prompts import LearnedPrompts, PromptHead
from fedsim.models.texts import TextHead
from fedsim.run.plan import resolve
from fedsim.run.workspace import Workspace
from fedsim.runtime.launch import launch
from fedsim.settings.experiment import Experiment


def test_logits_on_numbers():
    """[start, V, name, end] with V = (0, 1): the means are along (3, 1) and (1, 3), and f = (2, 0) gives 10 cos."""
    head, f = PromptHead(simple_texts(), torch.tensor([[0.0, 1]])), torch.tensor([[2.0, 0]])
    assert torch.allclose(head(f), torch.tensor([[9.486833, 3.162278]]), atol=1e-5)
    head.context.data = torch.tensor([[0.0, 5]])  # (3, 5) and (1, 7)
    assert torch.allclose(head(f), torch.tensor([[5.144958, 1.414214]]), atol=1e-5)
    head.context.data = torch.tensor([[[0.0, 1]], [[0.0, 5]]])  # a class with its own vectors: (3, 1) and (1, 7)
    assert torch.allclose(head(f), torch.tensor([[9.486833, 1.414214]]), atol=1e-5)


def test_names_of_several_lengths_end_at_their_own_ends():
    """The class 3 4 has the mean of (1, 0), (0, 1), (2, 0), (0, 2) and the end: along (3, 3). The padding of the other
    one has no effect."""
    head = PromptHead(simple_texts(((3,), (3, 4))), torch.tensor([[0.0, 1]]))
    expected = torch.tensor([[9.486833, 7.071068]])
    assert torch.allclose(head(torch.tensor([[2.0, 0]])), expected, atol=1e-5)
    head.tails[0, 2:] = 100.0
    assert torch.allclose(head(torch.tensor([[2.0, 0]])), expected, atol=1e-5)


def test_the_start_from_the_template_is_zero_shot():
    for part in (LearnedPrompts(init="template"), LearnedPrompts(init="template", per_class=True)):
        with torch.no_grad():
            assert torch.allclose(build(part)(IMAGES), build()(IMAGES), atol=1e-5)
            assert not torch.allclose(build(LearnedPrompts())(IMAGES), build()(IMAGES), atol=1e-3)


def test_shapes_and_what_is_frozen():
    for part, shape in ((LearnedPrompts(L=3), (3, 32)), (LearnedPrompts(L=3, per_class=True), (3, 3, 32))):
        net = build(part)
        assert tuple(net.head.context.shape) == shape
        assert {name for name in net.state_dict() if name not in net.frozen} == {"head.context"}
        assert net.head.out_features == 3


def test_other_order_of_classes():
    first, turned = build(LearnedPrompts()), build(LearnedPrompts(), NAMES[::-1])
    with torch.no_grad():
        assert torch.allclose(first(IMAGES).flip(1), turned(IMAGES), atol=1e-5)


def test_a_run_trains_and_sends_the_vectors_alone(tmp_path):
    """16 x 32 values; no other tensor changes or has a gradient."""
    experiment = small_experiment(
        tmp_path, "promptfl", model=TINY, train={"rounds": 1},
        data={"image_size": 16, "domains": ["rot0", "rot45"], "fraction": 0.05},
    )  # fmt: skip
    space = Workspace(resolve(experiment))
    before = {name: value.clone() for name, value in space.net.state_dict().items()}
    assert space.travelling == ["head.context"]
    client = space.client("rot0", "")
    fitted = client.fit([before["head.context"].numpy().copy()],
                        {"client": "rot0", "phase": "train", "round": 1})  # fmt: skip
    changed = [name for name, value in space.net.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["head.context"]
    assert len(fitted[0]) == 1
    assert [name for name, p in space.net.named_parameters() if p.requires_grad or p.grad is not None] == changed
    run = launch(experiment)
    assert {name: tuple(value.shape) for name, value in load_file(run / "last.safetensors").items()} == {
        "head.context": (16, 32)
    }
    assert 4 * 512 <= numbers(run / "clients.csv")["bytes_up"].max() < 4 * 512 + 1000
    assert np.isfinite(numbers(run / "rounds.csv")["target_accuracy"]).all()


@pytest.mark.parametrize(
    ("part", "model", "message"),
    [
        (LearnedPrompts(L=60), {}, r"learned_prompts.L: with 60 tokens .* 69 tokens .* tiny-clip reads 48"),
        (LearnedPrompts(init="template"), {"prompt": "{}"}, "no word in front of the name"),
        (LearnedPrompts(), {"head": "linear"}, r"insert learned_prompts: .* set model.head = 'text'"),
        (LearnedPrompts(), {"prompt": "a photo of a dog{}"}, "begins inside a token; put a space"),
    ],
)
def test_what_does_not_fit_is_refused(part, model, message):
    with pytest.raises(UserError, match=message):
        build(part, **model)


@pytest.mark.parametrize("setting", ["L=4", "std=0.5"])
def test_settings_that_the_template_would_drop_are_refused(setting, tmp_path):
    """Two methods of a comparison would have the same numbers."""
    changes = ["method.learned_prompts.init=template"]
    assert small_plan("promptfl", tmp_path, changes)
    key = setting.partition("=")[0]
    with pytest.raises(UserError, match=rf"learned_prompts.{key} .* init = 'template'.*; leave {key} out"):
        small_plan("promptfl", tmp_path, [*changes, f"method.learned_prompts.{setting}"])


def test_methods_that_make_another_head_are_refused(tmp_path):
    with pytest.raises(UserError, match="makes a head of its own"):
        small_plan("promptfl+fedsr", tmp_path).build_net()
    with pytest.raises(UserError, match="gradients of a linear classifier"):
        small_plan("promptfl+fediir", tmp_path)
    with pytest.raises(UserError, match="no fully connected hidden layer"):
        small_plan("promptfl+feddrop", tmp_path).build_net()
    assert hidden_layers(build(LearnedPrompts())) == []
    with pytest.raises(UserError, match="needs a backbone with a text encoder, digits-cnn has none"):
        small_plan("promptfl", tmp_path, ["model.backbone=digits-cnn", "model.train=all"]).build_net()
    with pytest.raises(UserError, match=r"set model\.head = 'text'"):
        resolve(small_experiment(tmp_path, "promptfl")).build_net()


def test_the_network_forgets_the_text_encoder_that_nothing_uses(tmp_path):
    plan = small_plan("fedclip", tmp_path, [f"model.{key}={value}" for key, value in TINY.items()])
    net = plan.build_net()
    assert isinstance(net.head, TextHead)
    assert net.head.texts is None
    assert not any("text" in name for name, _ in net.backbone.named_modules())


def test_every_client_may_keep_its_own_texts(tmp_path):
    """COPA's heads: the features must be classified by the others' texts too, and predictions are their ensemble."""
    changes = ["method.norm=batch_norm", "model.train=all", "train.rounds=2", "train.iterations=2"]
    last = {}
    for weight in (0.0, 1.0):
        plan = small_plan("promptfl+copa", tmp_path / str(weight), [*changes, f"method.other_heads.weight={weight}"])
        found = run_watched(plan)
        assert np.isfinite(found.rounds["target_loss"]).all()
        last[weight] = found.last
    assert any(not np.array_equal(last[1.0][name], last[0.0][name]) for name in last[0.0])


def test_released_mean_is_a_setting():
    recipe = build_recipe(Experiment(method={"name": "promptfl", "weights": "uniform"}))
    assert type(recipe.weights).__name__ == "Uniform"


@pytest.mark.parametrize("pair", ["fedsam+promptfl", "fedomg+promptfl", "fedclip+promptfl", "fedprox+promptfl"])
def test_joins_other_methods(pair, tmp_path):
    """Steps, fusions, terms and FedCLIP's attention: the model is that of neither half."""
    changes = ["train.rounds=1", "train.iterations=3"]
    both, alone = (run_watched(small_plan(name, tmp_path / name, changes)) for name in (pair, "promptfl"))
    assert np.isfinite(both.rounds["target_loss"]).all()
    assert not np.array_equal(both.last["head.context"], alone.last["head.context"])
    assert len(both.last) == (5 if "fedclip" in pair else 1)


@pytest.mark.slow
def test_is_exported_with_its_texts(tmp_path):
    plan = small_plan("promptfl", tmp_path, ["train.rounds=1", "train.iterations=1"])
    run_watched(plan)
    worst, _ = export(load_trained(plan.folder), "torch", tmp_path / "model.pt2")
    assert worst < 1e-5
