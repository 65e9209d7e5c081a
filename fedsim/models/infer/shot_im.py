"""SHOT-IM: the features follow the information that predictions carry, under a head that stays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.models.infer.adapted import adapting, entropy
from fedsim.models.infer.base import Batches, Infer, Predict, Uploads
from fedsim.models.net import Net
from fedsim.settings.tuned import DECADE, Tuned


def information_loss(logits: Tensor) -> Tensor:
    """(1/B) sum_i H(p_i) + sum_k m_k log m_k, a scalar, with p = softmax(logits) [B, M] and m their mean."""
    mean = logits.log_softmax(1).exp().mean(0)
    return entropy(logits).mean() + (mean * mean.clamp_min(1e-12).log()).sum()


def without_head(net: Net) -> Sequence[nn.Parameter]:
    """All parameters that training may change, but the head's. Raises UserError where there is none."""
    named = net.named_parameters()
    chosen = [value for name, value in named if not name.startswith("head.") and name not in net.frozen]
    if not chosen:
        raise UserError("shot_im adapts the features, and here all layers but the head are frozen; use "
                        "method.infer = 't3a' or 'lame'")  # fmt: skip
    return chosen


@dataclass(frozen=True)
class ShotIM(Infer):
    """theta <- Adam step on (1/B) sum_i H(p_i) - H((1/B) sum_i p_i) over a test batch; the head stays as it is.

    The first summand wants sure predictions, the second wants all classes to occur. A batch is predicted by the
    parameters before its (last) step, and they go on from batch to batch. They start again in every evaluation.

    Source: SHOT (Liang et al., ICML 2020), its loss of information maximization alone, in the online form of T3A's
    comparison (matsuolab/T3A ff8cde5). The paper adapts for 15 epochs and adds pseudo-labels of class centers, which
    are not here. Layers of batch norm use the statistics of the batch (our reading, as in Tent). The rule is
    transductive and uses no label. It costs `steps` forward and backward passes of each image. A domain of which one
    class is rare is pulled towards equal classes.

    lr: the learning rate of Adam; T3A's comparison has the training rate (5e-5 on DomainBed) times 0.1, 1 and 10
    steps: the number of steps for a batch; the same comparison has 1 and 3
    batch: the number of images of a step, for every size of the evaluation batches
    """

    transductive: ClassVar[bool] = True
    shuffled: ClassVar[bool] = True

    lr: Annotated[float, Field(gt=0), Tuned("log:5e-6:5e-4", DECADE)] = 5e-5
    steps: Annotated[int, Field(ge=1)] = 1
    batch: Annotated[int, Field(ge=2)] = 64

    def begin(self, net: Net, batches: Batches, uploads: Uploads | None = None) -> Predict:
        """A function that adapts to each batch. Raises UserError where nothing but the head is trained."""
        return adapting(net, without_head, information_loss, self.lr, self.steps, self.batch)
