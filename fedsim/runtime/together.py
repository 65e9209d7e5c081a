"""The inline runtime with several clients side by side, which are trained as one program (`train.side_by_side`)."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from clients.base import DomainClient, Job
from clients.local_round import autocast_of
from clients.local_steps import Trained
from clients.stacked.side_by_side import SideBySide, reason_apart
from fedsim.apps.client import guarded, job_of, trained
from fedsim.runs.plan import Plan
from fedsim.runs.workspace import pick_device, workspace
from fedsim.runtime.local_grid import InlineGrid
from fedsim.tensors.records import Config, config_of, configs_of

logger = logging.getLogger("fedsim")


class TogetherGrid(InlineGrid):
    """Runs the client app in this process; messages that ask for a round's training are processed in groups.

    If the recipe does not allow it, or the network cannot run as one program, the log says why in one line, and the
    clients train one after the other.
    """

    def __init__(self, app: ClientApp, plan: Plan, nodes: int = 0) -> None:
        super().__init__(app, nodes or len(plan.clients))
        self.size = self.at_once = min(plan.experiment.train.side_by_side, len(plan.clients))
        self.reason = reason_of(plan) if self.size > 1 else "there is one client"
        self.program: SideBySide | None = None
        if self.reason:
            self._say()

    def _say(self) -> None:
        logger.warning("train.side_by_side: %s; clients train one after the other", self.reason)

    def deliver(self, messages: list[Message]) -> Iterable[Message]:
        """Process messages that ask for training in groups, and all others one by one, in the order of the messages."""
        for group in self._groups(messages):
            together = len(group) > 1 and not self.reason
            yield from self._train(group) if together else super().deliver(group)

    def _groups(self, messages: Sequence[Message]) -> Iterator[list[Message]]:
        group: list[Message] = []
        for message in messages:
            if not (trains(message) and len(group) < self.size and all(trains(other) for other in group)) and group:
                yield group
                group = []
            group.append(message)
        if group:
            yield group

    def _train(self, messages: list[Message]) -> Iterable[Message]:
        jobs = [self._job(message) for message in messages]
        ready = [job for job in jobs if isinstance(job, Job)]
        if ready and self.program is None:
            self._open(messages[0], ready[0])
        if self.program is None:
            return super().deliver(messages)
        fitted = iter(self.program.fit(ready) if ready else ())
        return [self._reply(m, next(fitted) if isinstance(job, Job) else job) for m, job in zip(messages, jobs)]

    def _open(self, message: Message, job: Job) -> None:
        """Stack the network and try it on a few images."""
        space = workspace(str(config_of(message.content)["experiment"]))
        program = SideBySide(space.net, space.places, self.size, space.task)
        self.reason = program.trial(job.client.data, partial(autocast_of, space.experiment.train, space.device))
        if self.reason:
            self._say()
        else:
            self.program = program

    def _context(self, message: Message) -> Context:
        return self.contexts[message.metadata.dst_node_id]

    def _job(self, message: Message) -> Job | Exception:
        try:
            return job_of(message, self._context(message))
        except Exception as error:
            return error

    def _reply(self, message: Message, fitted: tuple[DomainClient, Trained] | Exception) -> Message:
        def content(message: Message, context: Context) -> RecordDict:
            if isinstance(fitted, Exception):
                raise fitted
            return trained(*fitted, message, context)

        return guarded(content)(message, self._context(message))


def reason_of(plan: Plan) -> str:
    """Why several clients of this run train one after the other; empty: they may train as one program."""
    if plan.experiment.train.precision == "bf16" and pick_device(plan.experiment.run.device).type == "cpu":
        # A CPU's autocast knows conv2d, but not the operation that torch.func.vmap makes of it.
        return "train.precision = bf16 does not reach the convolutions of one program on a CPU"
    return reason_apart(plan.recipe, plan.experiment.train)


def trains(message: Message) -> bool:
    """Whether a message asks for a round of training, and not for a prelude, a validation or anything else."""
    config: Config = dict(configs_of(message.content).get("config", {}))
    return message.metadata.message_type == "train" and config.get("phase") == "train"
