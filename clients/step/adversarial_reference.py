"""FedADG's client step: features are aligned with a reference that all clients learn to generate together."""

import itertools
import logging
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from clients.optimizers import make_optimizer, optimizer_tensors, restore_optimizer
from clients.parts import Batch, LocalRound, Step, StepFunction
from clients.step.feature_generator import (
    Discriminator,
    Generator,
    Undrawn,
    discriminator_loss,
    feature_loss,
    generator_loss,
    label_code,
    smoothed_cross_entropy,
)
from clients.tools.networks import apart, descend
from fedsim.common.seeding import torch_generator
from fedsim.models.layout import evaluating
from fedsim.settings.tuned import DECADE, Tuned
from fedsim.tensors.arrays import load_arrays

log = logging.getLogger("fedsim")
DISCRIMINATOR = "discriminator"  # the store's entry
OPTIMIZER = "discriminator-optimizer"  # the store's entry
WON, MOST_WON = 1e-3, 100  # a loss of the discriminator below the first, in more steps than the second, gives a warning


@dataclass
class Players:
    """The two networks that are trained besides the main network in one round.

    `won` and `longest` count steps in which the discriminator D had nearly no loss: the current series, and the
    longest.
    """

    generator: Generator
    discriminator: Discriminator
    g_optimizer: torch.optim.Optimizer
    d_optimizer: torch.optim.Optimizer
    randomness: torch.Generator
    won: Tensor
    longest: Tensor


@dataclass(frozen=True)
class AdversarialReference(Step):
    """The first E0 / (E0 + E1) of a round's steps are smoothed cross-entropy alone; each later step has three parts.

    With features h = F(x) and h' = G([z, e(y)]), z ~ U(0, 1) of d_noise numbers, for the labels of the batch, in order:

        D:      L_d = mean[(1 - D(h'))^2 + D(h)^2]                     h in eval mode; h and h' constant
        F, Cl:  L = lambda1 CE_smooth(Cl(h), y) + lambda0 mean (1 - D(h))^2 + terms
        G:      L_g = mean D(h')^2

    Source: FedADG (Zhang et al., 2021, arXiv 2111.10487). All clients train the generator G and the server averages it
    (bank `generator`). The discriminator D never leaves its client, which stores it with its optimizer. G, D and their
    noise have random numbers of their own, so that lambda0 = 0, lambda1 = 1, smooth = 0, E0 = 0 gives FedAvg bit for
    bit.

    The paper's E0 and E1 are epochs. Here they divide the steps of a round, and `[train]`
    sets the number of these steps: train.epochs = E0 + E1 is the paper's round, and other
    methods get the same amount of work. The paper's G step pushes generated features away
    from extracted ones, against its stated aim, and its L_d gives nearly no gradient to a D
    that is wrong. Therefore the losses of the PACS code are the default, with P frozen as
    the paper says. The classifier is one linear layer, which can compute the same functions
    as the paper's two layers with no activation between them. G ends in a ReLU where the
    features of the run's initial network are nonnegative. All networks are trained by the experiment's optimizer. We
    leave out the warm-up within the round, which keeps the learning rates of the released
    code far below their nominal values.

    The released PACS code is projection = "kaiming", method.weights = "uniform". The released VLCS code is gen =
    "frozen", d_loss = "max", projection = "trained", label_first = true, smooth = 0.2, s = 0.6, E0 = 5, E1 = 10 and
    uniform weights. The code of FedDG_Benchmark also has lambda1 = 0.15, lambda0 = 0.85.

    lambda1, lambda0: the weights of the cross-entropy and of L_f, the loss mean (1 - D(h))^2
    E0, E1: the shares of the two phases
    smooth: label smoothing; every other class gets smooth / (C - 1)
    s: the size of a label's code
    d_noise, width: the sizes of G's noise and of its hidden layer
    r, hidden: the sizes of D's projection and of its hidden layer
    rate: the learning rate of G and D divided by that of F. In both released codes it is 0.7 (7e-4 for 1e-3, 7e-3 for
    1e-2)
    gen: "pull" as above; "paper" has mean (1 - D(h'))^2; "frozen" never trains G
    d_loss: "ls" as above; "max" is the paper's -mean (1 - D(h))^2 - mean D(h')^2
    projection: D's P is "frozen" with norm 1, "trained" from that start, or "kaiming" (another start, and trained)
    label_first: true sends the label's code through P as well; false appends it after P
    """

    lambda1: Annotated[float, Field(ge=0)] = 0.85
    lambda0: Annotated[float, Field(ge=0), Tuned("log:0.015:1.5", DECADE)] = 0.15
    E0: Annotated[int, Field(ge=0)] = 3
    E1: Annotated[int, Field(ge=1)] = 7
    smooth: Annotated[float, Field(ge=0, lt=1)] = 0.1
    s: Annotated[float, Field(gt=0, lt=1)] = 0.7
    d_noise: Annotated[int, Field(ge=0)] = 2048
    width: Annotated[int, Field(ge=1)] = 4096
    r: Annotated[int, Field(ge=1)] = 1024
    hidden: Annotated[int, Field(ge=1)] = 1024
    rate: Annotated[float, Field(gt=0)] = 0.7
    gen: Literal["pull", "paper", "frozen"] = "pull"
    d_loss: Literal["ls", "max"] = "ls"
    projection: Literal["frozen", "trained", "kaiming"] = "frozen"
    label_first: bool = False
    own_loss: ClassVar[bool] = True
    bank: ClassVar[str] = "generator"
    requires: ClassVar[dict[str, str]] = {"banks": "feature_generator"}
    discloses: ClassVar[str] = (
        "each round a generator that the client has trained to imitate the features of its images, class by class; "
        "the other clients get the generators' average"
    )
    columns: ClassVar[tuple[str, ...]] = ("discriminator_loss", "generator_loss", "feature_loss", "ce_loss")

    def begin(self, round: LocalRound) -> StepFunction:
        """The step function of the phase that the round is in."""
        players = round.scratch[self.bank] = self._players(round)
        before = round.steps * self.E0 // (self.E0 + self.E1)
        adversarial = self._adversarial(round, players, round.steps / max(round.steps - before, 1))
        taken = itertools.count()

        def step(batch: Batch) -> Tensor:
            if next(taken) >= before:
                return adversarial(batch)
            round.forward(batch)
            loss = smoothed_cross_entropy(batch.logits.float(), batch.labels, self.smooth)
            return round.apply_gradients(round.with_terms(batch, loss))

        return step

    def end(self, round: LocalRound) -> None:
        """Sends G and stores D and its momentum."""
        players = round.scratch[self.bank]
        players.discriminator.requires_grad_(True)
        round.send(self.bank, players.generator.state_dict())
        round.store.put(DISCRIMINATOR, players.discriminator.state_dict())
        if buffers := optimizer_tensors(players.d_optimizer, players.discriminator):
            round.store.put(OPTIMIZER, buffers)
        if float(players.longest) >= MOST_WON:
            log.warning(
                "client %s, round %d: the discriminator's loss was below %g for %d steps in a row; it separates "
                "generated from extracted features without error, so that the features learn nothing from it",
                round.client, round.round, WON, int(players.longest),
            )  # fmt: skip

    def _adversarial(self, round: LocalRound, players: Players, share: float) -> StepFunction:
        """share: all steps of the round per adversarial step, which turns the tallies into means over the latter."""

        def step(batch: Batch) -> Tensor:
            code = label_code(batch.labels, round.classes, self.s)
            z = torch.rand(len(code), self.d_noise, generator=players.randomness).to(code.device, non_blocking=True)
            with round.autocast(), torch.set_grad_enabled(self.gen != "frozen"):
                generated = players.generator(z, code)  # one draw of noise serves all three parts
            round.tally("discriminator_loss", share * self._train_discriminator(round, players, batch, generated, code))
            loss = self._train_network(round, players, batch, code, share)
            if self.gen != "frozen":
                with round.autocast():
                    scores = players.discriminator(generated, code)
                round.tally("generator_loss", share * descend(players.g_optimizer, generator_loss(scores, self.gen)))
            return loss

        return step

    def _train_discriminator(
        self, round: LocalRound, players: Players, batch: Batch, generated: Tensor, code: Tensor
    ) -> Tensor:
        with evaluating(round.net), torch.no_grad(), round.autocast():
            extracted = round.net.features(batch.images)
        players.discriminator.requires_grad_(True)
        with round.autocast():
            scores = players.discriminator(torch.cat([extracted, generated.detach()]), torch.cat([code, code]))
        real, made = scores.chunk(2)
        loss = discriminator_loss(real, made, self.d_loss)
        score_gap = discriminator_loss(real.detach(), made.detach(), "ls")
        descend(players.d_optimizer, loss)
        players.discriminator.requires_grad_(False)
        players.won = (players.won + 1) * (score_gap < WON)
        players.longest = torch.maximum(players.longest, players.won)
        return loss.detach()

    def _train_network(self, round: LocalRound, players: Players, batch: Batch, code: Tensor, share: float) -> Tensor:
        round.forward(batch)
        ce_loss = smoothed_cross_entropy(batch.logits.float(), batch.labels, self.smooth)
        loss = self.lambda1 * ce_loss
        if self.lambda0 != 0:
            with round.autocast():
                adversarial = feature_loss(players.discriminator(batch.features, code))
            loss = loss + self.lambda0 * adversarial
            round.tally("feature_loss", share * adversarial)
        loss = round.apply_gradients(round.with_terms(batch, loss))
        round.tally("ce_loss", share * ce_loss)
        return loss

    def _players(self, round: LocalRound) -> Players:
        """G as received and D as stored, with their optimizers."""
        generator, discriminator = self._generator(round), self._discriminator(round)
        g_optimizer = make_optimizer(generator, round.train, self.rate * round.lr)
        d_optimizer = make_optimizer(discriminator, round.train, self.rate * round.lr)
        if buffers := round.store.get(OPTIMIZER):
            restore_optimizer(d_optimizer, buffers)
        zero = torch.zeros((), device=round.device)
        return Players(generator, discriminator, g_optimizer, d_optimizer, round.generator("feature noise"), zero, zero)

    def _generator(self, round: LocalRound) -> Generator:
        """G as received; in the first round it is drawn, and is the same on all clients."""
        sizes = self.d_noise, round.classes, self.width, round.net.feature_dim, features_are_nonnegative(round)
        if received := round.record(self.bank, "adversarial_reference"):
            generator = Generator(*sizes, Undrawn)
            load_arrays(generator, received)
        else:
            with apart(torch_generator(round.seed, "generator"), round.device):
                generator = Generator(*sizes)
        return generator.to(round.device)

    def _discriminator(self, round: LocalRound) -> Discriminator:
        """D as stored; in the client's first round it is drawn, and is the client's own."""
        stored = round.store.get(DISCRIMINATOR)
        sizes = round.net.feature_dim, round.classes, self.r, self.hidden, self.projection, self.label_first
        with apart(torch_generator(round.seed, DISCRIMINATOR, round.client), round.device):
            discriminator = Discriminator(*sizes, Undrawn if stored else nn.Linear)
        if stored:
            discriminator.load_state_dict(stored)
        return discriminator.to(round.device)


def features_are_nonnegative(round: LocalRound) -> bool:
    """Whether the network's features end in a ReLU: the outputs of linear layers have both signs.

    The run's initial network shows it on a few images of noise, the same for all clients and for a resumed run.
    """

    def look() -> bool:
        like = round.data.raw(round.data.training_positions()[:1])
        with apart(torch_generator(round.seed, "nonnegative features"), round.device), torch.no_grad():
            net = round.build_net().to(round.device).eval()
            noise = torch.rand(8, *like.shape[1:]).to(round.device)
            return bool((net.features(round.data.normalize(noise)) >= 0).all())

    return round.remembered("nonnegative features", None, look)
