"""JiGen: the network also predicts the order of the tiles of its images."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from clients.parts import Batch, LocalRound, Objective, StepFunction
from fedsim.common.errors import UserError
from fedsim.data import image_ops
from fedsim.models.layout import evaluating
from fedsim.parts.facts import Fact
from fedsim.settings.effect import Only, Trait
from fedsim.settings.tuned import Tuned

SIDE, TILES = 3, 9  # tiles in a row, and in an image
WORDS = """
704583126 546870231 138462507 387601452 623158740 850217364 475026813 261734085 510768423 460382751
607415283 254061738 847532610 174308265 321540867 285173604 801376542 078654321 730821645 436518072
832057146 865314207 651824370 842716053 678135402 153476820 421708536 128507643 617283054 056487132
"""
# Output tile t of a permutation shows tile P[t] of the image. The identity is label 0 and not in this list.
PERMUTATIONS = tuple(tuple(int(tile) for tile in word) for word in WORDS.split())


@dataclass(frozen=True)
class Jigsaw(Objective):
    """L = CE(h(f(x')), y) + alpha CE(j(f(x')), s) + terms, where x' is the image with its 3 x 3 tiles in the order s.

        s = 0 (the original order) with probability beta, else uniform over 0, 1, ..., P; the P permutations are fixed

    Source: JiGen (Carlucci et al., CVPR 2019). j is the insert `jigsaw_head`, which is aggregated like all tensors;
    predictions use the classifier on the whole image. The permutations are ours, and not the published list
    (`PERMUTATIONS`). It acts on the images after the data set's own crop, flip and jitter.
    Tiles have floor(size / 3) pixels. The remaining border is cut off, which leaves 222 of 224 pixels as in the paper.
    A network that accepts only one image size (ViT) is refused with it. `border = "keep"` leaves the border in place
    without permutation. `alpha = 0`, `beta = 1`, `grey = 0` gives FedAvg on the cut images.

    alpha, beta: 0.7 and 0.9 for ResNet-18; 0.9 and 0.7 for AlexNet
    grey: the probability that a tile is grey
    border: what becomes of the pixels next to the tiles
    """

    alpha: Annotated[float, Field(ge=0), Tuned("0.7,0.9", "the paper's values for its networks")] = 0.7
    beta: Annotated[float, Field(ge=0, le=1), Tuned("0.7,0.9", "the paper's values for its networks")] = 0.9
    grey: Annotated[float, Field(ge=0, le=1), Only(Trait.COLOURS)] = 0.1
    border: Literal["crop", "keep"] = "crop"
    assumes = (Fact.OBJECTIVE, Fact.IMAGES)
    requires: ClassVar[dict[str, str]] = {"inserts": "jigsaw_head"}
    columns: ClassVar[tuple[str, ...]] = ("jigsaw_loss",)

    def begin(self, round: LocalRound) -> StepFunction:
        """The sum of both losses."""
        round.remembered("jigsaw size", self.border, lambda: self._require_size(round))
        head, generator = round.net.jigsaw, round.generator("jigsaw")
        assert isinstance(head, nn.Linear)  # of the insert that the objective needs
        table = torch.tensor([tuple(range(TILES)), *PERMUTATIONS])[: head.out_features]

        def draw(batch: Batch) -> tuple[Tensor, Tensor]:
            orders = draw_orders(len(batch.labels), self.beta, len(table), generator)
            grey = torch.rand(len(orders), TILES, generator=generator) < self.grey
            return orders, batch.normalize(self.scrambled(batch.augmented, table[orders], grey))

        def loss_of(batch: Batch) -> Tensor:
            orders, batch.images = batch.once(self, lambda: draw(batch))
            loss = round.forward(batch)
            if self.alpha:
                with round.autocast():
                    logits = head(batch.features)
                jigsaw_loss = F.cross_entropy(logits.float(), orders.to(logits.device, non_blocking=True))
                round.tally("jigsaw_loss", jigsaw_loss)
                loss = loss + self.alpha * jigsaw_loss
            return loss

        return loss_of

    @torch.no_grad()
    def _require_size(self, round: LocalRound) -> bool:
        """Raises UserError when the network does not accept images without their border."""
        image = round.data.raw(np.arange(1))
        height, width = (size // SIDE * SIDE for size in image.shape[-2:])
        if self.border == "crop" and (height, width) != tuple(image.shape[-2:]):
            try:
                with evaluating(round.net):
                    round.net(round.data.normalize(image[..., :height, :width]))
            except (AssertionError, RuntimeError, ValueError) as error:
                raise UserError(
                    f"jigsaw cuts the images to {height} x {width} pixels, which this network does not accept "
                    f"({str(error).rstrip('.')}); set method.jigsaw.border = 'keep'"
                ) from None
        return True

    def scrambled(self, images: Tensor, permutations: Tensor, grey: Tensor) -> Tensor:
        """Images [B, C, H, W] with their tiles permuted [B, 9] and some of them grey [B, 9]."""
        height, width = (size // SIDE * SIDE for size in images.shape[-2:])
        top, left = (images.shape[-2] - height) // 2, (images.shape[-1] - width) // 2
        middle = images[..., top : top + height, left : left + width]
        tiles = shuffled(grey_tiles(cut(middle), grey), permutations)
        if self.border == "crop" or (height, width) == tuple(images.shape[-2:]):
            return joined(tiles)
        ordered = images.clone()
        ordered[..., top : top + height, left : left + width] = joined(tiles)
        return ordered


def draw_orders(count: int, beta: float, orders: int, generator: torch.Generator) -> Tensor:
    """Labels s [count] on the CPU: 0 with probability beta, else uniform over all `orders`, which include 0."""
    scrambled = torch.rand(count, generator=generator) >= beta
    return torch.where(scrambled, torch.randint(orders, (count,), generator=generator), 0)


def cut(images: Tensor) -> Tensor:
    """[B, C, 3h, 3w] -> tiles [B, 9, C, h, w], row by row."""
    count, channels, height, width = images.shape
    tiles = images.reshape(count, channels, SIDE, height // SIDE, SIDE, width // SIDE)
    return tiles.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)


def joined(tiles: Tensor) -> Tensor:
    """[B, 9, C, h, w] -> images [B, C, 3h, 3w]."""
    count, _, channels, height, width = tiles.shape
    rows = tiles.reshape(count, SIDE, SIDE, channels, height, width).permute(0, 3, 1, 4, 2, 5)
    return rows.reshape(count, channels, SIDE * height, SIDE * width)


def shuffled(tiles: Tensor, permutations: Tensor) -> Tensor:
    """Output tile t of each image is its tile P[t]."""
    index = permutations.to(tiles.device, non_blocking=True)
    return tiles[torch.arange(len(tiles), device=tiles.device)[:, None], index]


def grey_tiles(tiles: Tensor, chosen: Tensor) -> Tensor:
    """Tiles [B, 9, C, h, w] with the chosen ones [B, 9] in grey; images of one channel do not change."""
    index = chosen.flatten().nonzero()[:, 0]
    if tiles.shape[2] != 3 or not len(index):
        return tiles
    flat, index = tiles.flatten(0, 1), index.to(tiles.device)
    grey = image_ops.grey(flat[index]).expand(-1, 3, -1, -1)
    return flat.index_copy(0, index, grey).reshape(tiles.shape)
