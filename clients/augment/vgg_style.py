"""VGG-19 up to relu4_1 and its mirrored decoder: the learned space of AdaIN style transfer, from local weight files.

The files are those of Huang and Belongie's AdaIN in PyTorch (naoto0804/pytorch-AdaIN): the normalized VGG-19, whole or
cut after relu4_1, and the decoder, as .pth or .safetensors with the keys `<position in the sequence>.weight`.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clients.augment.style import Bands, Space
from fedsim.common.errors import UserError
from fedsim.models.weights import read_weight_file

POOL, UP = "pool", "up"
ENCODER = (64, 64, POOL, 128, 128, POOL, 256, 256, 256, 256, POOL, 512)
DECODER = (256, UP, 256, 256, 256, 128, UP, 128, 64, UP, 64, 3)
SMALLEST = 9  # pixels: relu4_1 of smaller images has a side of 1, which the reflection padding cannot extend


def _convolutions(inputs: int, plan: tuple[int | str, ...]) -> list[nn.Module]:
    """3x3 convolutions with reflection padding and ReLU, 2x2 pools (ceil mode) and nearest upsampling."""
    layers: list[nn.Module] = []
    for item in plan:
        if item == POOL:
            layers.append(nn.MaxPool2d(2, 2, ceil_mode=True))
        elif item == UP:
            layers.append(nn.Upsample(scale_factor=2, mode="nearest"))
        else:
            layers += [nn.ReflectionPad2d(1), nn.Conv2d(inputs, int(item), 3), nn.ReLU()]
            inputs = int(item)
    return layers


def encoder() -> nn.Sequential:
    """Images [B, 3, H, W] in [0, 1] to relu4_1 [B, 512, ceil(H/8), ceil(W/8)], after a 1x1 colour transform."""
    return nn.Sequential(nn.Conv2d(3, 3, 1), *_convolutions(3, ENCODER))


def decoder() -> nn.Sequential:
    """relu4_1 to images of 8 times its size; there is no ReLU after the last convolution."""
    return nn.Sequential(*_convolutions(512, DECODER)[:-1])


class Vgg(Space):
    """Phi = VGG-19 up to relu4_1, Psi = its decoder, C_s = 512; frozen, in evaluation mode, without gradients."""

    gain = None
    slow = True

    def __init__(self, phi: nn.Sequential, psi: nn.Module) -> None:
        self.phi, self.psi = phi, psi

    @torch.no_grad()
    def encode(self, images: Tensor) -> Bands:
        """One feature map [B, 512, h, w]."""
        return [self.phi(images)]

    @torch.no_grad()
    def decode(self, bands: Bands, images: Tensor) -> Tensor:
        """Images in the size of `images`. The decoder's own output has the next multiple of 8 as its size."""
        decoded = self.psi(bands[0])
        if decoded.shape[-2:] == images.shape[-2:]:
            return decoded
        return F.interpolate(decoded, images.shape[-2:], mode="bilinear", align_corners=False, antialias=True)


@functools.lru_cache(maxsize=4)
def load_vgg(encoder_weights: str, decoder_weights: str, device: torch.device, part: str) -> Vgg:
    """The space of two weight files, read once per process. Raises UserError when one is missing or does not fit, with
    the settings of the part (`method.cross_client_style`)."""
    for name, file in (("encoder_weights", encoder_weights), ("decoder_weights", decoder_weights)):
        if not file:
            raise UserError(
                f"{part}.{name} is not set: encoder 'vgg' needs the files of the normalized VGG-19 and "
                "the AdaIN decoder (naoto0804/pytorch-AdaIN); 'pixel' and 'haar' need none"
            )
    phi = _fill(encoder(), encoder_weights, f"{part}.encoder_weights")
    psi = _fill(decoder(), decoder_weights, f"{part}.decoder_weights")
    return Vgg(phi.to(device), psi.to(device))


def _fill(net: nn.Sequential, file: str, setting: str) -> nn.Sequential:
    """The network with the file's tensors; the layers of a whole VGG-19 after relu4_1 are left out."""
    state, expected = read_weight_file(file, setting), net.state_dict()
    for key, value in expected.items():
        if key not in state:
            raise UserError(f"{setting}: {file!r} has no tensor {key!r}; expected {', '.join(list(expected)[:3])}, ...")
        if state[key].shape != value.shape:
            raise UserError(f"{setting}: {file!r}: {key!r} has shape {list(state[key].shape)}, not {list(value.shape)}")
    net.load_state_dict({key: state[key] for key in expected})
    return net.eval().requires_grad_(False)
