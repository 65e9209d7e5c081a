"""The data that a local step uses: random images as a client's data, and invented records of the server."""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from clients.parts import Batch, LocalRound
from fedsim.data import benchmark
from fedsim.methods.recipe import Recipe
from fedsim.models import Net
from fedsim.models.tasks import rules_of
from fedsim.settings.experiment import Experiment
from strategies.banks.feature_styles import ROWS, STYLE, FeatureStyles
from strategies.banks.global_batch_norm import GlobalBatchNorm
from strategies.banks.prototypes import Prototypes
from strategies.parts import ServerRound

OTHERS = ("other0", "other1")  # clients whose records a client receives
TARGET_FEATURES = 512  # number of features in FADA's bank
DOMAINS = 4  # of a client's images


class RandomData:
    """The part of a client's data that steps use: one batch of random images, which belong to several domains in turn.

    Only rows that compare the domains of a client look at these.
    """

    def __init__(self, experiment: Experiment, device: torch.device) -> None:
        generator, batch, side = (
            torch.Generator().manual_seed(0),
            experiment.train.batch_size,
            experiment.data.image_size,
        )
        bench = benchmark(experiment.data)
        self.images = torch.rand(batch, bench.channels, side, side, generator=generator).to(device)
        self.task = rules_of(bench.task, experiment.data, experiment.train)
        outputs = len(bench.outputs)
        if self.task.maps:
            self.labels = discs(batch, outputs, side).to(device)
        else:
            self.labels = torch.randint(outputs, (batch,), generator=generator).to(device)
            self.class_counts = self.labels.bincount(minlength=outputs).cpu().numpy()
        self.examples = batch
        self.domains = np.arange(batch) % DOMAINS
        self.augment: Callable | None = None

    def batch(self, positions: np.ndarray | None = None) -> Batch:
        """The batch, as prepared for a step, or these images of it."""
        own = slice(None) if positions is None else torch.from_numpy(positions)
        images, normalize = self.transfer(self.images[own]), self.normalize
        rows = self.training_positions() if positions is None else positions
        return Batch(normalize(images), self.labels[own], self.images[own], normalize, images, normalize,
                     positions=rows)  # fmt: skip

    def transfer(self, images: torch.Tensor) -> torch.Tensor:
        """The images after the recipe's augmentation, which acts here before the normalization, whatever its moment."""
        return self.augment(images, self.training_positions()) if self.augment else images

    def raw(self, positions: np.ndarray) -> torch.Tensor:
        """Images in [0, 1], before any augmentation."""
        return self.images[torch.as_tensor(positions)]

    @staticmethod
    def normalize(images: torch.Tensor) -> torch.Tensor:
        """The images, normalized as the batch is."""
        return images * 2 - 1

    def evaluation(self, positions: np.ndarray, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs of images and labels."""
        yield self.images[: len(positions)] * 2 - 1, self.labels[: len(positions)]

    def training_positions(self) -> np.ndarray:
        """Positions of all images."""
        return torch.arange(self.examples).numpy()


def discs(batch: int, structures: int, side: int) -> torch.Tensor:
    """Masks uint8 [batch, structures, side, side]: discs in the middle, one smaller than the other."""
    axis = torch.arange(side) - (side - 1) / 2
    distance = (axis[:, None].square() + axis.square()).sqrt()
    masks = torch.stack([distance < side / (3 + structure) for structure in range(structures)])
    return masks.to(torch.uint8).expand(batch, -1, -1, -1).clone()


def made_up_records(net: Net, classes: int) -> dict[str, dict[str, np.ndarray]]:
    """Records that a server computes from models; here the network itself, or numbers as small as an update's."""
    state = {name: value.detach().cpu().numpy().copy() for name, value in net.state_dict().items()}
    small = {name: 1e-3 * state[name] for name, _ in net.named_parameters()}
    head = {name: array for name, array in small.items() if name.startswith("head.")}
    rng = np.random.default_rng(0)
    return {
        GlobalBatchNorm.name: state,
        "control": small,
        "momentum": small,
        "classifier_gradient": head,
        "class_reference": {},
        "generator": {},
        "heads": {f"{owner}:{name}": state[name] for owner in OTHERS for name in head},
        Prototypes.name: {  # one per class, as FPL's server sends them when it finds no clusters
            "cluster_protos": rng.random((classes, net.feature_dim), np.float32),
            "classes": np.arange(classes),
        },
        FeatureStyles.name: {STYLE: rng.random((ROWS, feature_channels(net)), np.float32)},
        "target_features": {"target_features": rng.random((TARGET_FEATURES, pooled_width(net)), np.float32)},
    }


def feature_channels(net: Net) -> int:
    """The number of channels after stage 1; 1 for a network that shares no styles of features."""
    return net.styles.channels if hasattr(net, "styles") else 1


def pooled_width(net: Net) -> int:
    """The number of the backbone's features, before a bottleneck."""
    layers = [module.in_features for module in net.bottleneck.modules() if isinstance(module, torch.nn.Linear)]
    return layers[0] if layers else net.feature_dim


def collected_records(recipe: Recipe, round: LocalRound) -> dict[str, dict[str, np.ndarray]]:
    """Records of banks that are collected once, made of this client's images in the names of two other clients."""
    found = {}
    contributors = recipe.contributors()
    for bank in recipe.banks:
        if bank.when == "once" and bank.name in contributors:
            own = contributors[bank.name].collect(round)
            entries = dict.fromkeys((*OTHERS, round.client), own)
            server = ServerRound(1, 1, list(entries), {})
            found[bank.name] = bank.hand_out(bank.merge({}, entries, server), round.client, server)
    return found
