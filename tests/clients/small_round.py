"""A client's local round on invented images, for tests of client parts."""

from dataclasses import replace

import numpy as np
import torch
from support import small_experiment
from torch import nn

from clients.local_data import LocalData
from clients.optimizers import make_optimizer
from clients.parts import LocalRound, Objective, Step
from clients.store import ClientStore
from clients.tools.networks import view_of
from fedsim.data import ClientData
from fedsim.data.augment import Normalization, Transforms
from fedsim.models import build_model
from fedsim.models.net import Net
from fedsim.runs.plan import resolve
from fedsim.runs.workspace import Workspace
from fedsim.settings import ModelSettings, TrainSettings

CONFIG = {"round": 1, "phase": "train", "client": "rot15"}


def colour_images(count: int, size: int = 16, seed: int = 0, offset: int = 60) -> np.ndarray:
    """Images uint8 [count, 3, size, size] of noise; `offset` sets their brightness."""
    noise = np.random.default_rng(seed).integers(0, 120, (count, 3, size, size))
    return (noise + offset).astype(np.uint8)


def small_data(images: np.ndarray, validation: int = 0, client: str = "a", augment=lambda x: x) -> LocalData:
    """The images as one client's data, the last `validation` of them held out; labels 0, 1, 2, 0, ..."""
    count = len(images)
    split = np.arange(count - validation), np.arange(count - validation, count)
    data = ClientData(
        client, images, np.arange(count) % 3, *split, ("x", "y", "z"), (client,), np.zeros(count, np.int64)
    )
    return LocalData(data, Transforms(augment, Normalization()), torch.device("cpu"))


def small_round(
    data: LocalData | None = None, records: dict | None = None, net: nn.Module | None = None, **changes
) -> LocalRound:
    """Round 1 of client `a`, without data if none are given."""
    values = {
        "client": data.client if data else "a", "net": net, "train": TrainSettings(), "classes": 3, "round": 1,
        "rounds": 2, "phase": "train", "seed": 0, "device": torch.device("cpu"), "store": ClientStore(None),
        "data": data, "records": records or {},
    }  # fmt: skip
    return LocalRound(**{**values, **changes})


def digits_net(size: int = 16, channels: int = 3, bottleneck: int = 0, norm=None, classes: int = 3, seed: int = 0):
    settings = ModelSettings(backbone="digits-cnn-bn", bottleneck=bottleneck)
    return build_model(settings, classes, channels, size, norm, seed)


def small_net(seed: int = 0) -> Net:
    """Convolution, batch norm, head; three classes."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Net(layers, 4, 3)


class Scaled(nn.Module):
    """A network whose features are its input times a parameter, with a linear head of given weights."""

    def __init__(self, weight):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.head.weight.data = weight

    def features(self, x):
        return self.scale * x

    def forward(self, x):
        return self.head(self.features(x))


def ready_round(net: nn.Module, records: dict | None = None, images: int = 6, size: int = 16, lr=0.1, **changes):
    """A round on so many images that trains this network with an optimizer of its own."""
    data = small_data(colour_images(images, size))
    round = small_round(data, records, net.train(), **{"steps": 1, "lr": lr, **changes})
    round.optimizer = make_optimizer(net, round.train, lr)
    return round


def snapshot(module: nn.Module) -> dict:
    return {name: value.clone() for name, value in module.state_dict().items()}


def changed(module: nn.Module, before: dict) -> set:
    """The names of its tensors that differ from a copy."""
    return {name for name, value in module.state_dict().items() if not value.equal(before[name])}


def step_of(part, round: LocalRound):
    """A function that takes one step with this step, objective or update, and with FedAvg's parts for the others."""
    own = part.begin(round)
    if isinstance(part, Step):
        return own
    if isinstance(part, Objective):
        round.objective = own
    else:
        round.update = own

    def step(batch):
        before = replace(batch)
        loss = round.move(lambda: round.loss_of(batch))
        for function in round.after_step:
            function(before)
        return loss

    return step


def client_of(tmp_path, recipe, name="rot15", **sections):
    """A client of the small experiment with another recipe."""
    space = Workspace(resolve(small_experiment(tmp_path, **sections)))
    space.recipe = recipe
    space.places = recipe.share.place(space.net)
    space.view = view_of(space.net, space.places)
    state = space.view.state
    space.initial = {key: state[key].clone() for key, place in space.places.items() if place in ("upload", "local")}
    return space.client(name, "")


def fit(client, config=CONFIG):
    """One round from the client's present tensors; names, arrays and metrics of its reply."""
    arrays = [client.state[name].numpy().copy() for name in client.names("train")]
    sent, examples, metrics = client.fit(arrays, config)
    return dict(zip(client.upload_names(), sent, strict=True)), examples, metrics
