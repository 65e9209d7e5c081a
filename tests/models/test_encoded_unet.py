"""U-Nets around torchvision's networks: sizes, gradients, and weights that go into the encoder."""

import pytest
import torch
from safetensors.torch import save_file

from fedsim.common.errors import UserError
from fedsim.models import build_model
from fedsim.models.norms import XAN
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
    import torchvision

    torch.manual_seed(5)
    published = torchvision.models.resnet18(weights=None)
    save_file(published.state_dict(), tmp_path / "resnet18.safetensors")
    net, without = build(weights=str(tmp_path / "resnet18.safetensors")), build()
    own = net.backbone.encoder.state_dict()
    assert all(torch.equal(own[name], value) for name, value in published.state_dict().items() if name in own)
    kept = net.backbone.decoder.state_dict()
    assert all(torch.equal(kept[name], value) for name, value in without.backbone.decoder.state_dict().items())
    save_file({name: value.contiguous() for name, value in net.state_dict().items()}, tmp_path / "whole.safetensors")
    again = build(weights=str(tmp_path / "whole.safetensors"))  # of a file that fedsim wrote, all tensors are read
    assert all(torch.equal(again.backbone.state_dict()[n], v) for n, v in net.backbone.state_dict().items())


def test_norms_of_methods_and_frozen_encoders():
    count = sum(type(module).__name__ == "XANorm2d" or "XAN" in type(module).__name__
                for module in build(norm=XAN()).modules())  # fmt: skip
    assert count > 10
    frozen = build(train="backbone.decoder.*+head").frozen
    assert "backbone.encoder.conv1.weight" in frozen
    assert not [name for name in frozen if "decoder" in name]


def test_it_is_for_data_with_masks():
    with pytest.raises(UserError, match="for data sets with masks"):
        build_model(ModelSettings(backbone="unet-resnet18"), 2, 3, 48)
