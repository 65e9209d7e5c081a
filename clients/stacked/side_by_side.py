"""Several clients trained as one program: the setting `train.side_by_side`."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clients.base import DomainClient, Job
from clients.local_data import LocalData, plain_batches
from clients.local_steps import LocalSteps, Trained, Training
from clients.parts import Batch
from clients.recipe import ClientRecipe
from clients.stacked.net import Autocast, Pass, StackedNet
from clients.stacked.optimizer import StackedOptimizer, rates_of
from fedsim.common.errors import first_line
from fedsim.common.seeding import seed_library
from fedsim.models.net import Net
from fedsim.models.tasks import TaskRules
from fedsim.parts.part import part_name
from fedsim.settings import TrainSettings

TRIAL = 4  # images of the trial batch


class Draws:
    """A position in the streams of torch's global generators, from which its owner continues to draw."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._keep()

    def _keep(self) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Draws inside the block are the owner's next ones."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
        yield
        self._keep()


@dataclass
class Member:
    """A client of the group: its row of the stack, its round, its steps, and its random draws."""

    row: int
    client: DomainClient
    training: Training
    steps: LocalSteps
    draws: Draws
    parameters: dict[str, nn.Parameter]
    opening: float = 0.0
    error: Exception | None = None  # what ended its round

    @property
    def next(self) -> np.ndarray | None:
        """Positions of its next step; None after the last one, and after an error."""
        plan, taken = self.steps.plan, self.steps.taken
        return plan[taken] if taken < len(plan) and self.error is None else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Work of this client alone: its own draws go on, and an error ends its round and no other."""
        try:
            with self.draws.going_on():
                yield
        except Exception as error:
            self.error = self.error or error


def reason_apart(recipe: ClientRecipe, train: TrainSettings) -> str:
    """Why clients with this recipe train one after the other whatever is set; empty: they may train as one program."""
    if train.clip_norm:
        return "train.clip_norm limits the gradient of one client"
    if recipe.pooled:
        return "one client holds all data"
    local = (recipe.step, recipe.objective, recipe.update, *recipe.companions)
    parts = (*local, *recipe.terms, recipe.norm, *recipe.inserts)
    names = [part_name(part) for part in parts if not part.side_by_side]
    return f"{', '.join(names)}: not a function of one client's tensors and batch alone" if names else ""


class SideBySide:
    """Trains up to `count` clients together, each as it would train alone.

    In every step, the clients whose next batch has the same size pass through `StackedNet` at once. The rest of a step
    is augmentation, terms and functions before the optimizer's step. It is the same code as in sequential training, on
    each client's own row. Clients keep the order of their own steps, and need not be at the same one.

    The numbers are those of sequential training but for rounding, where the network itself draws nothing in training;
    dropout draws other masks, from a stream of the group.
    """

    def __init__(self, net: Net, places: Mapping[str, str], count: int, task: TaskRules) -> None:
        self.stack = StackedNet(net, places, count, task)
        self.device = next(net.parameters()).device

    def trial(self, data: LocalData, autocast: Autocast = nullcontext) -> str:
        """Why the network does not run as one program; empty: it does. What the trial changes, messages write over."""
        rows = self.stack.rows(range(2))
        positions = data.training_positions()[:TRIAL]
        batch = torch.stack([data.normalize(data.raw(positions))] * 2), torch.stack([data.labels[: len(positions)]] * 2)
        try:
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                self.stack.forward(rows, *batch, autocast).losses.sum().backward()
        except (RuntimeError, ValueError) as error:
            return f"the network does not run as one program ({first_line(error, 200)})"
        return ""

    def fit(self, jobs: Sequence[Job]) -> list[tuple[DomainClient, Trained] | Exception]:
        """What `LocalClient.train` gives for every job, with the client that was trained, or why it failed."""
        found: list[Any] = [self._join(row, job) for row, job in enumerate(jobs)]
        members = [member for member in found if isinstance(member, Member)]
        if members:
            started = time.perf_counter()
            first = members[0].training.round
            seed_library(first.seed, "side by side", first.client, first.round)
            losses = self._train(members)
            each = (time.perf_counter() - started) / len(members)
            for member, loss in zip(members, losses):
                found[member.row] = self._leave(member, loss, each, len(members))
        return found

    def _train(self, members: Sequence[Member]) -> list[float]:
        """All steps; the sum of each one's losses. An error of what they have in common is the error of each."""
        try:
            return GroupTraining(self.stack, members, Draws(self.device)).run()
        except Exception as error:
            for member in members:
                member.error = member.error or error
                member.client.net.zero_grad()  # a pass that broke off may have left gradients of terms
            return [0.0] * len(members)

    def _join(self, row: int, job: Job) -> Member | Exception:
        client = job.client.on(self.stack.nets[row])
        try:
            training = client.begin_training(job.tensors, job.config)
            steps = client.begin_steps(training.round)
        except Exception as error:
            return error
        parameters = dict(client.net.named_parameters())
        learned = {name: parameters[name] for name in self.stack.learned}
        seconds = time.perf_counter() - training.started
        return Member(row, client, training, steps, Draws(self.device), learned, seconds)

    def _leave(
        self, member: Member, loss: float, seconds: float, size: int
    ) -> tuple[DomainClient, Trained] | Exception:
        """The end of a client's round; its training took its own time and an equal share of the group's."""
        if member.error is not None:
            return member.error
        member.training.started = time.perf_counter() - member.opening - seconds
        member.training.metrics["side_by_side"] = size
        member.steps.total = torch.tensor(loss)
        try:
            with member.draws.going_on():
                return member.client, member.client.end_training(member.training, member.client.end_steps(member.steps))
        except Exception as error:
            return error


class GroupTraining:
    """The steps of one round of a group."""

    def __init__(self, stack: StackedNet, members: Sequence[Member], draws: Draws) -> None:
        self.stack, self.members, self.draws = stack, members, draws
        work, optimizer = members[0].steps.work, members[0].training.round.optimizer
        stacks = {name: stack.stacks[name] for name in stack.learned}
        self.optimizer = StackedOptimizer(stacks, rates_of(optimizer, members[0].parameters), work, optimizer.defaults)
        for member in members:
            self.optimizer.load(member.row, member.training.round.optimizer.state, member.parameters)
        self.losses = torch.zeros(len(stack.nets), device=draws.device)
        self.is_plain = all(self._is_plain(member, members[0]) for member in members)

    @staticmethod
    def _is_plain(member: Member, first: Member) -> bool:
        """Whether the member's batches can be made together with those of the first, and no part sees them."""
        data, transforms = member.client.data, first.client.data.transforms
        seen = member.steps.transfer or member.training.round.terms
        return not seen and data.is_plain and data.transforms == transforms

    def run(self) -> list[float]:
        """All steps of all members; the sum of each one's losses."""
        while waiting := [(member, len(member.next)) for member in self.members if member.next is not None]:
            sizes = Counter(size for _, size in waiting)
            size = max(sizes, key=lambda size: (sizes[size], size))
            self._step([member for member, images in waiting if images == size])
        if self.members[0].steps.work.persist_optimizer:
            for member in self.members:
                self.optimizer.save(member.row, member.training.round.optimizer.state, member.parameters)
        sums = self.losses.tolist()
        return [sums[member.row] for member in self.members]

    def _step(self, members: Sequence[Member]) -> None:
        """One step of members whose next batches have the same size."""
        batches: list[Batch] = []
        if self.is_plain:
            positions = [member.next for member in members if member.next is not None]
            images, labels = plain_batches([member.client.data for member in members], positions)
        else:
            batches = [batch for member in members if (batch := self._batch(member)) is not None]
            members = [member for member in members if member.error is None]
            if not members:
                return
            images, labels = (torch.stack([getattr(batch, key) for batch in batches]) for key in ("images", "labels"))
        rows = self.stack.rows([member.row for member in members])
        with self.draws.going_on():
            passed = self.stack.forward(rows, images, labels, members[0].training.round.autocast)
        losses = self._with_terms(members, batches, passed)
        losses.sum().backward()
        self._change_gradients(members, passed.leaves)
        self.optimizer.step(rows, passed.leaves)
        self.stack.keep(rows, passed.leaves)
        sums = rows.of(self.losses)
        sums += losses.detach()
        rows.put(self.losses, sums)
        for member in members:
            with member.alone():
                member.steps.took()

    @staticmethod
    def _batch(member: Member) -> Batch | None:
        steps = member.steps
        assert member.next is not None
        with member.alone():
            return member.client.data.batch(member.next, steps.transfer, steps.moment)
        return None

    @staticmethod
    def _with_terms(members: Sequence[Member], batches: Sequence[Batch], passed: Pass) -> Tensor:
        """Every client's loss with its recipe's terms, [R]."""
        if not any(member.training.round.terms for member in members):
            return passed.losses
        totals = []
        of_each = zip(members, batches, passed.features.unbind(), passed.logits.unbind(), passed.losses.unbind())
        for member, batch, *more in of_each:
            batch.features, batch.logits, batch.loss = more
            total = batch.loss
            with member.alone():
                total = member.training.round.with_terms(batch, batch.loss)
            totals.append(total)
        return torch.stack(totals)

    def _change_gradients(self, members: Sequence[Member], leaves: Mapping[str, Tensor]) -> None:
        """Add the gradients that terms gave to a client's own parameters, and let its parts change the sum in place."""
        if not any(member.training.round.terms or member.training.round.before_step for member in members):
            return
        for place, member in enumerate(members):
            for name, parameter in member.parameters.items():
                leaf = leaves[name]
                if leaf.grad is None and parameter.grad is None:
                    continue
                if leaf.grad is None:
                    leaf.grad = torch.zeros_like(leaf)
                gradient = leaf.grad[place]
                if parameter.grad is not None:
                    gradient += parameter.grad
                parameter.grad = gradient
            with member.alone():
                for function in member.training.round.before_step:
                    function()
            for parameter in member.parameters.values():
                parameter.grad = None
