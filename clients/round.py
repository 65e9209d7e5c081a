"""One client's round: the received tensors are loaded, the parts begin, the steps are taken, the parts end.

clients/parts.py has the order of a round and the contracts of parts; clients/base.py makes a Flower client of it.
"""

import copy
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from clients.batch import Transfer
from clients.budget import Amount, local_plan
from clients.compiled import Compiled
from clients.local_data import LocalData
from clients.local_steps import BestIterate, LocalSteps, Order, Trained, Training, steps_taken, watch
from clients.optimizers import learning_rate, make_optimizer, optimizer_tensors, restore_optimizer
from clients.parts import LocalRound, StepFunction, departing
from clients.recipe import ClientRecipe
from clients.store import ClientStore
from clients.tools.networks import NetView, view_of
from clients.validation import local_validation
from fedsim.common.seeding import seed_library
from fedsim.common.tasks import BY_METRIC
from fedsim.models.infer.base import Predict
from fedsim.models.net import Net
from fedsim.models.tasks import mean_of, mean_of_defined
from fedsim.settings.experiment import Experiment
from fedsim.tensors.arrays import fill, load_arrays, to_arrays
from strategies.model import shared_parameters
from strategies.parts import Arrays, Cut, Place
from strategies.wire.compression import encode_update
from strategies.wire.cuts import crop, uncrop


@dataclass(eq=False)
class LocalClient:
    """A client of one domain in its rounds. Tensors go by name.

    All clients of a process share the network, which holds no state of its own. Shared tensors come with each message.
    Personal tensors (places `upload` and `local`) come from the store, at the first participation from the initial
    model. Frozen tensors are in the network since it was built, and nothing ever changes them.

    view: the network that all clients of the process share
    places: the place of every tensor of the network (see Share.place)
    initial: the personal tensors of the initial model
    clients: the names of all source clients, in the order of the domains
    source_clients: the number of clients that hold source data; all those that a pooled client represents are counted
    build_net: a function that makes the run's initial network
    compiled: the compiled step, if steps are compiled
    """

    experiment: Experiment
    recipe: ClientRecipe
    view: NetView
    places: dict[str, Place]
    initial: dict[str, Tensor]
    data: LocalData
    store: ClientStore
    device: torch.device
    clients: Sequence[str]
    source_clients: int
    build_net: Callable[[], Net]
    compiled: Compiled | None

    def __post_init__(self) -> None:
        self.counts: list[int] = [self.data.examples]  # training images of every client
        self.spent: list[Amount] = []  # work of the current round
        self.cut: dict[str, Cut] = {}  # the cuts of shared tensors that this client gets in the round only in part
        self.warm: dict[str, tuple[Hashable, Any]] = {}  # what parts keep in memory between rounds
        self.records: dict[str, dict[str, np.ndarray]] = {}  # of the banks, as received
        self.outbox: dict[str, dict[str, np.ndarray]] = {}  # the records that the reply takes along
        self.stored = 0  # the number of store entries written with the last reply
        # The store entries that are models of the client's own.
        self.personal = [part.personal for part in self.recipe.client_parts() if part.personal]

    @property
    def net(self) -> Net:
        """The network that the clients of this process share."""
        return self.view.net

    @property
    def state(self) -> dict[str, Tensor]:
        """The network's tensors by name."""
        return self.view.state

    @property
    def metric(self) -> str:
        """The primary metric, under the name that messages and records use."""
        return self.data.task.metric

    def names(self, phase: str) -> list[str]:
        """Names of the tensors received: the shared ones for training, and also the uploaded ones for evaluation."""
        places = ("shared", "upload") if phase == "evaluate" else ("shared",)
        return [name for name, place in self.places.items() if place in places]

    def upload_names(self) -> list[str]:
        """Names of the tensors sent after training."""
        return self.names("evaluate")

    def train(self, tensors: Arrays, order: Order) -> Trained:
        """Trains from the received tensors, as a message orders it.

        Returns the tensors to send (views of the network, in its memory layout), the number of examples and metrics.
        """
        training, loss = steps_taken(lambda: self.begin_training(tensors, order), self._take_steps)
        return self.end_training(training, loss)

    def begin_training(self, tensors: Arrays, order: Order) -> Training:
        """Opens the round, loads the received tensors and lets the reports measure, before the first step."""
        started = time.perf_counter()
        round = self._open(order)
        self.counts, self.spent = order.get("counts", [self.data.examples]), []
        self._keep_banks()
        self._load(tensors, "train")
        metrics: dict[str, float] = {}
        for report in self.recipe.reports:
            metrics |= report.before(round)
        if round.phase == "train" and self.recipe.step.lacks(round):
            initial = self.build_net().state_dict()  # a client that joins late starts from it, like the others
            load_arrays(self.state, {name: value.numpy() for name, value in initial.items()}, list(initial))
            self._take_steps(round.for_phase(self.recipe.prelude))
            self._load(tensors, "train")
        return Training(round, tensors, metrics, started)

    def end_training(self, training: Training, loss: float) -> Trained:
        """Lets the reports measure, stores the client's state and takes what is sent, after the last step."""
        round, metrics = training.round, {**training.metrics, "train_loss": loss}
        metrics |= round.tallied() | {unit: sum(getattr(part, unit) for part in self.spent) for unit in Amount._fields}
        for report in self.recipe.reports:
            metrics |= report.after(round)
        if self.experiment.run.select_on == "local":
            metrics |= local_validation(self, self.experiment.run)
        if self.initial:
            self.store.put("personal", {name: self.state[name] for name in self.initial})
        trained: Arrays = crop(to_arrays({name: self.state[name] for name in self.upload_names()}), self.cut)
        trained = departing(self.recipe.client_parts(), round, trained, training.received)
        trained = self._compressed(round, trained, training.received)
        self.stored = self.store.commit()
        metrics |= {"compile_seconds": self.compiled.take_seconds()} if self.compiled else {}
        metrics["train_seconds"] = time.perf_counter() - training.started
        self.outbox = round.outbox
        return trained, self.data.examples, metrics

    def _compressed(self, round: LocalRound, trained: Arrays, received: Arrays) -> Arrays:
        """The trained tensors in the form in which they travel; what that leaves out is stored, where it is used."""
        compress = self.recipe.compress
        if compress is None or round.phase != "train":
            return trained
        stored = self.store.get("compression") if compress.keeps_error else None
        error = None if stored is None else to_arrays(stored)
        parameters = shared_parameters(self.net, self.places)
        sent, left_out = encode_update(compress, trained, received, parameters, error, round.rng("compress"))
        if compress.keeps_error:
            self.store.put("compression", {name: torch.from_numpy(array) for name, array in left_out.items()})
        return sent

    def on(self, net: Net) -> Self:
        """The same client, with its data and its store, on another network of the same kind; trained side by side."""
        other = copy.copy(self)
        other.view = view_of(net, self.places)
        other.cut, other.outbox, other.compiled = {}, {}, None
        return other

    def _open(self, order: Order) -> LocalRound:
        """Begins a round of this client: its state of before, its part of the model, and what its parts see."""
        client, number, phase = order["client"], order["round"], order["phase"]
        seed = self.experiment.run.seed
        if "delivered" not in order:  # else it has trained in this round, and what it stored then must stay
            self.store.open_round(number, order.get("state-round"), order.get("saved-round"))
        seed_library(seed, "library", client, phase, number)
        self.cut = self.recipe.share.cut(self.net, client, number, seed) if phase == "train" else {}
        is_first = self.store.get("personal") is None
        self._restore_personal()
        if is_first:
            self._start_from_banks()
        return self._local_round(order)

    def _start_from_banks(self) -> None:
        """Loads the personal tensors that a bank gives to a client in its first round."""
        for bank in self.recipe.banks:
            if bank.initial and bank.name in self.records:
                load_arrays(self.state, self.records[bank.name], list(self.records[bank.name]))

    def _local_round(self, order: Order) -> LocalRound:
        """What the parts see of the round that a message asks for."""
        recipe, train, phase = self.recipe, self.experiment.train, order["phase"]
        return LocalRound(
            client=order["client"],
            net=self.net,
            train=train,
            classes=self.data.classes,
            round=order["round"],
            rounds=train.rounds,
            phase=phase,
            seed=self.experiment.run.seed,
            device=self.device,
            store=self.store,
            data=self.data,
            clients=tuple(self.clients),
            places=self.places,
            records=self.records,
            warm=self.warm,
            task=self.data.task,
            pull=sum(term.pull for term in recipe.terms if term.acts(phase)),
            asked=order.get("bank", ""),
            delivered=tuple(order.get("delivered", ())),
            known_weights=recipe.weights.known,
            compiled=self.compiled,
            build_net=self.build_net,
        )

    def _load(self, tensors: Arrays, phase: str) -> None:
        """Loads received tensors into the network; where the client got a part of a tensor, the rest is zero."""
        names, cut = self.names(phase), self.cut if phase == "train" else {}
        zeros = {name: np.zeros(tuple(self.state[name].shape), tensors[name].dtype) for name in cut}
        load_arrays(self.state, uncrop(tensors, cut, zeros), names)

    def _keep_banks(self) -> None:
        """Stores a bank that comes only once, and fills `records` with those that came in an earlier round."""
        for bank in [bank for bank in self.recipe.banks if bank.when == "once"]:
            if bank.name in self.records:
                arrays = self.records[bank.name]
                self.store.put(f"bank-{bank.name}", {key: torch.tensor(value) for key, value in arrays.items()})
            elif (stored := self.store.get(f"bank-{bank.name}")) is not None:
                self.records[bank.name] = {key: value.numpy() for key, value in stored.items()}

    def _restore_personal(self, only: str = "") -> None:
        """Loads the client's own tensors, at first the initial ones; `only` those with this place."""
        personal = self.store.get("personal") or self.initial
        fill(self.state, {name: value for name, value in personal.items() if not only or self.places[name] == only})

    def _take_steps(self, round: LocalRound, is_watched: bool = False) -> float:
        """Takes the steps of a round; returns the mean loss over them. With `is_watched`, see `steps_taken`."""
        steps = self.begin_steps(round)
        if is_watched:
            watch(round, lambda: steps.taken + 1)
        for positions in steps.plan:
            steps.take(self.data.batch(positions, steps.transfer, steps.moment))
        return self.end_steps(steps)

    def begin_steps(self, round: LocalRound) -> LocalSteps:
        """Plans the batches, makes the optimizer, and lets the parts begin, before the first step."""
        recipe = self.recipe
        work, plan = local_plan(recipe, round, self.counts, self.source_clients)
        self.spent.append(Amount.of(plan))
        round.steps, round.images = len(plan), self.spent[-1].images
        number = round.round or work.warmup_rounds + 1  # a prelude is no round, and is not warmed up
        round.lr = learning_rate(work, number, round.rounds)
        for parameter in self.view.learned:
            parameter.requires_grad_(True)  # a part may have taken the gradient of some in a round that it did not end
        round.optimizer = make_optimizer(self.net, work, round.lr)
        if work.persist_optimizer and (stored := self.store.get("optimizer")):
            restore_optimizer(round.optimizer, stored)
        self.view.train()
        step, transfer = self._begin_parts(round)
        best = BestIterate(self.net, self._score, round.steps, work.local_checks)
        moment = recipe.augment.moment if recipe.augment else "raw"
        return LocalSteps(round, work, plan, step, transfer, moment, best, self.view.after_step)

    def _begin_parts(self, round: LocalRound) -> tuple[StepFunction, Transfer | None]:
        """Lets the parts begin a round; returns what makes a step, and what changes the images of a batch, if any."""
        recipe = self.recipe
        begun = [term.begin(round) for term in recipe.terms if term.acts(round.phase)]
        round.terms = [term for term in begun if term]
        round.objective, round.update = recipe.objective.begin(round), recipe.update.begin(round)
        step = recipe.step.begin(round)
        round.after_step += [part.begin(round) for part in recipe.companions if part.acts(round.phase)]
        return step, recipe.augment.begin(round) if recipe.augment else None

    def end_steps(self, steps: LocalSteps) -> float:
        """Lets the parts end after the last step; returns the mean loss."""
        steps.end([part for part in self.recipe.client_parts() if part.acts(steps.round.phase)])
        if steps.work.persist_optimizer:
            self.store.put("optimizer", optimizer_tensors(steps.round.optimizer, self.net))
        return float(steps.total) / max(steps.round.steps, 1)

    def _score(self) -> float:
        """The primary metric of the model between two steps, turned so that more is better; NaN if undefined."""
        score, _ = self.validate()
        self.view.train()
        return float(BY_METRIC[self.metric].upwards(score))

    def validate(self, predict: Predict | None = None) -> tuple[float, float]:
        """(primary metric, loss) of `examine`."""
        return self.examine(predict)[:2]

    def examine(self, predict: Predict | None = None) -> tuple[float, float, dict[str, float]]:
        """(primary metric, loss, further numbers) on the validation split: means over the domains that define them."""
        self.view.eval()
        data, groups, size = self.data, self.data.validation_by_domain, self.experiment.run.evaluate_batch_size
        results = [data.task.examine(predict or self.net, data.evaluation(group, size)) for group in groups]
        names = data.task.further
        further = {name: mean_of_defined([result.further[name] for result in results]) for name in names}
        score = mean_of_defined([result.value for result in results])
        return score, mean_of([result.loss for result in results]), further
