"""How a model predicts on an unseen domain. The standard rule is eval mode, which could take one image at a time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedsim.common.tasks import ANY_TASK, CLASSIFICATION
from fedsim.models.net import Net
from fedsim.models.tasks import Predict
from fedsim.parts.part import Part

Batches = Callable[[], Iterable[Tensor]]
Uploads = Sequence[Mapping[str, Tensor]]


class Infer(Part):
    """An inference rule.

    shuffled: the rule depends on the order of the test images, so that they come in a random order that the seed fixes
    on_sources: source clients validate the aggregated model by this rule too, because it is part of the model. Other
    rules are compared on one and the same selected model
    batch: the number of images that the rule looks at together, for every `run.evaluate_batch_size`; 0: each by itself
    quantities: the names of the quantities in its details, which are of layers of the network; a site's reply to a
    deployed run may have no others
    random: every prediction draws other numbers, which no file can hold
    by_image: each image is predicted by itself, from the model alone, and there are no details: processes may share the
    batches, and `begin` gets no images then. It counts only in the class that sets it: a class derived from it may
    predict otherwise, and sets it again if that is true of it too
    """

    tasks: ClassVar[tuple[str, ...]] = (CLASSIFICATION.name,)

    shuffled: ClassVar[bool] = False
    on_sources: ClassVar[bool] = False
    batch: int = 0
    quantities: ClassVar[tuple[str, ...]] = ()
    random: ClassVar[bool] = False
    by_image: ClassVar[bool] = False

    @property
    def transductive(self) -> bool:
        """Whether the rule needs batches of the unseen domain before it predicts; results show this."""
        return False

    @property
    def bank(self) -> str:
        """The name of the bank with one entry per client that the rule needs besides the model; empty: none."""
        return ""

    @property
    def divisible(self) -> bool:
        """Whether processes may share the batches of the unseen domain (`by_image`)."""
        alone = vars(type(self)).get("by_image", False)
        return alone and not (self.transductive or self.random or self.bank)

    def pass_size(self, wanted: int) -> int:
        """The number of images in a call of `begin`'s function: as wanted, rounded down to a multiple of `batch`."""
        return max(wanted // self.batch, 1) * self.batch if self.batch else wanted

    def begin(self, net: Net, batches: Batches, uploads: Uploads | None = None) -> Predict:
        """A function from images to logits (or log-probabilities).

        It must not change the tensors of `net`, on which the clients train; a rule that needs others makes a copy.
        `batches()` iterates over the unlabelled test images. `uploads` are the entries of `bank`, one per client.
        """
        raise NotImplementedError

    def alphas(self, net: Net) -> dict[str, Tensor]:
        """alpha [N] of each layer, by its path, for the N images since `begin`; empty where the rule has no alpha.

        A rule that has one names "alpha" among its `quantities`.
        """
        return {}

    def details(self, net: Net) -> list[tuple[str, str, float]]:
        """(quantity, layer, value) of the last evaluation, for details.csv."""
        return []


@dataclass(frozen=True)
class EvalMode(Infer):
    """The model in eval mode, with the averaged batch-norm statistics."""

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    by_image: ClassVar[bool] = True

    def begin(self, net: Net, batches: Batches, uploads: Uploads | None = None) -> Predict:
        """The network itself."""
        net.eval()
        return net
