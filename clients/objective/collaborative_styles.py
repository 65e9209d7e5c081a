"""MCSAD's training: styles of feature maps move to where the classifiers of all clients fail."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from clients.parts import Batch, LocalRound, Objective, StepFunction
from clients.tools.cut_network import CutNetwork
from clients.tools.heads import heads_of
from clients.tools.losses import supervised_contrast, total
from fedsim.common.errors import UserError
from fedsim.models.net import Net
from fedsim.parts.facts import Fact
from fedsim.settings.effect import Above, Only
from fedsim.settings.tuned import DECADE, Tuned

EPS = 1e-5  # is added to the variance before the root


def ascended(level: Tensor, loss_of: Callable[[Tensor], Tensor], lr: float) -> Tensor:
    """(x - mu)/sigma sigma' + mu' of maps x [B, C, H, W]: one ascent step of their styles on a loss.

    mu' = mu + lr dL/dmu and sigma' = sigma + lr dL/dsigma at x itself, with L = loss_of(x). mu, sigma = sqrt(unbiased
    variance + 1e-5), mu' and sigma' are constants of each image and channel, so that gradients reach x alone.
    """
    correction = min(1, level.shape[2] * level.shape[3] - 1)
    variance, mean = torch.var_mean(level.detach(), dim=(2, 3), keepdim=True, correction=correction)
    std = torch.sqrt(variance + EPS)
    normal = (level - mean) / std
    with torch.enable_grad():
        leaves = [mean.clone().requires_grad_(), std.clone().requires_grad_()]
        gradients = torch.autograd.grad(loss_of(normal.detach() * leaves[1] + leaves[0]), leaves)
    return normal * (std + lr * gradients[1]) + mean + lr * gradients[0]


def agreement(logits: Tensor, ensemble: Tensor, tau: float) -> Tensor:
    """(1/B) sum_i KL(softmax(e_i / tau) || softmax(l_i / tau)), a scalar; the ensemble's logits e are constants."""
    target = (ensemble.detach() / tau).log_softmax(1)
    return F.kl_div((logits / tau).log_softmax(1), target, reduction="batchmean", log_target=True)


def cut_paths(net: Net) -> Sequence[str]:
    """The paths of the ends of stages 1 and 2, or of the first two levels where there are no two stages.

    Raises UserError where there are neither.
    """
    paths = [net.stages[stage][-1] for stage in (1, 2) if stage in net.stages]
    paths = paths if len(paths) > 1 else list(net.levels[:2])
    if len(paths) < 2:
        raise UserError("collaborative_styles changes feature maps at two places, which this backbone does not have; "
                        "use a ResNet, densenet121 or digits-cnn-bn")  # fmt: skip
    return paths


@dataclass(frozen=True)
class CollaborativeStyles(Objective):
    """L = CE(h(f_b), y) + CE(h(f_a), y) + con SC(f_b, f_a) + cdrm [KL(e || p_b) + KL(e || p_a)] + terms.

    f_a are features of maps whose styles went up the loss of all clients' classifiers twice (`ascended`), after the
    first and after the second block. That loss is mean_k CE(h_k(f), y) of their features f. f_b are features of maps
    without that. SC is the supervised contrast of the 2 B normalized features, e the mean of the logits h_k(f_b), a
    constant, and p the predictions.

    Source: MCSAD (Wei et al., IJCAI 2025). h_k are the classifiers that the clients trained in the last round, the own
    one included, from the bank `heads`; in round 1 all are the received one. Of the paper's text we had the abstract,
    which learns between the original and the augmented data: `paper` is our reading of it. There f_b are the features
    of the batch itself, and gradients reach all layers; the places, the two ascents and sigma are the code's. Of that
    (weiyikang/FedAdvSty af18a86) only the training loop is released. Its commands have con = cdrm = 0 and lr_adv = 2,
    SGD with a cosine from 1e-3 to 1e-4, batches of 16 and 40 rounds. sigma' may be negative. Every pass moves running
    statistics. The step costs four passes of the later blocks. Models are averaged uniformly.

    lr_adv: the length of the ascent, in units of the gradient; 0 gives two equal summands with `paper`
    con: the weight of the contrast
    cdrm: the weight of the agreement with the mean of all classifiers
    tau: the temperature of that agreement
    temperature: that of the contrast (0.07 in its paper)
    variant: `released` is the code: f_b has been through the first ascent too, and both ascents cut the gradient. The
    stem and the first block then get no gradient at all, so that weight decay and running statistics alone move them
    """

    assumes = (Fact.OBJECTIVE, Fact.IMAGES, Fact.HARD_LABELS)
    requires: ClassVar[dict[str, str]] = {"banks": "heads"}
    needs_levels: ClassVar[bool] = True
    compiles: ClassVar[bool] = False

    lr_adv: Annotated[float, Field(ge=0), Tuned("log:0.2:20", DECADE)] = 2.0
    con: Annotated[float, Field(ge=0)] = 0.0
    cdrm: Annotated[float, Field(ge=0)] = 0.0
    tau: Annotated[float, Field(gt=0), Only(cdrm=Above(0))] = 1.0
    temperature: Annotated[float, Field(gt=0), Only(con=Above(0))] = 0.07
    variant: Literal["paper", "released"] = "paper"
    columns: ClassVar[tuple[str, ...]] = ("augmented_loss",)

    def begin(self, round: LocalRound) -> StepFunction:
        """The loss of both branches. UserError for a backbone without two places."""
        heads = list(heads_of(round, "collaborative_styles").values()) or [round.net.head]
        first, second = (CutNetwork(round.net, path) for path in cut_paths(round.net))

        def loss(batch: Batch) -> Tensor:
            def adversary(features: Tensor) -> Tensor:
                losses = [round.task.loss(head(features), batch.labels) for head in heads]
                return total(losses) / len(losses)

            with round.autocast():
                level = first.front(batch.images)
                moved = ascended(level, lambda styled: adversary(first.tail(styled)), self.lr_adv)
                moved = moved.detach() if self.variant == "released" else moved
                middle = first.onward(moved, second)
                again = ascended(middle, lambda styled: adversary(second.tail(styled)), self.lr_adv)
                again = again.detach() if self.variant == "released" else again
                augmented = second.tail(again)
                plain = middle if self.variant == "released" else first.onward(level, second)
                batch.features = second.tail(plain)
                batch.logits, logits = round.net.head(batch.features), round.net.head(augmented)
            return self._sum(round, batch, heads, augmented, logits)

        return loss

    def _sum(
        self, round: LocalRound, batch: Batch, heads: Sequence[Callable], augmented: Tensor, logits: Tensor
    ) -> Tensor:
        """The summands of L, given the features [B, d] and the logits [B, M] of the second branch."""
        batch.loss = round.task.loss(batch.logits, batch.labels)
        second = round.task.loss(logits, batch.labels)
        round.tally("augmented_loss", second)
        result = batch.loss + second
        if self.con:
            views = torch.cat([F.normalize(each.float()) for each in (batch.features, augmented)])
            result = result + self.con * supervised_contrast(views, batch.labels.repeat(2), self.temperature)
        if self.cdrm:
            with torch.no_grad():
                ensemble = total(head(batch.features) for head in heads).float() / len(heads)
            pair = [agreement(each.float(), ensemble, self.tau) for each in (batch.logits, logits)]
            result = result + self.cdrm * total(pair)
        return result
