"""Contracts of the client's parts. What a part sees of its round is `clients.local_round.LocalRound`.

A part is a frozen dataclass that keeps nothing itself. `begin(round)` is called once before the first step and returns
the function that acts once per step; `end(round)` is called once after the last step. Values for one round belong in
the variables of `begin`, or in `round.scratch` when `end` needs them too. Values for later rounds belong in
`round.store`.

The order of one round:

    what the server asks before (`collect`) - the received tensors are loaded - `Report.before` of each report
    - the batches are planned - `begin` of terms, objective, update, step, companions and augment - the steps
    - `end` of all parts - `Report.after` of each report - `leave` of all parts

In one step, objective and terms give the loss of the batch, the update moves the weights by it, and companions follow.
An update may ask for the loss twice. What a part draws for a batch it draws by `batch.once`, so that the second pass
has the same draws.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

import numpy as np
from torch import Tensor

from clients.batch import Moment, Transfer
from clients.local_data import LocalData
from clients.local_round import Batch, LocalRound, LossFunction, StepFunction, UpdateFunction
from fedsim.common.errors import UserError
from fedsim.common.tasks import ANY_TASK, CLASSIFICATION
from fedsim.parts.facts import Fact, Facts
from fedsim.parts.part import Part, part_name
from fedsim.settings import TrainSettings
from fedsim.settings.experiment import Experiment
from strategies.server_round import Arrays

__all__ = [
    "Augment",
    "Batch",
    "Batches",
    "ClientPart",
    "Companion",
    "LocalRound",
    "LocalUpdate",
    "LossFunction",
    "Objective",
    "Report",
    "Step",
    "StepFunction",
    "Term",
    "Unlabelled",
    "UpdateFunction",
]


class ClientPart(Part):
    """What all parts of a client have in common.

    banks: as `bank`, for a part that contributes to several banks; `round.asked` says to which one
    personal: the store entry in which this part keeps a personal model, as tensors by the network's own names (all of
    them or some; the received model fills the rest). Such a model is validated in every evaluation phase besides the
    received one, recorded in the columns `personal_accuracy` and `personal_loss`, and written to a file at the end of
    the run with `run.keep_personal`. Empty: there is none
    keeps_last_iterate: `end` sees the model of the last step, also where an earlier one is sent (`train.local_checks`)
    """

    tasks: ClassVar[tuple[str, ...]] = (CLASSIFICATION.name,)  # a part for maps and masks names them too
    banks: ClassVar[tuple[str, ...]] = ()
    personal: ClassVar[str] = ""
    keeps_last_iterate: ClassVar[bool] = False

    @property
    def bank(self) -> str:
        """The name of the bank to which this part contributes: by `collect` where the bank is collected, otherwise by
        `round.send(bank, ...)` in every round; empty: none."""
        return ""

    @property
    def needs_levels(self) -> bool:
        """Whether it uses the feature maps `net.levels`."""
        return False

    @property
    def compiles(self) -> bool:
        """Whether its training pass, if any, is `round.forward` without hooks: what `train.compile` can compile."""
        return True

    def contributes(self) -> tuple[str, ...]:
        """Names of the banks to which this part contributes."""
        return (self.bank, *self.banks) if self.bank else self.banks

    def collect(self, round: LocalRound) -> dict[str, np.ndarray]:
        """This client's contribution to a bank that is collected.

        It is asked for once, before there is a model, or in every round before training, with the received model in
        `round.net`.
        """
        raise NotImplementedError

    def acts(self, phase: str) -> bool:
        """Whether `begin` and `end` are called in this phase, which is "train" or the prelude of a step."""
        return True

    def leave(self, round: LocalRound, trained: Arrays, received: Arrays) -> Arrays:
        """The trained tensors as they leave the client, given those that came; as they are.

        `trained` are copies in C order, which the part may change; `received` must not be changed.
        """
        return trained

    def end(self, round: LocalRound) -> None:
        """After the last step: put into `round.store` what the next round needs; `round.send` records to the server."""


def departing(parts: Iterable[ClientPart], round: LocalRound, trained: Arrays, received: Arrays) -> Arrays:
    """The trained tensors as all parts let them leave (`ClientPart.leave`); copied only for those that change them."""
    leaving = [part for part in parts if type(part).leave is not ClientPart.leave]
    trained = {name: np.array(array, order="C") for name, array in trained.items()} if leaving else trained
    for part in leaving:
        trained = part.leave(round, trained, received)
    return trained


class Objective(ClientPart):
    """Says what the loss of a batch is, before the terms."""

    signed_loss: ClassVar[bool] = True
    side_by_side: ClassVar[bool] = False
    assumes: ClassVar[Facts] = (Fact.OBJECTIVE,)

    def begin(self, round: LocalRound) -> StepFunction:
        """A function from a batch to its loss, which fills its features, logits and loss, as `round.forward` does."""
        raise NotImplementedError


class LocalUpdate(ClientPart):
    """Says how the loss of a batch moves the weights in one step."""

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK
    side_by_side: ClassVar[bool] = False
    assumes: ClassVar[Facts] = (Fact.UPDATE,)

    def begin(self, round: LocalRound) -> UpdateFunction:
        """A function that takes one step and returns the loss without its graph. It gets the loss as a function, which
        gives the loss at the present weights, and may be called several times."""
        raise NotImplementedError


class Companion(ClientPart):
    """Does something besides the step, after each update, that does not change the shared model."""

    side_by_side: ClassVar[bool] = False

    def acts(self, phase: str) -> bool:
        """In the rounds alone."""
        return phase == "train"

    def begin(self, round: LocalRound) -> Callable[[Batch], object]:
        """A function of the batch as it was before the objective changed it."""
        raise NotImplementedError


class Step(ClientPart):
    """Defines a whole local step: a procedure that is more than an objective and an update (episodes, adversaries).

    It takes the objective where it calls `round.loss_of`, and the update where it calls `round.move`. A procedure that
    does without one of them breaks that fact.
    """

    signed_loss: ClassVar[bool] = True
    side_by_side: ClassVar[bool] = False
    breaks: ClassVar[Facts] = (Fact.OBJECTIVE, Fact.UPDATE)
    own_loss: ClassVar[bool] = False  # whether it computes the loss of a batch itself, without the task's
    prelude: ClassVar[str] = ""  # name of a training phase before round 1, e.g. CSAC's "acquire"

    def begin(self, round: LocalRound) -> StepFunction:
        """A function that takes one step on a batch and returns its detached loss.

        `lambda batch: round.move(lambda: round.loss_of(batch))` is the plain step. A step that computes its loss itself
        adds the recipe's terms by `round.with_terms`.
        """
        raise NotImplementedError

    def work(self, round: LocalRound) -> TrainSettings:
        """The local work of this phase (epochs, iterations, ...); the experiment's by default."""
        return round.train

    def lacks(self, round: LocalRound) -> bool:
        """Whether a client that joins late must go through the prelude before it can train."""
        return False


class Term(ClientPart):
    """Adds a summand to the local loss, or changes its gradients.

    in_prelude: it acts in the prelude of a step too; all other terms begin with the rounds
    side_by_side: it looks at the batch's images, labels, features, logits and loss and at the network's parameters, but
    takes no gradient of the batch's loss itself; a function in `round.before_step` changes gradients in place.
    order: which term comes first, however the rows are named: 0 adds to the loss, 1 adds to the gradients, 2 multiplies
    them, 3 drops some of them; equal numbers in the order of the settings' names

        >>> class SmallLogits(Term):
        ...     def begin(self, round):
        ...         return lambda batch: 0.01 * batch.logits.square().mean()
        >>> step = SmallLogits().begin(None)
        >>> step(Batch(images=None, labels=None, logits=torch.tensor([[1.0, 3.0]])))
        tensor(0.0500)
    """

    in_prelude: ClassVar[bool] = False
    signed_loss: ClassVar[bool] = True
    side_by_side: ClassVar[bool] = False
    order: ClassVar[int] = 0

    def acts(self, phase: str) -> bool:
        """In the rounds, and in a prelude if the term says so."""
        return phase == "train" or self.in_prelude

    @property
    def pull(self) -> float:
        """mu of a term with the gradient mu (w - w^t), where w^t is the received model; 0 for all others.

        Reports that count the gradients in a local update use it.
        """
        return 0.0

    def begin(self, round: LocalRound) -> StepFunction | None:
        """A function from a batch to the scalar that is added to the loss, or None when there is nothing to add.

        What it draws for a batch, it draws by `batch.once`.
        There is nothing to add with a weight of 0, or where a part only appends a function to `round.before_step`.
        """
        raise NotImplementedError


class Batches(ClientPart):
    """Chooses the examples of the round's batches.

    balanced: every client trains on the same number of examples, however many it holds (see `clients.budget`)
    whole: no batch is cut or made anew to meet a budget, because its examples belong together

        >>> class InOrder(Batches):
        ...     def indices(self, examples, round, train):
        ...         for start in range(0, examples, train.batch_size):
        ...             yield np.arange(start, min(start + train.batch_size, examples))
        >>> [len(batch) for batch in InOrder().indices(5, None, TrainSettings(batch_size=2))]
        [2, 2, 1]
    """

    balanced: ClassVar[bool] = False
    whole: ClassVar[bool] = False

    def indices(self, examples: int, round: LocalRound, train: TrainSettings) -> Iterator[np.ndarray]:
        """Index arrays into the client's training examples, one per step.

        It is called before all other parts begin; `round.steps` is the number of arrays.
        """
        raise NotImplementedError


class Augment(ClientPart):
    """Changes the images of a batch in training, and may say what they go through in evaluation.

    moment: "raw" acts on images in [0, 1] before the data set's own augmentation; "augmented" after crop, flip and
    jitter; "normalized" after the normalization too. Draws of the last two come from torch's generator, so that
    other versions of the batch repeat them
    """

    moment: ClassVar[Moment] = "raw"
    assumes: ClassVar[Facts] = (Fact.IMAGES,)
    breaks: ClassVar[Facts] = (Fact.OWN_IMAGES,)

    def copies(self, round: LocalRound) -> int:
        """The number of versions of every example in an epoch.

        Item `copy * n + position` is version `copy` of an example. The aggregation counts only n.
        """
        return 1

    def begin(self, round: LocalRound) -> Transfer:
        """A function that changes the images of a batch at the part's moment."""
        raise NotImplementedError

    def at_test(self, data: LocalData) -> Callable[[Tensor], Tensor] | None:
        """What the normalized images of a client go through when a model is measured on them; None: nothing.

        It holds for the images of this client alone, which never leave it. What the images of the unseen domain go
        through says the recipe's part in the slot `infer`.
        """
        return None


class Report(ClientPart):
    """Measures something around a client's training and reports it as metrics.

    >>> class Steps(Report):
    ...     columns = ("steps_taken",)
    ...     def after(self, round):
    ...         return {"steps_taken": float(round.steps)}
    >>> Steps().before(None)
    {}
    """

    def before(self, round: LocalRound) -> dict[str, float]:
        """Metrics of the received model."""
        return {}

    def after(self, round: LocalRound) -> dict[str, float]:
        """Metrics of the trained model."""
        return {}


class Unlabelled(ClientPart):
    """Defines what the unseen domain's client does when the server visits it. This client holds images without labels.

    The images are a part of the domain that is never tested (`data.adapt_share`), and its labels are not even read. A
    method with such a part adapts to the target: its results are marked `uses_target_unlabelled` and ranked separately.
    """

    assumes: ClassVar[Facts] = (Fact.SEVERAL_CLIENTS, Fact.ONE_INPUT)

    def check(self, experiment: Experiment) -> None:
        """Raises UserError in a deployment without a site that holds images of the unseen domain."""
        if experiment.run.runtime == "deployment" and experiment.run.evaluate_target == "server":
            raise UserError(
                f"{part_name(self)} trains on the unseen domain's machine; "
                "add a site with role = target to the federation"
            )

    def answer(self, round: LocalRound) -> None:
        """Does the work of `round.phase` with the received model in `round.net` and the message's `round.records`.

        It sends the records of the answer by `round.send`. The labels of `round.data` are -1.
        """
        raise NotImplementedError
