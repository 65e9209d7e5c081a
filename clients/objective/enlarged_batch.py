"""StableFDG's loss: batches with the styles of another client, and enlarged by samples with new styles."""

import copy
import itertools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.local_data import on_device
from clients.parts import Batch, LocalRound, Objective, StepFunction
from clients.tools.cut_network import CutNetwork
from clients.tools.networks import statistics_frozen
from fedsim.models.inserts.feature_highlighter import Highlighter
from fedsim.models.inserts.style_exploration import (
    FEWEST,
    StyleExploration,
    StyleLayers,
    explored_styles,
    mixed,
    moments,
    shared_styles,
    style_of,
)
from fedsim.models.layout import evaluating
from fedsim.models.net import Net
from fedsim.parts.facts import Fact

BANK, STYLE = "feature_style", "style"  # the record, and the array in it


@dataclass(frozen=True)
class EnlargedBatch(Objective):
    """L = CE(h(f(x)), y) over the batch as it leaves the styles' layers, with all labels, + terms.

    Sharing and shifting, after stage 1, in a batch with probability `sharing`: the ceil(B/2) samples that k-means++
    draws, whose styles are the most diverse, keep them, and the others get styles drawn from another client's:

        x' = sigma' (x - mu)/sigma + mu',   mu' = m_mu + e1 d_mu,   sigma' = max(m_sigma + e2 d_sigma, 0),   e ~ N(0, 1)

    mu and sigma carry no gradient. Batches with fewer than 4 samples, rounds without a partner's style, and the first
    round have no sharing. Then the insert `style_exploration` adds samples. If the recipe has the insert
    `feature_highlighter`, a sample's partner is the next one of its class in the batch.

    A class of which the batch has one sample gets a second one, and its partner, from a class-balanced batch with one
    image of each class that the client has. It passes through the network without a gradient and without an effect on
    running statistics, and only with a batch that has such a class. In the released code it has both, and the partner
    there is of a wrong class, because the row is taken for the class's number.

    Each client sends its style (m_mu, m_sigma, d_mu, d_sigma): mean and spread of the mu and sigma of its training
    images, after stage 1 of the received model in eval mode. Terms see the features and labels of the enlarged batch. A
    client counts with its images alone.

    Source: StableFDG (Park et al., NeurIPS 2023), style-based learning. `sharing = 0`, `method.style_exploration.p = 0`
    and no highlighter give FedAvg's step bit for bit; nothing is sent then.

    sharing: the probability of sharing, per batch
    balanced: a new class-balanced batch per local "epoch", or per "step" as the released code does on Office-Home
    """

    sharing: Annotated[float, Field(ge=0, le=1)] = 0.5
    balanced: Literal["epoch", "step"] = "epoch"
    assumes = (Fact.OBJECTIVE, Fact.IMAGES)
    breaks = (Fact.ROWS,)
    compiles: ClassVar[bool] = False
    requires: ClassVar[dict[str, str]] = {"inserts": "style_exploration", "banks": "feature_styles"}

    @property
    def bank(self) -> str:
        """The record exists only where styles are shared."""
        return BANK if self.sharing else ""

    @property
    def sets(self) -> dict[str, dict[str, object]]:
        """A bank to which nothing is sent where nothing is shared."""
        return {} if self.sharing else {"feature_styles": {"shared": False}}

    @property
    def discloses(self) -> str:
        """What a style shows."""
        if not self.sharing:
            return ""
        return (
            "each round, to the server and one other client: mean and spread, over all training images, of the channel "
            "means and standard deviations of the first stage's features"
        )

    def begin(self, round: LocalRound) -> StepFunction:
        """Sends the client's style and returns the loss, whose draws are made on the host."""
        net, rng, foreign = round.net, round.rng("styles"), self._foreign_style(round)
        highlighter = highlighter_of(net)
        labels = training_labels(round)
        balanced = ClassBalanced(round, labels, self._steps_between_draws(round), highlighter, rng)
        steps, layers = itertools.count(), net.styles
        assert isinstance(layers, StyleLayers)  # of the insert that the objective needs

        def draw(batch: Batch) -> tuple[StylePass, bool, Tensor, Mapping[str, Any]]:
            batch_labels, number = labels[batch.positions], next(steps)
            share = foreign is not None and rng.random() < self.sharing
            styles = StylePass(layers.part, layers.explored, batch_labels, foreign if share else None, rng)
            lone = balanced.serves(batch_labels, bool(styles.active))
            if lone:
                balanced.draw(number)
            return styles, lone, batch.labels, rng.bit_generator.state

        def loss(batch: Batch) -> Tensor:
            styles, lone, drawn_labels, rng.bit_generator.state = batch.once(self, lambda: draw(batch))
            styles = copy.copy(styles)
            styles.balanced = balanced.passed() if lone else styles.balanced
            paired = highlighter.paired(styles.partners) if highlighter else nullcontext()
            return enlarged_loss(round, layers, styles, paired, batch, drawn_labels)

        return loss

    def _steps_between_draws(self, round: LocalRound) -> float:
        """After how many steps the class-balanced images are drawn anew: an epoch's, or one."""
        every = round.steps / max(round.epochs, 1e-9) if self.balanced == "epoch" else 1.0
        return max(every, 1.0)

    def _foreign_style(self, round: LocalRound) -> Tensor | None:
        """Sends the client's style; returns the one that it got, if styles are shared and there is one."""
        if not self.sharing:
            return None
        round.send(BANK, {STYLE: own_style(round)})
        return round.tensors(BANK, "enlarged_batch").get(STYLE)


def lone_classes(labels: np.ndarray) -> np.ndarray:
    """The classes with exactly one sample, ascending."""
    classes, counts = np.unique(labels, return_counts=True)
    return classes[counts == 1]


def drawn_classes(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """The classes [count] of samples that are to be added, so that the classes in `labels` become equally frequent.

    Each time the classes with the fewest samples are drawn, all of them if they fit, otherwise as many as fit at
    random; a drawn class counts as one sample more.
    """
    classes, counts = np.unique(labels, return_counts=True)
    drawn: list[np.ndarray] = []
    while count > 0:
        fewest = np.flatnonzero(counts == counts.min())
        fewest = fewest if len(fewest) <= count else rng.choice(fewest, count, replace=False)
        counts[fewest] += 1
        count -= len(fewest)
        drawn.append(classes[fewest])
    return np.concatenate(drawn) if drawn else classes[:0]


def picked_rows(labels: np.ndarray, classes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random row of `labels` for each of these classes, which all occur there."""
    order = np.argsort(labels, kind="stable")
    first = np.searchsorted(labels[order], classes, side="left")
    count = np.searchsorted(labels[order], classes, side="right") - first
    return order[first + rng.integers(count)]


def partner_rows(labels: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The row of every sample's partner: the next one of its class in batch order, after the last one the first.

    A class with one sample gets the row len(labels) + i of the sample i with its class in `other`, or its own row if
    there is none. `other` is ascending and has at most one of a class.
    """
    order = np.argsort(labels, kind="stable")
    follows = np.roll(order, -1)
    _, first, counts = np.unique(labels[order], return_index=True, return_counts=True)
    follows[first + counts - 1] = order[first]
    rows = np.empty_like(order)
    rows[order] = follows
    alone = order[first[counts == 1]]
    shared = alone[np.isin(labels[alone], other)]
    rows[shared] = len(labels) + np.searchsorted(other, labels[shared])
    return rows


@dataclass
class Balanced:
    """What the class-balanced batch gave in the present pass.

    labels: its classes, ascending. maps: the output of each stage. queries: the highlighter's mean queries [P, 30]
    """

    labels: np.ndarray
    maps: dict[int, Tensor] = field(default_factory=dict)
    queries: Tensor | None = None

    def note_map(self, stage: int, x: Tensor) -> Tensor:
        """Keeps the output of a stage, and changes nothing."""
        self.maps[stage] = x
        return x

    def note_queries(self, queries: Tensor) -> Tensor:
        """Keeps the queries, and makes everybody its own partner."""
        self.queries = queries
        return queries


class StylePass:
    """What one training pass does after each stage: `acts(stage, x)`, and its partners.

    labels: the classes of the rows, on the host; they grow with the batch. active: the stages that explore, drawn when
    the pass is made. foreign: another client's style [4, C_1] when this batch shares, otherwise None

    Draws come from `rng`, so that the host never waits for the device, and the streams of other parts stay as they are.
    """

    def __init__(
        self,
        part: StyleExploration,
        stages: list[int],
        labels: np.ndarray,
        foreign: Tensor | None,
        rng: np.random.Generator,
    ) -> None:
        self.part, self.labels, self.foreign, self.rng = part, labels, foreign, rng
        self.active = [stage for stage in stages if part.p and rng.random() < part.p]
        self.enlarged = False
        self.balanced = Balanced(labels[:0])

    def acts(self, stage: int, x: Tensor) -> Tensor:
        """The output x of a stage with other styles, and at the first active stage with more samples."""
        if x.shape[2] * x.shape[3] < 2:
            return x
        if stage == 1 and self.foreign is not None and len(x) >= FEWEST:
            x = self._shared(x)
        if stage not in self.active:
            return x
        return self._mixed(*(self._enlarged(stage, x) if not self.enlarged else _contents(x)))

    def partners(self, queries: Tensor) -> Tensor:
        """The query [N, 30] of every sample's partner."""
        other = self.balanced.queries
        rows = partner_rows(self.labels, self.balanced.labels)
        return (queries if other is None else torch.cat([queries, other]))[on_device(rows, queries.device)]

    def _shared(self, x: Tensor) -> Tensor:
        """Half of the batch with another client's styles."""
        half = len(x) - len(x) // 2
        gumbel = self.rng.gumbel(size=(half, len(x)))
        normal = self.rng.standard_normal((2, len(x), x.shape[1]))
        first = int(self.rng.integers(len(x)))
        assert self.foreign is not None
        return shared_styles(x, self.foreign, first, on(gumbel, x), on(normal, x), self.part.official)

    def _enlarged(self, stage: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Contents and styles of the batch, of second samples of lone classes, and of samples drawn from all these."""
        self.enlarged = True
        total = self.part.additions or len(x)
        balanced = self.balanced
        second = np.intersect1d(lone_classes(self.labels), balanced.labels)
        second = second if len(second) <= total else self.rng.choice(second, total, replace=False)
        if len(second):
            rows = np.searchsorted(balanced.labels, second)
            x = torch.cat([x, balanced.maps[stage][on_device(rows, x.device)].to(x.dtype)])
        labels = np.concatenate([self.labels, second])
        drawn = drawn_classes(labels, total - len(second), self.rng)
        picked = on_device(picked_rows(labels, drawn, self.rng), x.device)
        self.labels = np.concatenate([labels, drawn])
        content, mean, std = _contents(x)
        styles = explored_styles(mean, std, picked, self.part.alpha, clamp=not self.part.official)
        return torch.cat([content, content[picked]]), *styles

    def _mixed(self, content: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """The contents with styles that are mixed within the batch."""
        lam = on(self.rng.beta(self.part.beta, self.part.beta, size=(len(content), 1, 1, 1)), content)
        return mixed(content, mean, std, lam, on_device(self.rng.permutation(len(content)), content.device))


def _contents(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mu)/sigma with its gradient, and mu and sigma without."""
    mean, std = moments(x)
    return (x - mean) / std, mean.detach(), std.detach()


def on(values: np.ndarray, x: Tensor) -> Tensor:
    """Drawn values on the device and with the type of x."""
    return on_device(values.astype(np.float32), x.device).to(x.dtype)


def training_labels(round: LocalRound) -> np.ndarray:
    """The labels of all training images, in the order of their positions."""
    return round.data.labels[: round.data.examples].cpu().numpy()


def highlighter_of(net: Net) -> Highlighter | None:
    """The feature highlighter of a network, if it has one."""
    return next((module for module in net.modules() if isinstance(module, Highlighter)), None)


def enlarged_loss(
    round: LocalRound,
    layers: StyleLayers,
    styles: StylePass,
    paired: AbstractContextManager[Any],
    batch: Batch,
    labels: Tensor,
) -> Tensor:
    """The loss of a batch that the style layers enlarge; the batch gets its features, logits and labels.

    labels: those of the images that were drawn, which come first
    """
    net = round.net
    with round.autocast(), layers.acting(styles.acts), paired:
        batch.features = net.features(batch.images)
        batch.logits = net.head(batch.features)
    batch.labels = torch.cat([labels, on_device(styles.labels[len(labels) :], labels.device)])
    batch.loss = round.task.loss(batch.logits, batch.labels)
    return batch.loss


@torch.no_grad()
def own_style(round: LocalRound) -> Tensor:
    """s [4, C_1] of all training images: `style_of` the received model's maps after stage 1, in eval mode."""
    front = CutNetwork(round.net, round.net.stages[1][-1]).front
    images = round.data.evaluation(round.data.training_positions(), round.train.batch_size)
    with evaluating(round.net), round.autocast():
        styles = [torch.cat(moments(front(part)), dim=1).flatten(1) for part, _ in images]
    return style_of(*torch.cat(styles).chunk(2, dim=1))


class ClassBalanced:
    """One training image of each class that the client has, drawn and augmented anew after `every` steps. A client
    with one class has no such batch, because one image gives a norm layer no statistics."""

    def __init__(
        self, round: LocalRound, labels: np.ndarray, every: float, highlighter: Highlighter | None,
        rng: np.random.Generator,
    ) -> None:  # fmt: skip
        self.round, self.labels, self.every, self.highlighter, self.rng = round, labels, every, highlighter, rng
        self.classes = np.unique(labels)
        self.drawn, self.images = -1, torch.empty(0)

    def serves(self, labels: np.ndarray, styled: bool) -> bool:
        """Whether a batch with these labels needs such images: a class has one image in it, and layers act.

        styled: the style layers act on the batch
        """
        acting = styled or self.highlighter is not None
        return bool(acting and lone_classes(labels).size and len(self.classes) > 1)

    def draw(self, step: int) -> None:
        """Draws the images of this step, if it has others than the step before."""
        if self.drawn != int(step / self.every):
            self.drawn = int(step / self.every)
            self.images = self.round.data.batch(picked_rows(self.labels, self.classes, self.rng)).images

    @torch.no_grad()
    def passed(self) -> Balanced:
        """What the network in its present state, in training mode, makes of them; running statistics do not change."""
        balanced, net, layers = Balanced(self.classes), self.round.net, self.round.net.styles
        assert isinstance(layers, StyleLayers)
        paired = self.highlighter.paired(balanced.note_queries) if self.highlighter else nullcontext()
        with self.round.autocast(), statistics_frozen(net), layers.acting(balanced.note_map), paired:
            net.features(self.images)
        return balanced
