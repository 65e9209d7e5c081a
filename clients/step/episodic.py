"""Episodic learning in frequency space: a step on the batch, then the loss on it with amplitudes of other clients."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.func import functional_call

from clients.augment import frequency
from clients.compiled import FeaturesAndLogits
from clients.parts import Batch, LocalRound, LossFunction, Step, StepFunction
from clients.step.supervised import SupervisedStep
from clients.tools.losses import total
from fedsim.common.seeding import torch_generator
from fedsim.common.tasks import ANY_TASK
from fedsim.models.weights import StateDict
from fedsim.parts.facts import Fact
from fedsim.settings.effect import Above, Only, Trait
from fedsim.settings.tuned import DECADE, Tuned

RING = 5  # the number of dilations that make the background ring


@dataclass(frozen=True)
class EpisodicStep(Step):
    """min_theta  L_in(theta) + L_out(theta^), where theta^ = theta - beta clamp(grad L_in(theta), -c, c).

    L_in is the loss of the objective on the batch, by default cross-entropy or the soft Dice loss of masks, plus the
    terms of the recipe. L_out is the mean of the task's loss over m_test versions x' of the batch with low-frequency
    amplitudes of other clients (see `clients.augment.frequency`). lambda ~ U[0, 1] for each image and client. With
    masks, gamma L_bd(x, x'; theta, theta^) is added, the contrast of boundary and background embeddings
    (`boundary_loss`). The amplitudes in the window M are (1 - lambda) A + lambda A_f. The paper prints (1 -
    lambda) A (1 - M) + lambda A_f M, which changes the image even with lambda = 0.

    In first order, grad = grad L_in(theta) + grad L_out(theta^). In second order, the latter is multiplied by I - beta
    H_in on the coordinates that were not clipped. Batch-norm statistics are updated by the inner pass alone.

    Source: ELCFS / FedDG (Liu et al., CVPR 2021). Its form for classification has no boundary term. Embeddings are the
    features before the head, which are the last activations of the U-Net, without a projection head. Raw pixels in [0,
    1] are transformed, and x' gets the same augmentation as x. The released code differs: its mask is the zero
    frequency alone (`L_w=0`), and its lambda is fixed at 1 (`lam=(1, 1)`). Without amplitudes of other clients x' = x.
    `m_test = 0` gives FedAvg.
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    assumes = (Fact.IMAGES, Fact.HARD_LABELS)
    breaks = (Fact.UPDATE,)

    L_w: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Half-width of the window as a share of the shorter side: b = floor(L_w min(H, W)). With 0.01, images of less than
    100 pixels exchange the zero frequency alone, so that only the brightness changes. 0.05 at 64 pixels gives b = 3."""
    beta: Annotated[float, Field(ge=0), Tuned("log:1e-4:1e-2", DECADE)] = 1e-3
    """Learning rate of the inner step."""
    clip: Annotated[float, Field(gt=0)] = 100.0
    """c, the limit of each element of the inner gradient (1.0 in CCST's version for PACS)."""
    lam: tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=0, le=1)]] = (0.0, 1.0)
    """Range of lambda; equal ends fix it."""
    rho: Annotated[float, Field(gt=0, le=1)] = 0.125
    """Share of a client's training images whose amplitudes go into the bank."""
    m_test: Annotated[int, Field(ge=0)] | Literal["all"] = 1
    """Number of versions of each image, with amplitudes of drawn other clients (1 in the code), or one version with
    each other client (the paper)."""
    second_order: bool = False
    """Whether to differentiate through the inner step."""
    gamma: Annotated[float, Field(ge=0), Only(Trait.MASKS)] = 0.1
    """Weight of the boundary term, where there are masks; 0 leaves it out."""
    tau: Annotated[float, Field(gt=0), Only(Trait.MASKS, gamma=Above(0))] = 0.05
    """Its temperature."""
    ring: Annotated[int, Field(ge=1), Only(Trait.MASKS, gamma=Above(0))] = 5
    """Width in pixels of the background ring around a structure; 5 is the value for images of 384 pixels."""
    denominator: Annotated[Literal["all", "negatives"], Only(Trait.MASKS, gamma=Above(0))] = "all"
    """Denominator of the contrast: the positive pair and the negatives (the code), or the negatives alone (as the paper
    prints it)."""
    spectrum: Literal["window", "full"] = "window"
    """What is sent: the window that is used, or the whole amplitude spectrum, which is for comparison and discloses
    much more."""

    bank: ClassVar[str] = "amplitude"
    requires: ClassVar[dict[str, str]] = {"banks": "amplitude_bank"}

    @property
    def tag(self) -> str:
        """Results show it when it is not the default algorithm."""
        variants = {"second order": self.second_order, "without boundary": not self.gamma}
        return ", ".join(word for word, holds in variants.items() if holds)

    @property
    def discloses(self) -> str:
        """What the published amplitudes show."""
        share = f"once, to all clients, for a share {self.rho:g} of the images, one by one: "
        if self.spectrum == "full":
            return share + "the whole amplitude spectrum (its autocorrelation; partial reconstruction may be possible)"
        return share + f"amplitudes of the lowest frequencies (L_w = {self.L_w:g}: coarse brightness and contrast)"

    def collect(self, round: LocalRound) -> dict[str, np.ndarray]:
        """Amplitudes of ceil(rho n) training images: windows [J, C, 2b+1, b+1], or spectra [J, C, H, W/2+1]."""
        count = max(int(np.ceil(np.round(self.rho * round.data.examples, 9))), 1)
        generator = torch_generator(round.seed, "amplitude collection", round.client)
        chosen = torch.randperm(round.data.examples, generator=generator)[:count].numpy()
        height, width = round.data.images.shape[-2:]
        b = frequency.half_width(self.L_w, height, width) if self.spectrum == "window" else None
        parts = [frequency.amplitude(round.data.raw(chosen[start : start + 256]), b) for start in range(0, count, 256)]
        return {"amplitude": torch.cat(parts).cpu().numpy()}

    def begin(self, round: LocalRound) -> StepFunction:
        """The episodic step, or a supervised step when m_test is 0."""
        if self.m_test == 0:
            return SupervisedStep().begin(round)
        outer = self._outer_loss(round)
        episode = self._second_order if self.second_order else self._first_order

        def step(batch: Batch) -> Tensor:
            seen = replace(batch)
            return episode(round, lambda: round.loss_of(seen), lambda stepped: outer(batch, seen.features, stepped))

        return step

    def _outer_loss(self, round: LocalRound) -> Callable[[Batch, Tensor, StateDict], Tensor]:
        """L_out(theta^; batch), with the embeddings of the inner pass; L_in is `round.loss_of`."""
        network, versions, contrasts = FeaturesAndLogits(round.net), self.transfer(round), self._contrasts(round)

        def outer(batch: Batch, embeddings: Tensor, stepped: StateDict) -> Tensor:
            buffers = {name: value.clone() for name, value in round.net.named_buffers()}
            tensors = {f"net.{name}": value for name, value in {**stepped, **buffers}.items()}
            losses = []
            for images in versions(batch.raw):
                with round.autocast():
                    features, logits = functional_call(network, tensors, (batch.prepare(images),))
                loss = round.task.loss(logits, batch.labels)
                if contrasts:
                    only = self.denominator == "negatives"
                    contrast = boundary_loss(embeddings, features, batch.labels, self.tau, self.ring, only)
                    loss = loss + self.gamma * contrast
                losses.append(loss)
            return total(losses) / len(losses)

        return outer

    def _contrasts(self, round: LocalRound) -> bool:
        """Whether L_out has the boundary term: this needs feature maps, and masks with boundaries on these maps."""
        return self.gamma > 0 and round.task.maps

    def _first_order(self, round: LocalRound, inner: LossFunction, outer: Callable[[StateDict], Tensor]) -> Tensor:
        """Sets p.grad = grad L_in(theta) + grad L_out(theta^), where the inner gradient is a constant.

        L_bd adds its gradient at theta, which it has through the embeddings of x.
        """
        named, contrasts = round.parameters(), self._contrasts(round)
        loss = inner()
        round.backward(loss, keep_graph=contrasts)
        used = {name: parameter for name, parameter in named.items() if parameter.grad is not None}
        gradients = [grad for parameter in used.values() if (grad := parameter.grad) is not None]
        stepped = dict(zip(used, inner_step(list(used.values()), gradients, self.beta, self.clip)))
        stepped = {name: value.requires_grad_() for name, value in stepped.items()}
        meta_loss = outer(stepped)
        at = [*stepped.values(), *(used.values() if contrasts else ())]
        meta = torch.autograd.grad(meta_loss, at, allow_unused=True)
        for some in (meta[: len(gradients)], meta[len(gradients) :]):
            pairs = [(mine, other) for mine, other in zip(gradients, some) if other is not None]
            if pairs:
                torch._foreach_add_([mine for mine, _ in pairs], [other for _, other in pairs])
        round.take_step()
        return (loss + meta_loss).detach()

    def _second_order(self, round: LocalRound, inner: LossFunction, outer: Callable[[StateDict], Tensor]) -> Tensor:
        """Sets the gradient of the sum, through theta^."""
        named = round.parameters()
        loss = inner()
        gradients = torch.autograd.grad(loss, list(named.values()), create_graph=True, allow_unused=True)
        used = {name: gradient for name, gradient in zip(named, gradients) if gradient is not None}
        c = self.clip
        stepped = {name: named[name] - self.beta * gradient.clamp(-c, c) for name, gradient in used.items()}
        return round.apply_gradients(loss + outer(stepped))

    def transfer(self, round: LocalRound) -> Callable[[Tensor], list[Tensor]]:
        """A function of raw images [B, C, H, W] to m_test versions of them with amplitudes of other clients."""
        record = round.record(self.bank, "episodic_step")
        banks = [record[client] for client in sorted(record) if client != round.client]
        if not banks:
            return lambda raw: [raw]
        height, width = round.data.images.shape[-2:]
        b = frequency.half_width(self.L_w, height, width)
        prototypes = torch.cat([torch.tensor(array) for array in banks]).to(round.device)
        windows = frequency.window_of(prototypes, b) if self.spectrum == "full" else prototypes
        sizes = torch.tensor([len(array) for array in banks])
        generator = round.generator("frequency")

        def versions(raw: Tensor) -> list[Tensor]:
            index, share = self._draw_amplitudes(len(raw), sizes, generator)
            index, share = (drawn.to(raw.device, non_blocking=True) for drawn in (index, share))
            pairs = zip(index.unbind(1), share.unbind(1))
            return [frequency.interpolate(raw, windows[chosen], mix, b).clamp(0, 1) for chosen, mix in pairs]

        return versions

    def _draw_amplitudes(self, n: int, sizes: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(index of an amplitude, its share) [n, m_test] for n images, each from m_test distinct clients.

        sizes: the number of amplitudes of each client; an index counts through those of all clients
        """
        count = len(sizes) if self.m_test == "all" else min(self.m_test, len(sizes))
        if self.m_test == "all":
            clients = torch.arange(count).expand(n, -1)
        else:
            clients = torch.rand(n, len(sizes), generator=generator).argsort(1)[:, :count]
        image = (torch.rand(n, count, generator=generator) * sizes[clients]).long()
        low, high = self.lam
        share = low + (high - low) * torch.rand(n, count, generator=generator)
        starts = sizes.cumsum(0) - sizes
        return starts[clients] + torch.minimum(image, sizes[clients] - 1), share


def inner_step(parameters: list[Tensor], gradients: list[Tensor], beta: float, clip: float) -> list[Tensor]:
    """theta - beta clamp(g, -c, c) as new tensors without a graph."""
    with torch.no_grad():
        limited = torch._foreach_clamp_max(torch._foreach_clamp_min(gradients, -clip), clip)
        return list(torch._foreach_add(parameters, limited, alpha=-beta))


def _grown(masks: Tensor, times: int = 1) -> Tensor:
    """Masks [B, Q, H, W] of 0 and 1, dilated `times` by a cross (4-connected); pixels outside the image count as 0."""
    for _ in range(times):
        rows = F.max_pool2d(masks, (3, 1), 1, (1, 0))
        masks = torch.maximum(rows, F.max_pool2d(masks, (1, 3), 1, (0, 1)))
    return masks


def contour_and_ring(masks: Tensor, ring: int = RING) -> tuple[Tensor, Tensor]:
    """Contour m - erode(m) and background ring dilate^5(m) - m of masks [B, Q, H, W] of 0 and 1, float.

    A mask is taken to continue outside the image, so that its contour does not follow the image's border.

    Source: ELCFS (Liu et al., CVPR 2021).
    """
    m = masks.float()
    return m - (1 - _grown(1 - m)), _grown(m, ring) - m


def region_means(embeddings: Tensor, regions: Tensor) -> tuple[Tensor, Tensor]:
    """The mean embedding of every region: h = sum region E / sum region.

    The embeddings E are [B, D, H, W] and the regions [B, Q, H, W]. Returns h [B, Q, D] and whether each region has a
    pixel [B, Q]. An empty region gives 0 and no gradient.
    """
    sums = torch.einsum("bdhw,bqhw->bqd", embeddings, regions)
    sizes = regions.sum((2, 3))
    return sums / sizes.clamp_min(1)[..., None], sizes > 0


def boundary_contrast(contour: Tensor, background: Tensor, tau: float, negatives_only: bool = False) -> Tensor:
    """NT-Xent over vectors with the labels contour and background, a scalar:

        mean over ordered same-label pairs (i, j) of
            -log[ e^{s_ij / tau} / (e^{s_ij / tau} + sum_{label q != label i} e^{s_iq / tau}) ]

    s is the cosine similarity. `negatives_only` leaves out the first summand of the denominator, as the paper prints
    it. contour is [N, D] and background [M, D]. The result is 0 when either has fewer than two vectors.

    Source: ELCFS (Liu et al., CVPR 2021).
    """
    if min(len(contour), len(background)) < 2:
        return 0.0 * (contour.sum() + background.sum())
    a, b = (F.normalize(each, dim=1) for each in (contour, background))
    across = a @ b.T / tau
    losses = [
        _same_label(a @ a.T / tau, torch.logsumexp(across, 1), negatives_only),
        _same_label(b @ b.T / tau, torch.logsumexp(across, 0), negatives_only),
    ]
    return torch.cat(losses).mean()


def _same_label(alike: Tensor, negatives: Tensor, negatives_only: bool) -> Tensor:
    """-log of the share of each ordered pair; alike [N, N] = s_ij / tau, negatives [N] = log sum_q e^{s_iq / tau}."""
    pairs = ~torch.eye(len(alike), dtype=torch.bool, device=alike.device)
    denominator = negatives[:, None].expand_as(alike)
    if not negatives_only:
        denominator = torch.logaddexp(alike, denominator)
    return (denominator - alike)[pairs]


def boundary_loss(
    embeddings: Tensor, moved: Tensor, masks: Tensor, tau: float, ring: int = RING, negatives_only: bool = False
) -> Tensor:
    """L_bd: the sum over structures of the contrast of contours and rings in an image and in its transformed version.

    embeddings [B, D, H, W] are those of the raw images (at theta), and moved [B, D, H, W] those of the transformed ones
    (at theta^). masks are [B, Q, H, W]. Vectors of empty regions are left out.
    """
    sides = []
    for region in contour_and_ring(masks, ring):
        means = [region_means(each.float(), region) for each in (embeddings, moved)]
        sides.append((torch.cat([h for h, _ in means]), torch.cat([mask for _, mask in means])))
    (contour, has_contour), (background, has_background) = sides
    terms = [
        boundary_contrast(contour[has_contour[:, q], q], background[has_background[:, q], q], tau, negatives_only)
        for q in range(masks.shape[1])
    ]
    return torch.stack(terms).sum()
