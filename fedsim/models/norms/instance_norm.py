"""Instance norm that also accepts maps of a single pixel."""

from torch import Tensor, nn


class InstanceNorm2d(nn.InstanceNorm2d):
    """Affine instance norm without running statistics: `gamma (x - mu_ic) / sqrt(var_ic + eps) + beta`.

    The variance is biased, over the H*W positions of each sample and channel. Train and eval mode are equal. A map of
    one pixel (small images in deep stages) normalizes to 0, so that the output is beta; PyTorch raises an error there.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__(channels, eps=eps, affine=True, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> the same shape."""
        if x.shape[2] * x.shape[3] == 1:
            return x * 0 + self.bias.to(x.dtype)[:, None, None]
        return super().forward(x)
