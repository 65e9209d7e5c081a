"""Tent: scale and shift of batch norm follow the entropy of the predictions, batch by batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.models.infer.adapted import adapting, entropy
from fedsim.models.infer.base import Batches, Infer, Predict, Uploads
from fedsim.models.net import Net
from fedsim.parts.facts import Fact
from fedsim.settings.tuned import DECADE, Tuned


def mean_entropy(logits: Tensor) -> Tensor:
    """The mean over the batch of the entropy of softmax(logits), a scalar; logits [B, M]."""
    return entropy(logits).mean()


def scales_and_shifts(net: nn.Module) -> Sequence[nn.Parameter]:
    """gamma and beta of every batch norm of maps. Raises UserError where there is none."""
    layers = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d) and module.affine]
    if not layers:
        raise UserError("tent trains the scale and shift of batch norm, and this network has no batch norm of maps; "
                        "use method.infer = 't3a' or 'lame'")  # fmt: skip
    return [parameter for layer in layers for parameter in layer.parameters()]


@dataclass(frozen=True)
class Tent(Infer):
    """(gamma, beta) <- Adam step on (1/B) sum_i H(softmax(f(x_i))) over a test batch; gamma, beta of batch norm alone.

    All layers of batch norm normalize by the statistics of the batch, in the prediction too. A batch is predicted by
    the parameters before its (last) step, and they go on from batch to batch.

    Source: Tent (Wang et al., ICLR 2021), its online form, from the released code (DequanWang/tent e9e926a). Parameters
    start again in every evaluation. Batch norm of vectors (in the bottleneck) uses the statistics of the batch, and its
    scale and shift stay, as there. The released configurations have batches of 200 on CIFAR-10-C and 64 on ImageNet-C.
    The rule is transductive and uses no label. It costs `steps` forward and backward passes of each image. Networks
    without batch norm are refused. Of a batch with few classes, entropy is a poor guide: images come in random order.

    lr: the learning rate of Adam; T3A's comparison on DomainBed has the training rate times 0.1, 1 and 10
    steps: the number of steps for a batch; the same comparison has 1 and 3
    batch: the number of images of a step, for every size of the evaluation batches
    """

    transductive: ClassVar[bool] = True
    shuffled: ClassVar[bool] = True
    assumes = (Fact.BATCH_NORM, Fact.IMAGES)

    lr: Annotated[float, Field(gt=0), Tuned("log:1e-4:1e-2", DECADE)] = 1e-3
    steps: Annotated[int, Field(ge=1)] = 1
    batch: Annotated[int, Field(ge=2)] = 64

    def begin(self, net: Net, batches: Batches, uploads: Uploads | None = None) -> Predict:
        """A function that adapts to each batch. Raises UserError for a network without batch norm."""
        return adapting(net, scales_and_shifts, mean_entropy, self.lr, self.steps, self.batch)
