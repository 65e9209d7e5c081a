"""U-Nets around torchvision's networks: sizes, gradients, and weights that go into the encoder."""

import networks
import pytest
import torch
from safetensors.torch import save_file

from fedsim.models import build_model
from fedsim.models.norms import XAN
from fedsim.models.norms.xan import XANLayer
from fedsim.models.tasks import Segmentation
from fedsim.settings import ModelSettings

SEGMENTS = Segmentation()


def build(name="unet-resnet18", size=48, norm=None, **more):
    return build_model(ModelSettings(backbone=name, **more), 2, 3, size, norm=norm, task=SEGMENTS)


@pytest.mark.parametrize(
    ("name", "size"), [("unet-resnet18", 32), pytest.param("unet-densenet121", 36, marks=pytest.mark.slow)]
)
def test_every_pixel_has_logits_and_every_weight_a_gradient(name, size):
    net = build(name, size)
    logits = net(torch.randn(2, 3, size, size))
    assert logits.shape == (2, 2, size, size)
    logits.square().sum().backward()
    assert not [name for name, parameter in net.named_parameters() if parameter.grad is None]
    assert [net.get_submodule(level) is not None for level in net.levels] == [True] * 3
    assert not net.backbone.encoder._forward_hooks
    assert not net.backbone.encoder.layer1._forward_hooks if "resnet" in name else True


def test_maps_are_those_of_the_encoder():
    """A distant change affects a pixel only through the encoder, whose deepest map depends on the whole image."""
    net = build().eval()
    image = torch.randn(1, 3, 48, 48)
    changed = image.clone()
    changed[..., 40:, 40:] += 1
    with torch.no_grad():
        moved = (net(changed) - net(image)).abs().amax(1)[0]
    assert moved[44, 44] > moved[2, 2] > 0


def test_published_weights_go_into_the_encoder(tmp_path):
    """Of a file that fedsim wrote, all tensors are read."""
    published = networks.build("resnet18", seed=5).backbone.state_dict()
    file = tmp_path / "w.safetensors"
    save_file({name: value.contiguous() for name, value in published.items()}, file)
    net = build(weights=str(file)).backbone
    own, kept = net.encoder.state_dict(), net.decoder.state_dict()
    assert own.keys() <= published.keys()
    assert all(torch.equal(value, published[name]) for name, value in own.items())
    assert all(torch.equal(value, kept[name]) for name, value in build().backbone.decoder.state_dict().items())
    save_file({f"backbone.{name}": value.contiguous() for name, value in net.state_dict().items()}, file)
    again = build(weights=str(file)).backbone.state_dict()
    assert all(torch.equal(again[name], value) for name, value in net.state_dict().items())


def test_norms_of_methods_and_frozen_encoders():
    with torch.device("meta"):
        assert sum(isinstance(module, XANLayer) for module in build(norm=XAN()).modules()) > 20
        frozen = build(train="backbone.decoder.*+head").frozen
    assert "backbone.encoder.conv1.weight" in frozen
    assert not [name for name in frozen if "decoder" in name]
