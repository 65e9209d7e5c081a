"""FADA's target client: it measures how tight its clusters are under each source's model, and trains the generator."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from clients.batches.shuffled import chunks
from clients.parts import LocalRound, Unlabelled
from clients.step.disentangling_adversary import DisentanglingAdversary
from clients.tools.disentangling import FEATURES, advance, clustered, identifier, make_adam, source_loss, tightness
from fedsim.common.errors import UserError
from fedsim.common.seeding import numpy_rng, stream_seed
from fedsim.models.layout import evaluating
from fedsim.models.tasks import EVALUATION_BATCH
from fedsim.parts.part import RecipeParts
from fedsim.settings.effect import Above, Only, Size
from fedsim.settings.experiment import Experiment
from fedsim.tensors.arrays import load_arrays

CANDIDATE, IDENTIFIER = "candidate:", "identifier:"  # prefixes of the records that the server sends


@dataclass(frozen=True)
class AdversarialTarget(Unlabelled):
    """The phase `attention` measures I of the received model and of every candidate; the phase `adapt` trains G.

        I = sum_r 1/(2 n_r) sum_{i,j in r} ||f_i - f_j||_2   over the k = C clusters of k-means on features f = G(x)

    The features are those of one sample of the target's images, which is the same for all models and rounds. The phase
    `adapt` makes passes over the images with the loss -(1/N) sum_i E log DI_i(G(x)), which trains G alone. Without
    identifiers (the first round) nothing is trained. Then it sends G with its running statistics, and the features of
    the sample.

    Source: FADA (Peng et al., ICLR 2020), its target client. No label is read. Features are computed in eval mode from
    images without augmentation; training images are augmented.

    sample: m, the number of images of the sample (all where there are fewer)
    squared: use squared distances in I
    epochs: E_t; 0 does not train G
    lr, weight_decay: the settings of Adam
    di_input: the input of DI, which is that of the sources' part (`disentangling_adversary.di_input`)
    """

    sample: Annotated[int, Field(ge=2), Only(Size.TARGET_IMAGES)] = 512
    squared: bool = False
    epochs: Annotated[int, Field(ge=0)] = 1
    lr: Annotated[float, Field(gt=0), Only(epochs=Above(0))] = 2e-4
    weight_decay: Annotated[float, Field(ge=0), Only(epochs=Above(0))] = 5e-4
    di_input: Annotated[Literal["feature", "invariant"], Only(epochs=Above(0))] = "feature"

    @property
    def discloses(self) -> str:
        """The data that leave the unseen domain's machine."""
        return f"of the unseen domain, to all clients: feature vectors of up to {self.sample} single images"

    def refuses(self, recipe: RecipeParts) -> str:
        """The identifiers of the sources take the same input."""
        for part in recipe.of(DisentanglingAdversary):
            if part.di_input != self.di_input:
                return (
                    f"the sources' identifiers take {part.di_input!r} as input and the target's {self.di_input!r}; "
                    "set disentangling_adversary.di_input alone, which sets both"
                )
        return super().refuses(recipe)

    def check(self, experiment: Experiment) -> None:
        """Refuses a frozen extractor, which could not be adapted."""
        if experiment.model.train == "head" and self.epochs:
            raise UserError("adversarial_target trains the backbone, which model.train = 'head' freezes; use 'all'")

    def answer(self, round: LocalRound) -> None:
        """Does the work of the phase."""
        {"attention": self._attention, "adapt": self._adapt}[round.phase](round)

    def _attention(self, round: LocalRound) -> None:
        state = round.net.state_dict()
        seed = stream_seed(round.seed, "clusters") % 2**32
        values = []
        for name in ["", *sorted(name for name in round.records if name.startswith(CANDIDATE))]:
            if name:
                load_arrays(state, round.records[name], list(round.records[name]))
            features = self._features(round)
            values.append(tightness(features, clustered(features, round.classes, seed), self.squared))
        round.send("tightness", {"tightness": torch.tensor(values, dtype=torch.float64)})

    def _adapt(self, round: LocalRound) -> None:
        net, data = round.net, round.data
        networks = [self._identifier(round, name) for name in sorted(round.records) if name.startswith(IDENTIFIER)]
        if networks and self.epochs:
            optimizer = make_adam(net.backbone, self.lr, self.weight_decay)
            orders = (round.rng(f"adapt-{epoch}").permutation(data.examples) for epoch in range(self.epochs))
            for part in (part for order in orders for part in chunks(order, round.train.batch_size)):
                features = net.pooled(data.batch(part).images)
                seen = net.bottleneck(features) if self.di_input == "invariant" else features
                loss = torch.stack([source_loss(network(seen)) for network in networks]).mean()
                advance(loss, (optimizer, [net.backbone]))
        prefix = "backbone."
        round.send("generator", {name: value for name, value in round.state_of().items() if name.startswith(prefix)})
        round.send(FEATURES, {FEATURES: self._features(round)})

    def _identifier(self, round: LocalRound, name: str) -> torch.nn.Sequential:
        arrays = round.records[name]
        network = identifier(arrays["0.weight"].shape[1]).to(round.device).requires_grad_(False)
        load_arrays(network, arrays)
        return network

    @torch.no_grad()
    def _features(self, round: LocalRound) -> Tensor:
        """G(x) of the sample, [m, d], in eval mode."""
        net, data = round.net, round.data
        count = min(self.sample, data.examples)
        positions = np.sort(numpy_rng(round.seed, "adaptation-sample").permutation(data.examples)[:count])
        parts = [positions[start : start + EVALUATION_BATCH] for start in range(0, count, EVALUATION_BATCH)]
        with evaluating(net):
            return torch.cat([net.pooled(data.transforms.normalize(data.raw(part))).float() for part in parts])
