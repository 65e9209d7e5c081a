"""Styles of feature maps: those of another client for a part of a batch, extrapolated and mixed ones for all of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.models.inserts.base import Insert, channels_at
from fedsim.models.net import Net
from fedsim.parts.facts import Fact
from fedsim.settings.tuned import Tuned

EPS = 1e-6  # is added to the variance before the root, as in the released code
FEWEST = 4  # a batch with fewer samples keeps its own styles
Act = Callable[[int, Tensor], Tensor]  # (number of a stage, its output) -> what the next stage gets


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, sqrt(unbiased variance + 1e-6)) of every sample and channel: x [B, C, H, W] -> two [B, C, 1, 1].

    A map of one position has the variance 0.
    """
    correction = min(1, x.shape[2] * x.shape[3] - 1)
    variance, mean = torch.var_mean(x, dim=(2, 3), keepdim=True, correction=correction)
    return mean, torch.sqrt(variance + EPS)


def style_of(mean: Tensor, std: Tensor) -> Tensor:
    """s [4, C] of samples with the styles mean and std [n, C]: mean of the means, mean of the deviations, and the
    deviations sqrt(unbiased variance over the samples + 1e-6) of both, in float32."""
    both = torch.stack([mean, std]).float()
    variance, centre = torch.var_mean(both, dim=1, correction=min(1, both.shape[1] - 1))
    return torch.cat([centre, torch.sqrt(variance + EPS)])


def in_style(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """std (x - m)/s + mean, with x's own moments m and s without a gradient, which as std and mean change nothing.

    It is computed as x a + (mean - m a), whose products cancel where a map is nearly constant (see `moved_style`).
    """
    own_mean, own_std = moments(x.detach())
    slope = std / own_std
    return torch.addcmul(mean - own_mean * slope, x, slope)


def diverse(styles: Tensor, first: int, noise: Tensor) -> Tensor:
    """Row numbers [len(noise)] that k-means++ draws as seeds from styles [B, D]: the row `first`, then each time a row
    in proportion to its squared distance from the nearest seed.

    noise [count, B] holds Gumbel variables: the largest of log d_i + g_i is a draw in proportion to d_i, for which the
    host need not know the distances. Rows that are equal to a seed follow when no others are left.
    """
    distance = torch.cdist(styles, styles, compute_mode="donot_use_mm_for_euclid_dist").square()
    rows = torch.arange(len(styles), device=styles.device)
    seed = rows[first]
    seeds, nearest, free = [seed], distance[first], rows != seed
    least = torch.finfo(styles.dtype).tiny
    for gumbel in noise[1:]:
        score = nearest.clamp_min(least).log() + gumbel
        seed = score.masked_fill(~free, -torch.inf).argmax()
        seeds.append(seed)
        nearest, free = torch.minimum(nearest, distance.index_select(0, seed[None])[0]), free & (rows != seed)
    return torch.stack(seeds)


def centres(styles: Tensor, seeds: Tensor) -> Tensor:
    """The means [count, D] of the rows that are nearest to each seed: one iteration of Lloyd's from these seeds."""
    nearest = torch.cdist(styles, styles[seeds]).argmin(1)
    member = torch.zeros(len(seeds), len(styles), dtype=styles.dtype, device=styles.device)
    member[nearest, torch.arange(len(styles), device=styles.device)] = 1
    return member @ styles / member.sum(1, keepdim=True).clamp_min(1)


def shared_styles(
    x: Tensor, foreign: Tensor, first: int, gumbel: Tensor, normal: Tensor, official: bool = False
) -> Tensor:
    """The maps x [B, C, H, W], of which the len(gumbel) samples with the most diverse styles (`diverse`) are unchanged.
    All others have a style drawn from that of another client, foreign = (m_mu, m_sigma, d_mu, d_sigma) [4, C]:

        mu' = m_mu + e1 d_mu,   sigma' = max(m_sigma + e2 d_sigma, 0),   normal = (e1, e2) [2, B, C] ~ N(0, 1)

    official: as in the released code, the first len(gumbel) samples of the batch get the styles of the centres
    (`centres`) in the order of their seeds. All later ones are drawn
    """
    mean, std = (each.flatten(1) for each in moments(x.detach()))
    styles = torch.cat([mean, std], dim=1).float()
    seeds = diverse(styles, first, gumbel)
    drawn = torch.cat([foreign[0] + normal[0] * foreign[2], (foreign[1] + normal[1] * foreign[3]).clamp_min(0)], dim=1)
    if official:
        chosen = torch.cat([centres(styles, seeds), drawn[len(seeds) :]])
    else:
        seeded = torch.zeros(len(x), 1, dtype=torch.bool, device=x.device).index_fill(0, seeds, True)
        chosen = torch.where(seeded, styles, drawn)
    new_mean, new_std = chosen.to(x.dtype)[:, :, None, None].chunk(2, dim=1)
    return in_style(x, new_mean, new_std)


def explored_styles(mean: Tensor, std: Tensor, picked: Tensor, alpha: float, clamp: bool) -> tuple[Tensor, Tensor]:
    """(M, Sigma) of a batch and of the samples `picked` [S] of it, pushed away from the batch's mean style:

        M = [mu; mu_A + alpha (mu_A - mean mu)],   Sigma = [sigma; max(sigma_A + alpha (sigma_A - mean sigma), 0)]

    mean, std: mu and sigma, [B, C, 1, 1] each; `clamp = False` keeps negative values of Sigma
    """
    drawn = [
        statistic[picked] + alpha * (statistic[picked] - statistic.mean(dim=0, keepdim=True))
        for statistic in (mean, std)
    ]
    return torch.cat([mean, drawn[0]]), torch.cat([std, drawn[1].clamp_min(0) if clamp else drawn[1]])


def mixed(content: Tensor, mean: Tensor, std: Tensor, lam: Tensor, permutation: Tensor) -> Tensor:
    """content (lam std + (1 - lam) std_pi) + lam mean + (1 - lam) mean_pi, with lam [N, 1, 1, 1]."""
    slope = torch.lerp(std[permutation], std, lam)
    return torch.addcmul(torch.lerp(mean[permutation], mean, lam), content, slope)


class StyleLayers(nn.Module):
    """net.styles: what acts after stage 1 and after every explored stage, and only inside `acting`.

    part: the insert with its settings. channels: C_1, the number of channels of stage 1
    """

    def __init__(self, part: "StyleExploration", stages: list[int], channels: int) -> None:
        super().__init__()
        self.part, self.stages, self.channels = part, stages, channels
        self.explored = [stage for stage in stages if stage in part.stages]
        self.act: Act | None = None

    def after(self, stage: int, module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        """A forward hook of a stage. It is a bound method, so that a copy of the network calls its own copy of this."""
        return output if self.act is None else self.act(stage, output)

    @contextmanager
    def acting(self, act: Act) -> Iterator[None]:
        """Inside the block every pass of the network goes through `act` after each of the stages."""
        self.act = act
        try:
            yield
        finally:
            self.act = None


@dataclass(frozen=True)
class StyleExploration(Insert):
    """Style exploration after stages of the backbone, each with probability p in a pass, in the passes of a step that
    says so (`enlarged_batch`); nowhere else, so that all other passes are those of the plain network.

    At the first stage that acts, S samples are added to the batch, so that small classes catch up with large ones.
    Their styles are pushed away from the mean style of the batch, by alpha. At every stage that acts, contents keep
    their place and styles are mixed within the enlarged batch, lam_i ~ Beta(beta, beta), pi a random permutation:

        out_i = c_i (lam_i Sigma_i + (1 - lam_i) Sigma_pi(i)) + lam_i M_i + (1 - lam_i) M_pi(i),   c = (x - mu)/sigma

    mu and sigma are the mean and sqrt(unbiased variance + 1e-6) of each sample and channel. M and Sigma carry no
    gradient; the contents c do, through mu and sigma too. Maps of one position have no style and are left as they are.
    A class with one sample in the batch first gets a second one, from the step's class-balanced batch.

    Source: StableFDG (Park et al., NeurIPS 2023), style exploration. The released code keeps negative deviations, which
    turns the contrast of an image round. In the sharing of `enlarged_batch` it replaces the styles of the first half of
    the batch by cluster centres, where the paper keeps the diverse samples as they are. `official` does both. `p = 0`
    explores nothing.

    p: the probability per stage and pass
    alpha: how far styles are pushed; 0 adds samples with styles of their own
    additions: S, the number of added samples; 0: as many as the batch has, 32 in the paper
    beta: the parameter of the Beta distribution
    stages: stages that a backbone lacks are left out
    official: cluster centres in the sharing, and no lower bound of the deviations here, as in the released code
    """

    assumes = (Fact.IMAGES,)
    side_by_side: ClassVar[bool] = False
    belongs_to: ClassVar[str] = "enlarged_batch"  # the step that opens the layers
    order: ClassVar[int] = 0  # before what reads the last map: on digits-cnn-bn stage 1 is the last

    p: Annotated[float, Field(ge=0, le=1)] = 0.5
    alpha: Annotated[float, Field(ge=0), Tuned("uniform:1:5", "ours: around the paper's 3")] = 3.0
    additions: Annotated[int, Field(ge=0)] = 0
    beta: Annotated[float, Field(gt=0)] = 0.1
    stages: tuple[int, ...] = (1, 2, 3)
    official: bool = False

    @property
    def tag(self) -> str:
        """Results show the official variant."""
        return "official" if self.official else ""

    def apply(self, net: Net) -> None:
        """Adds hooks, without a change of state names. Raises UserError for a backbone without stage 1."""
        if 1 not in net.stages:
            raise UserError("insert StyleExploration: the backbone has no stage 1; use a ResNet, densenet121 or "
                            "digits-cnn-bn")  # fmt: skip
        stages = sorted({1, *self.stages} & net.stages.keys())
        net.styles = styles = StyleLayers(self, stages, channels_at(net, net.stages[1][-1]))
        for stage in stages:
            net.get_submodule(net.stages[stage][-1]).register_forward_hook(partial(styles.after, stage))
