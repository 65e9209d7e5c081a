"""Cross-client style transfer: every client also trains on its images in the styles of other clients."""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.augment import style
from clients.augment.spaces import (
    ContentVariance,
    Encoder,
    StylePart,
    chunks_of,
    image_statistics,
    space_of,
    style_record,
)
from clients.batch import Transfer
from clients.local_data import LocalData
from clients.parts import Augment, LocalRound
from fedsim.common.seeding import torch_generator
from fedsim.common.tasks import ANY_TASK
from fedsim.data.augment import to_float
from fedsim.settings.effect import Only, Size

FLAT = 1e-4  # an image whose channels all vary less has no style of its own
log = logging.getLogger(__name__)


@dataclass
class StylePlan:
    """The style of each item (copy * n + position) as an affine map. Items in `own` keep their own style."""

    copies: int
    own: Tensor
    affine: style.Affine
    kept: Tensor | None = None  # the transferred images as uint8, where the space is slow

    def of(self, index: Tensor) -> style.Affine:
        """The maps of some items."""
        centre, scale, shift = self.affine
        return centre[index], scale[index], shift[index]


@dataclass(frozen=True)
class CrossClientStyle(Augment, StylePart):
    """n_k images become L n_k: each in the styles of L distinct clients of all K; the own style is the original.

        Before round 1:  (mu_k, sigma_k) = channel statistics of Phi over all positions of all training images
                         (overall) or of single images (single); they go to the bank
        Transfer:        x' = clamp(Psi(alpha A + (1 - alpha) F), 0, 1),
                         F = Phi(x),  A = sigma_s (F - mu(F)) / sigma(F) + mu_s

    Source: CCST (Chen et al., WACV 2023). Styles are drawn once, so that every round sees the same L n_k images.
    Ordinary augmentation comes after the transfer, the validation split is never changed, and the aggregation still
    counts n_k. The released code differs: it draws one single style per mini-batch, mixes biased and unbiased variances
    (`content_variance="unbiased"`), averages clients uniformly (`method.weights="uniform"`), and separates the
    validation images after the transfer. `L = 1` with `alpha = 0` gives FedAvg, and so does a bank without styles of
    other clients.
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK

    encoder: Encoder = "pixel"
    """Phi: colour space, 3-level Haar bands, or VGG-19 up to `relu4_1` (the paper's, needs weight files)."""
    styles: Literal["overall", "single"] = "overall"
    """One style per client, or the style of one image, drawn from up to J images for each transfer."""
    J: Annotated[int, Field(ge=1), Only(styles="single")] = 64
    """The largest number of single-image styles that a client publishes."""
    L: Annotated[int, Field(ge=1), Only(Size.CLIENTS)] = 3
    """Augmentation level: the number of versions of each image; the original counts when it is drawn. The paper has
    L = K, the number of clients, which is 3 on PACS and Office-Home and 4 on Camelyon17 (configs/camelyon17.toml). 3 is
    the default for every K, because an epoch takes L times the steps; with L < K an image is not always among its own
    versions. A larger L than K is K, so that `method.cross_client_style.L=1000` is the paper's for every K."""
    alpha: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Strength of the transfer in feature space."""
    resample_each_round: bool = False
    """Whether to draw new styles in every round."""
    quantise: Annotated[bool, Only(encoder=("pixel", "haar"))] = False
    """Whether to store transferred images with 8 bits, as image files do. With vgg this is always so."""
    content_variance: ContentVariance = "population"
    """The variance in sigma(F) of the content; the variance of styles is always that of the population."""
    encoder_weights: Annotated[str, Only(encoder="vgg")] = ""
    """Local file of the normalized VGG-19."""
    decoder_weights: Annotated[str, Only(encoder="vgg")] = ""
    """Local file of the AdaIN decoder."""

    bank: ClassVar[str] = "style"
    requires: ClassVar[dict[str, str]] = {"banks": "style_bank"}

    @property
    def tag(self) -> str:
        """The space, which results show: `ccst(pixel)`."""
        return self.encoder if self.styles == "overall" else f"{self.encoder}, single"

    @property
    def discloses(self) -> str:
        """What the published styles show."""
        what = f"channel means and standard deviations of {self.encoder} features"
        if self.styles == "overall":
            return f"once, to all clients: {what} over all training images"
        return (
            f"once, to all clients: {what} of up to {self.J} single images each (membership and coarse colour and "
            "texture of an image can be inferred)"
        )

    def collect(self, round: LocalRound) -> dict[str, np.ndarray]:
        """mean and std, float32 [J, C_s]; J = 1 for the overall style."""
        means, variances = self.content(round, correction=0)
        if self.styles == "single":
            usable = (variances.amax(1) >= FLAT).nonzero()[:, 0].cpu()
            order = torch.randperm(len(usable), generator=torch_generator(round.seed, "style collection", round.client))
            chosen = usable[order[: self.J]].to(means.device)
            if len(chosen):
                return style_record(means[chosen], variances[chosen])
        mean, variance = style.pool(means, variances)
        return style_record(mean[None], variance[None])

    def copies(self, round: LocalRound) -> int:
        """L, or the number of clients with a style (this one included) when that is less."""
        return self.plan(round).copies

    def begin(self, round: LocalRound) -> Transfer:
        """A function that transfers a batch as planned."""
        plan, space = self.plan(round), space_of(self, round.device)
        if plan.copies == 1 and bool(plan.own.all()):
            return lambda images, items: images

        def transfer(images: Tensor, items: np.ndarray) -> Tensor:
            index = torch.from_numpy(items).to(images.device, non_blocking=True)
            if plan.kept is not None:
                return to_float(plan.kept[index.to(plan.kept.device)].to(images.device))
            moved = style.apply_affine(space, images, plan.of(index))
            moved = (moved * 255).round_().div_(255) if self.quantise else moved
            return torch.where(plan.own[index][:, None, None, None], images, moved)

        return transfer

    def content(self, round: LocalRound, correction: int) -> style.Statistics:
        """Means and variances [n, C_s] of the training images, computed once per process."""

        def measure() -> style.Statistics:
            return image_statistics(round, space_of(self, round.device), round.data.training_positions(), correction)

        return round.remembered("style content", (self.encoder, correction), measure)

    def plan(self, round: LocalRound) -> StylePlan:
        """The drawn styles; they are equal in all rounds unless `resample_each_round` is set."""
        record = round.record(self.bank, "cross_client_style")
        digest = hashlib.blake2b(b"".join(name.encode() + array.tobytes() for name, array in record.items())).digest()
        key = (self, digest, round.round if self.resample_each_round else 0)

        def draw() -> StylePlan:
            plan, space = self._draw(round, record, key[2]), space_of(self, round.device)
            if space.slow and not plan.own.all():
                plan.kept = _materialise(space, round.data, plan)
            return plan

        return round.remembered("style plan", key, draw)

    def _draw(self, round: LocalRound, record: Mapping[str, np.ndarray], number: int) -> StylePlan:
        """L distinct clients per image, uniformly without replacement; then one of the styles of the chosen client."""
        n, device = round.data.examples, round.device
        means, variances = self.content(round, correction=int(self.content_variance == "unbiased"))
        pool = styles_of_clients(round.client, record, means.shape[1])
        if len(pool) == 1:
            log.warning(
                "client %s: the bank has no styles of other clients; it trains on its original images", round.client
            )
        copies = min(self.L, len(pool)) if len(pool) > 1 else 1
        generator = torch_generator(round.seed, "style", round.client, number)
        owner, index = draw_styles(n, copies, torch.tensor([len(mean) for mean, _ in pool]), generator)
        mean, std = (torch.from_numpy(np.concatenate(arrays))[index].to(device) for arrays in zip(*pool))
        content = (means.repeat(copies, 1), variances.repeat(copies, 1))
        space = space_of(self, device)
        affine = style.adain_affine(content, (mean, std), self.alpha, space.gain)
        same = self.alpha == 0 and not space.slow  # the inverse is exact: with strength 0 every item is its original
        return StylePlan(copies, (owner == 0).to(device) | same, affine)


def styles_of_clients(
    client: str, record: Mapping[str, np.ndarray], channels: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(means, deviations) [S, C] of each client's styles; the first is this client's, which is never used."""
    others = sorted({name.rpartition(":")[0] for name in record} - {client})
    unused = np.zeros((1, channels), np.float32), np.ones((1, channels), np.float32)
    return [unused, *((record[f"{other}:mean"], record[f"{other}:std"]) for other in others)]


def draw_styles(n: int, copies: int, sizes: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(owner, index) [copies * n]: distinct clients for each of n images, and one of the styles of each of them.

    sizes: the number of styles of each client; index: of a style among those of all clients
    """
    owner = torch.rand(n, len(sizes), generator=generator).argsort(1)[:, :copies].T.reshape(-1)
    which = (torch.rand(n * copies, generator=generator) * sizes[owner]).long().clamp_(max=sizes[owner] - 1)
    return owner, (sizes.cumsum(0) - sizes)[owner] + which


def _materialise(space: style.Space, data: LocalData, plan: StylePlan) -> Tensor:
    """All items as uint8 [copies * n, C, H, W] on the device of the client's images; own items are the originals."""
    images = data.images[: data.examples]
    transferred = images.repeat(plan.copies, 1, 1, 1)
    for items in chunks_of((~plan.own).nonzero()[:, 0].cpu().numpy(), space):
        index = torch.from_numpy(items).to(plan.own.device, non_blocking=True)
        moved = style.apply_affine(space, data.raw(items % data.examples), plan.of(index))
        transferred[index.to(transferred.device)] = (moved * 255).round_().to(torch.uint8).to(transferred.device)
    return transferred
