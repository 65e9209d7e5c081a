"""T3A: the head is replaced by class means of test features that it is sure of, without a gradient."""

import copy
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.models.infer.adapted import entropy
from fedsim.models.infer.base import Batches, Infer, Predict, Uploads
from fedsim.models.net import Net
from fedsim.settings.tuned import Tuned


class Supports:
    """The kept features of all classes: rows [n, d] with the class [n] that the head predicts, and its entropy [n].

    They begin with the rows of the head's weight, as features that the head classifies like all others.

    kept: of each class this many rows with the lowest entropy stay; 0: all
    """

    def __init__(self, head: nn.Linear, kept: int) -> None:
        self.head, self.kept = head, kept
        self.classes = head.out_features
        self.rows, self.labels, self.entropies = self._classified(head.weight.detach().clone())

    def _classified(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.head(rows)
        return rows, logits.argmax(1), entropy(logits)

    def add(self, features: Tensor) -> None:
        """Adds the features [B, d] of a batch, and lets the least sure rows of a class go."""
        new = self._classified(features)
        rows, labels, entropies = (torch.cat(each) for each in zip((self.rows, self.labels, self.entropies), new))
        order = entropies.argsort(stable=True)  # of equal entropies the older row stays
        taken = F.one_hot(labels[order], self.classes).cumsum(0).gather(1, labels[order, None])[:, 0]
        stays = order[taken <= self.kept] if self.kept else order
        stays = stays.sort().values
        self.rows, self.labels, self.entropies = rows[stays], labels[stays], entropies[stays]

    def centers(self) -> Tensor:
        """c [M, d]: for each class the sum of z / ||z|| of its rows, divided by its length; 0 for a class without."""
        directions = F.normalize(self.rows, dim=1)
        sums = torch.zeros_like(self.head.weight).index_add_(0, self.labels, directions)
        return F.normalize(sums, dim=1)


@dataclass(frozen=True)
class T3a(Infer):
    """argmax_k z . c_k, where c_k is the direction of the mean of z / ||z|| over the supports of class k.

    The supports of a class are the test features that the head assigns to it, at most M with the lowest entropy. At
    first they are the rows of the head's weight W, with the class and the entropy of W w_c + b. A batch is added before
    it is predicted. z is not normalized, and the bias has no part in the prediction.

    Source: T3A (Iwasawa and Matsuo, NeurIPS 2021), from the released code (matsuolab/T3A ff8cde5). Supports that were
    let go do not come back, and the rows of W can be let go too. If no row of W is classified as class c, that class
    has the logit 0 until a feature is. The code's sort is not stable, so that equal entropies are decided by chance;
    here the older support stays. The rule is transductive, uses no label and no gradient, and works on any row with a
    linear head. It costs one forward pass and M products of d numbers for each class. Validation at the sources is
    without it.

    M: the supports of a class; the paper selects it by source validation from 1, 5, 20, 50, 100 and all. 0 keeps all
    batch: the number of images that are added together, 32 in the paper
    """

    transductive: ClassVar[bool] = True
    shuffled: ClassVar[bool] = True

    M: Annotated[int, Field(ge=0), Tuned("1,5,20,50,100", "the paper")] = 20
    batch: Annotated[int, Field(ge=1)] = 32

    def begin(self, net: Net, batches: Batches, uploads: Uploads | None = None) -> Predict:
        """A function that adds each batch to the supports. Raises UserError for a head that is not one linear layer."""
        net = copy.deepcopy(net).eval()
        if not isinstance(net.head, nn.Linear):
            raise UserError("t3a begins with the weights of a linear head, and this network has another head; use "
                            "model.head = 'linear', or method.infer = 'lame'")  # fmt: skip
        supports = Supports(net.head, self.M)

        @torch.no_grad()
        def predict(images: Tensor) -> Tensor:
            logits = []
            for part in images.split(self.batch):
                features = net.features(part)
                supports.add(features)
                logits.append(features @ supports.centers().T)
            return torch.cat(logits)

        return predict
