"""U-Nets, also around torchvision's networks: sizes, gradients, norms, and weights that go into the encoder."""

import networks
import pytest
import torch
from networks import saved

from fedsim.models import build_model
from fedsim.models.norms import XAN
from fedsim.models.norms.xan import XANLayer
from fedsim.models.tasks import Segmentation
from fedsim.settings import ModelSettings


def build(backbone="unet-resnet18", norm=None, **more):
    return build_model(ModelSettings(backbone=backbone, **more), 2, 3, 32, norm=norm, task=Segmentation())


@pytest.mark.parametrize(("backbone", "size", "width"), [
    ("unet", 33, 32), ("unet-small", 32, 16), ("unet-resnet18", 32, 32),
    pytest.param("unet-densenet121", 36, 32, marks=pytest.mark.slow),
])  # fmt: skip
def test_every_pixel_has_features_and_logits_and_every_weight_a_gradient(backbone, size, width):
    net, x = build(backbone), torch.randn(2, 3, size, size)
    *levels, features, logits = networks.shapes(net, 2, 3, size, size)
    assert (features, logits) == ((2, width, size, size), (2, 2, size, size))
    assert [side for _, side, _ in levels] == sorted({side for _, side, _ in levels}, reverse=True)
    net.train()(x).square().sum().backward()
    assert not [name for name, parameter in net.named_parameters() if parameter.grad is None]
    if backbone == "unet-resnet18":  # a distant change affects a pixel only through the encoder's deepest map
        assert not net.backbone.encoder.layer1._forward_hooks
        image = torch.randn(1, 3, 48, 48)
        changed = image.clone()
        changed[..., 40:, 40:] += 1
        with torch.no_grad():
            moved = (net.eval()(changed) - net(image)).abs().amax(1)[0]
        assert moved[44, 44] > moved[2, 2] > 0


def test_norms_of_methods_and_frozen_encoders():
    with torch.device("meta"):
        assert sum(isinstance(module, XANLayer) for module in build(norm=XAN()).modules()) > 20
        frozen = build(train="backbone.decoder.*+head").frozen
    assert "backbone.encoder.conv1.weight" in frozen
    assert not [name for name in frozen if "decoder" in name]


def test_published_weights_go_into_the_encoder(tmp_path):
    """Of a file that fedsim wrote, all tensors are read."""
    published, file = networks.build("resnet18", seed=5).backbone.state_dict(), tmp_path / "w.safetensors"
    net = build(weights=saved(file, published)).backbone
    assert net.encoder.state_dict().keys() <= published.keys()
    assert all(torch.equal(value, published[name]) for name, value in net.encoder.state_dict().items())
    whole = {f"backbone.{name}": value for name, value in net.state_dict().items()}
    again = build(weights=saved(file, whole)).backbone.state_dict()
    assert all(torch.equal(again[name], value) for name, value in net.state_dict().items())
