"""What a worker process keeps warm between messages: the network of an experiment, and the clients it has served."""

import functools
import os
from typing import TYPE_CHECKING

import torch

from clients.base import DomainClient
from clients.local_data import LocalData
from clients.store import ClientStore, client_folder
from fedsim.assembly import build_net, build_recipe
from fedsim.data import benchmark, client_names, load_client, load_pooled
from fedsim.data.augment import make_transforms
from fedsim.errors import UserError
from fedsim.experiment import Experiment, parse_experiment

if TYPE_CHECKING:
    from fedsim.run.target import TargetEvaluator


def pick_device(wanted: str) -> torch.device:
    """`auto` takes CUDA when there is one; asking for CUDA without one is an error."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device is 'cuda' but PyTorch sees no CUDA device; use 'auto' or 'cpu'")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def set_threads(threads: int, workers: int = 1) -> int:
    """CPU threads of this process: as asked, or the cores shared between the workers."""
    count = threads or max((os.cpu_count() or 1) // workers, 1)
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    return count


def source_clients(experiment: Experiment) -> list[str]:
    """Names of the clients that train, in domain order; `pooled` alone when the recipe pools all source data."""
    if build_recipe(experiment).pooled:
        return ["pooled"]
    return client_names(experiment.data, experiment.run.target)


class Workspace:
    """The network, recipe and clients of one experiment in one process.

    All clients share one network: each message brings the shared tensors, each client's store the personal ones.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.device = pick_device(experiment.run.device)
        self.recipe = build_recipe(experiment)
        self.net = build_net(experiment, self.recipe).to(self.device)
        if self.device.type == "cuda":
            self.net = self.net.to(memory_format=torch.channels_last)
        self.places = self.recipe.share.place(self.net)
        state = self.net.state_dict()
        self.initial = {
            name: state[name].detach().cpu().clone()
            for name, place in self.places.items()
            if place in ("upload", "local")
        }
        self.clients: dict[tuple[str, str, str], DomainClient] = {}

    @functools.cached_property
    def target(self) -> "TargetEvaluator":
        """The evaluation on the unseen domain; its images are opened here, on first use."""
        from fedsim.run.target import TargetEvaluator

        return TargetEvaluator(self)

    def client(self, name: str, state_folder: str, run: str = "") -> DomainClient:
        """The warm client of that name in a run (its token), with its state below `state_folder`."""
        key = (name, state_folder, run)
        if key not in self.clients:
            settings = self.experiment.data
            data = (
                load_pooled(settings, self.experiment.run.target) if name == "pooled" else load_client(settings, name)
            )
            channels = benchmark(settings).channels
            local = LocalData(data, make_transforms(settings, channels), self.device)
            folder = client_folder(state_folder, name)
            self.clients[key] = DomainClient(
                self.experiment,
                self.recipe,
                self.net,
                self.places,
                self.initial,
                local,
                ClientStore(folder, name, run),
                self.device,
                [name] if self.recipe.pooled else client_names(settings, self.experiment.run.target),
            )
        return self.clients[key]


@functools.lru_cache(maxsize=2)
def workspace(settings: str, root: str | None = None) -> Workspace:
    """The process's workspace of an experiment, given as the TOML text that the server sends.

    `root` is the data folder of a machine of its own (empty: its $FEDSIM_DATA): the server's paths mean nothing there.
    """
    experiment = parse_experiment(settings)
    return Workspace(experiment if root is None else experiment.replace(data={"root": root, "cache": ""}))
