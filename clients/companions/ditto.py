"""Ditto: a personal model besides the shared one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from clients.optimizers import make_optimizer
from clients.parts import Batch, Companion, LocalRound
from clients.tools.losses import proximal
from clients.tools.networks import after_step_functions, apart, descend, twin_of
from fedsim.common.tasks import ANY_TASK

ENTRY = "ditto"  # the store's entry for the personal model


@dataclass(frozen=True)
class Ditto(Companion):
    """Each batch gives the shared model its step, and then the client's personal model v a step on

        F(v) + (lam / 2) ||v - w^t||^2, where w^t is the model received this round.

    Source: Ditto (Li et al., ICML 2021). v never leaves its client. It starts as the first received model and keeps its
    values between rounds. It is trained by an optimizer of its own with the experiment's settings, made anew in each
    round. Its random numbers are its own, so that the shared model is the same without it, bit for bit. F is the task's
    loss of the batch as the data set gives it; objective, update and terms of the recipe belong to the shared model.
    Both steps see the same batch, as in the official code; PFLlib makes the whole personal pass first. `lam = 0` trains
    v on the client's data alone.

    lam: lambda, 1 in the official runs
    """

    tasks: ClassVar[tuple[str, ...]] = ANY_TASK

    lam: Annotated[float, Field(ge=0)] = 1.0
    personal: ClassVar[str] = ENTRY
    whole: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("personal_train_loss",)

    def begin(self, round: LocalRound) -> Callable[[Batch], None]:
        """The step of the personal model."""
        net = round.scratch[ENTRY] = twin_of(round.net, round.store.get(ENTRY))
        parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
        reference = [parameter.detach().clone() for parameter in round.parameters().values()]
        optimizer = make_optimizer(net, round.train, round.lr)
        randomness, after_step = round.generator(ENTRY), after_step_functions(net)

        def step(batch: Batch) -> None:
            with apart(randomness, round.device), round.autocast():
                logits = net(batch.images)
            personal_loss = round.task.loss(logits, batch.labels) + proximal(parameters, reference, self.lam)
            round.tally("personal_train_loss", descend(optimizer, personal_loss))
            for function in after_step:
                function()

        return step

    def end(self, round: LocalRound) -> None:
        """Stores v with its running statistics."""
        round.store.put(ENTRY, round.state_of(round.scratch[ENTRY]))
