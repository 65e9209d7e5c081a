"""L2D: an augmenter learns to diversify the styles of images, and the network learns to agree on them."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from clients.augment.style_augmenter import StyleAugmenter
from clients.optimizers import eager
from clients.parts import Batch, LocalRound, Objective, StepFunction
from clients.tools.losses import kernel_sum, squared_distances, supervised_contrast
from clients.tools.networks import descend, statistics_frozen
from fedsim.models.inserts.base import Insert
from fedsim.models.inserts.stochastic_embedding import moments_of
from fedsim.parts.facts import Fact
from fedsim.parts.part import RecipeParts, part_name
from fedsim.settings.tuned import DECADE, Tuned

ENTRY = "augmenter"  # the store's entry for the client's augmenter
BANDWIDTHS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)  # exp(-d / b), b = mean distance / 4 and doubled four times, as 2 a s
SHARE = 0.6  # share of the augmented image in the view; the rest is the image itself


@dataclass(frozen=True)
class LearnToDiversify(Objective):
    """Every batch is used twice, with the view x+ = .6 normalize(sigmoid(G(x))) + .4 x of the augmenter G. Stage 1
    trains the network, with newly drawn convolutions of G:

        L = CE(h(e+), y; h(e), y) + alpha1 SupCon(e+, e; temperature) + alpha2 mean((mu - e+)^2 / var + logvar) + terms

    Stage 2 trains G alone, with fixed convolutions and the network unchanged:

        L_G = MMD_class(e+, e) + beta CLUB
        CLUB = 1/2 mean_i( sum (mu_i - e+_p(i))^2 / var_i - sum (mu_i - e+_i)^2 / var_i )

    Source: L2D (Wang et al., ICCV 2021). e, mu and logvar come from the insert `stochastic_embedding` for x, and e+
    from that for x+; p is a random permutation. MMD is the mean over the classes in the batch; the released code
    divides by zero for a class that is missing. Both views go through the network as one batch; the pass of stage 2
    does not change running statistics. G is the client's own: it is stored between rounds and never sent (our choice).
    Terms see x. No value of the settings gives FedAvg.

    alpha1, alpha2, beta: the weights of SupCon, of the Gaussian likelihood of e+, and of CLUB
    temperature: the temperature of SupCon
    augmenter_lr: the learning rate of plain SGD on G, 0.005 in the run script
    """

    alpha1: Annotated[float, Field(ge=0), Tuned("log:0.1:10", DECADE)] = 1.0
    alpha2: Annotated[float, Field(ge=0), Tuned("log:0.1:10", DECADE)] = 1.0
    beta: Annotated[float, Field(ge=0), Tuned("log:0.01:1", DECADE)] = 0.1
    temperature: Annotated[float, Field(gt=0)] = 0.07
    augmenter_lr: Annotated[float, Field(gt=0)] = 0.005
    assumes = (Fact.OBJECTIVE, Fact.IMAGES)
    requires: ClassVar[dict[str, str]] = {"inserts": "stochastic_embedding"}
    compiles: ClassVar[bool] = False
    columns: ClassVar[tuple[str, ...]] = ("augmenter_loss",)

    def refuses(self, recipe: RecipeParts) -> str:
        """The features' mean and spread come from the embedding, so that no other insert may make the features."""
        makers = [part_name(insert) for insert in recipe.of(Insert) if insert.makes_features]
        if makers != ["stochastic_embedding"]:
            names = " and ".join(makers)
            return f"learn_to_diversify needs the features of stochastic_embedding, but they are made by {names}"
        return super().refuses(recipe)

    def begin(self, round: LocalRound) -> StepFunction:
        """The loss of stage 1; stage 2 follows each step."""
        augmenter = round.scratch[ENTRY] = augmenter_of(round)
        optimizer = eager(torch.optim.SGD)(augmenter.parameters(), self.augmenter_lr)

        def train_augmenter(batch: Batch) -> None:
            round.tally("augmenter_loss", descend(optimizer, self._diversity(round, batch, augmenter)))

        round.after_step.append(train_augmenter)
        return lambda batch: self._agreement(round, batch, augmenter)

    def end(self, round: LocalRound) -> None:
        """Stores the augmenter."""
        round.store.put(ENTRY, round.scratch[ENTRY].state_dict())

    def _agreement(self, round: LocalRound, batch: Batch, augmenter: StyleAugmenter) -> Tensor:
        """L of stage 1."""
        with torch.no_grad():
            styled = batch.once(self, lambda: view(augmenter, batch, fresh=True))
        count, labels = len(batch.labels), batch.labels.repeat(2)
        with round.autocast():
            embedded = round.net.features(torch.cat([styled, batch.images]))
            logits = round.net.head(embedded).float()
        mean, logvar = (values[count:] for values in moments_of(embedded, "learn_to_diversify"))
        batch.features, batch.logits = embedded[count:], logits[count:]
        batch.loss = round.task.loss(logits, labels)
        contrast = supervised_contrast(F.normalize(embedded.float()), labels, self.temperature)
        likelihood = ((mean - embedded[:count]).square() / logvar.exp() + logvar).mean()
        return batch.loss + self.alpha1 * contrast + self.alpha2 * likelihood

    def _diversity(self, round: LocalRound, batch: Batch, augmenter: StyleAugmenter) -> Tensor:
        """L_G of stage 2, with a graph to the augmenter alone."""
        count, styled = len(batch.labels), view(augmenter, batch, fresh=False)
        with round.autocast(), statistics_frozen(round.net):
            embedded = round.net.features(torch.cat([styled, batch.images]))
        mean, logvar = (values[count:] for values in moments_of(embedded, "learn_to_diversify"))
        other = torch.randperm(count).to(mean.device, non_blocking=True)
        discrepancy = class_mmd(embedded[:count], embedded[count:], batch.labels, round.classes)
        return discrepancy + self.beta * club(mean, logvar, embedded[:count], other)


def view(augmenter: StyleAugmenter, batch: Batch, fresh: bool) -> Tensor:
    """x+ of the normalized images."""
    styled = batch.normalize(augmenter(batch.images, fresh).sigmoid())
    return SHARE * styled + (1 - SHARE) * batch.images


def augmenter_of(round: LocalRound) -> StyleAugmenter:
    """The client's augmenter as it was stored, or a new one from the seed."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(round.generator(ENTRY).initial_seed())
        augmenter = StyleAugmenter(*round.data.images.shape[1:])
    if (stored := round.store.get(ENTRY)) is not None:
        augmenter.load_state_dict(stored)
    return augmenter.to(round.device)


def class_mmd(a: Tensor, b: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Mean over the classes in the batch of mean k(a, a) + mean k(b, b) - 2 mean k(a, b) within the class.

    a and b [B, D] have the same labels [B]. k is a sum of five Gaussian kernels with bandwidths from the mean squared
    distance s of the pairs of the class, which has no gradient: exp(-d / (s/4)), ..., exp(-d / 4s).
    """
    n = len(labels)
    distance = squared_distances(torch.cat([a, b]).float())
    one_hot = F.one_hot(labels.repeat(2), classes).to(distance)
    members = one_hot[:n].sum(0)
    same = one_hot @ one_hot.T
    pairs = (2 * members * (2 * members - 1)).clamp_min(1)
    spread = (one_hot * (distance.detach() @ one_hot)).sum(0) / pairs  # s of every class
    kernel = kernel_sum(distance, (one_hot @ spread)[:, None], BANDWIDTHS)
    sign = torch.ones(2 * n, device=a.device)
    sign[n:] = -1
    share = one_hot @ (1 / members.clamp_min(1))
    weights = same * torch.outer(sign * share, sign * share)
    return (kernel * weights).sum() / (members > 0).sum()


def club(mean: Tensor, logvar: Tensor, e: Tensor, other: Tensor) -> Tensor:
    """1/2 mean_i( sum_d (mu_i - e_other(i))^2 / var_i - sum_d (mu_i - e_i)^2 / var_i ).

    This is an upper bound of the information that e carries about the original embedding.
    """
    precision = (-logvar).exp()
    distance = ((mean - e).square() * precision).sum(1)
    foreign = ((mean - e[other]).square() * precision).sum(1)
    return 0.5 * (foreign - distance).mean()
