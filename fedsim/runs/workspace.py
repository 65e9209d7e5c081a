"""What a process keeps in memory between messages: the network of an experiment, and its clients with their data."""

import ctypes
import os
import sys
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from threadpoolctl import threadpool_limits

from clients.base import DomainClient
from clients.local_data import LocalData
from clients.store import ClientStore, client_folder
from clients.tools.networks import view_of
from clients.unlabelled_client import UnlabelledClient
from fedsim.common.cores import free_cores
from fedsim.common.errors import UserError
from fedsim.data import ClientData, domain_findings, domain_of, load_client, load_pooled, load_unlabelled
from fedsim.data.augment import Scaler, Transforms, make_transforms, to_float
from fedsim.data.findings import sent_findings
from fedsim.data.fingerprint import Fingerprints, fingerprint
from fedsim.data.names import plain
from fedsim.data.reader import content_hash
from fedsim.data.scaling import Moments, Scale, moments_of, scale_rule, scales_targets, summed_features
from fedsim.methods.recipe import Recipe
from fedsim.models import weight_statistics
from fedsim.models.blind_taps import widen_convolutions
from fedsim.models.net import Net
from fedsim.models.tasks import rules_of
from fedsim.runs.attacked_data import attacked, shifted_share
from fedsim.runs.conflicts import data_of_server
from fedsim.runs.frozen import frozen_content, frozen_record
from fedsim.runs.plan import POOLED, Plan, resolve
from fedsim.settings import data_root
from fedsim.settings.experiment import Experiment, parse_experiment
from fedsim.settings.paths import with_own_folders
from fedsim.tensors.arrays import state_to_record
from strategies.model import ServerModel, server_model
from strategies.parts import Place

if TYPE_CHECKING:
    from clients.compiled import Compiled

KEPT = 2  # workspaces that a process keeps in memory
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
KEPT_CLIENTS = 256  # clients of a workspace that stay in memory; any other is opened again, its state is in its store


def pick_device(setting: str) -> torch.device:
    """Returns the device for `run.device`, where `auto` takes CUDA when there is one.

    Raises UserError for `cuda` without a device.
    """
    has_cuda = setting != "cpu" and torch.cuda.is_available()
    if setting == "cuda" and not has_cuda:
        raise UserError("run.device is 'cuda' but PyTorch sees no CUDA device; use 'auto' or 'cpu'")
    # With its number: a tensor's own device always has one, and "cuda" is not equal to "cuda:0".
    return torch.device("cuda:0" if has_cuda else "cpu")


def device_record(device: torch.device) -> str:
    """Returns what a run's record says of its device: `cpu`, or the GPU's name and how it computes convolutions.

    TF32 has ten bits of mantissa instead of 23. GPUs of compute capability 8.0 and above use it unless it is switched
    off in PyTorch or by NVIDIA_TF32_OVERRIDE=0.
    """
    if device.type != "cuda":
        return device.type
    is_allowed = torch.backends.cudnn.allow_tf32 and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"
    is_rounded = is_allowed and torch.cuda.get_device_capability(device) >= (8, 0)
    numbers = "TF32" if is_rounded else "float32"
    return f"{torch.cuda.get_device_name(device)}, convolutions in {numbers}"


def sum_in_one_order() -> None:
    """Lets a GPU sum in the same order in every run, as a CPU does, so that equal runs have equal bytes.

    Where PyTorch has no such form of an operation, it computes the usual one and says so in a warning.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # A check for programs, which writes every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def set_threads(threads: int) -> int:
    """Sets and returns the CPU threads of PyTorch and NumPy in this process: as asked, or (0) the cores that are free.

    After each product of long vectors NumPy's BLAS threads keep their cores busy for some time, although they have
    nothing to do. Such a product measures every update, so that one thread of training would occupy two cores.
    """
    count = threads or free_cores()
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    _set_blas_threads(count)
    return count


@lru_cache(maxsize=1)  # called for every message; it looks through all loaded libraries
def _set_blas_threads(count: int) -> None:
    threadpool_limits(limits=count, user_api="blas")


@lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Lets the C library keep the memory that PyTorch frees, for the next tensor.

    Otherwise glibc returns every large block to the system, which clears all pages of the next one. With convolutions
    of 128 pixels this takes a fifth of a training step and two thirds of an evaluation. A sweep returns the memory of
    each cell when it has finished.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:  # glibc has it
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def prepare_device(device: torch.device) -> None:
    """Sets what PyTorch does once in a process for runs on this kind of device."""
    if device.type == "cpu":
        keep_freed_memory()
    elif device.type == "cuda":
        sum_in_one_order()


class Workspace:
    """The network and the clients of one plan in one process.

    The clients and the server's evaluation share one network, because each of them loads every tensor before it uses
    it: a message brings the shared tensors, a client's store the personal ones. Frozen tensors are never loaded again,
    so that nothing may change them: an inference rule that needs other statistics works on a copy.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.experiment, self.recipe = plan.experiment, plan.recipe
        self.device = pick_device(plan.experiment.run.device)
        prepare_device(self.device)
        self.scaler = self._made_scaler()
        self._scale: Scale | None = None  # that is in use
        self.task = rules_of(plan.data.task, plan.experiment.data, plan.experiment.train)
        self.net = self._made_net()
        self.places: dict[str, Place] = self.recipe.share.place(self.net)
        self.places |= dict.fromkeys(self.net.frozen, "frozen")
        self.view = view_of(self.net, self.places)
        self.initial = self._initial_personal()
        # Everything that a run can change, and so everything that must be reset: what is sent, stored and saved.
        self.travelling = [name for name, place in self.places.items() if place != "frozen"]
        self.frozen_content = self._frozen_content()
        self.clients: dict[tuple[str, str, str], DomainClient] = {}
        self.target: Any = None  # the TargetEvaluator, in the server's process and in its copies
        self._unlabelled: dict[str, UnlabelledClient] = {}  # by the run's token, of the newest run alone
        self._fingerprints: dict[str, Fingerprints] = {}  # by the token of the newest run
        self.compiled = self._compiled_pass()

    def _made_net(self) -> Net:
        """The initial network on the device, on a GPU in the layout in which convolutions are fast."""
        net = self.plan.build_net().to(self.device)
        if self.plan.experiment.train.precision == "bf16" and self.device.type == "cpu":
            widen_convolutions(net)
        return net.to(memory_format=torch.channels_last) if self.device.type == "cuda" else net

    def _made_scaler(self) -> Scaler | None:
        """Returns what reads tensors that are no images; None for images."""
        bench = self.plan.data
        if bench.images:
            return None
        waits = scale_rule(self.experiment.data, bench) == "federated"
        return Scaler(bench.shape, waits=waits)

    def _frozen_content(self) -> str:
        """Hash of what every machine builds itself, and of the classes' names where the head reads them."""
        model = self.experiment.model
        names = self.plan.data.outputs if model.head == "text" else ()
        return frozen_content(self.view.state, self.places, model.weights, names)

    def hashes_of_names(self) -> dict[str, str]:
        """Hashes of the names of classes and of features in their order, which each machine reads of its own data.

        Another spelling of a class is the same class. The hash of features is empty where examples are no rows of a
        table, or where a server has a shape alone.
        """
        bench = self.plan.data
        classes = "\0".join(map(plain, bench.classes))
        features = "\0".join(bench.features)
        return {
            "classes": content_hash(classes.encode()),
            "features": content_hash(features.encode()) if features else "",
        }

    def _initial_personal(self) -> dict[str, torch.Tensor]:
        """The initial values, on the CPU, of the tensors that a client keeps to itself."""
        state = self.view.state
        personal = [name for name, place in self.places.items() if place in ("upload", "local")]
        return {name: state[name].detach().cpu().clone() for name in personal}

    def _compiled_pass(self) -> "Compiled | None":
        """Returns the network's compiled training pass, where the settings ask for it and all parts allow it."""
        train = self.experiment.train
        if train.compile == "off":
            return None
        if not all(part.compiles for part in self.recipe.client_parts()):
            return None
        from clients.compiled import Compiled  # brings PyTorch's compiler, a second of imports

        return Compiled(self.net, train.batch_size, train.compile)

    def initial_arrays(self) -> ArrayRecord:
        """The initial model, of the tensors that travel."""
        return state_to_record(self.net.state_dict(), self.travelling)

    def server_model(self) -> ServerModel:
        """What the server's parts may know of the network."""
        return server_model(self.net, self.places, self.plan.build_net, self.device)

    def frozen_record(self) -> dict[str, str]:
        """What environment.json says about the frozen tensors of the initial network; empty without any."""
        return frozen_record(self.net)

    @cached_property
    def transforms(self) -> Transforms:
        """What is done to the images of this run before the network sees them; the same for all clients."""
        statistics = weight_statistics(self.experiment.model)
        read = self.scaler or to_float
        return make_transforms(self.experiment.data, self.plan.data.channels, statistics, read)

    @property
    def summed(self) -> tuple[int, bool]:
        """(the number of features, whether targets too) of which clients send sums that make a scale."""
        data = self.experiment.data
        return summed_features(data, self.plan.data), scales_targets(data, self.plan.data)

    def use_scale(self, scale: Scale | None) -> None:
        """Standardizes the examples of all domains, and targets, by this scale from now on, where the run has one.

        Raises UserError for a scale of another number of features.
        """
        if scale == self._scale:  # as in most messages
            return
        features, targets = self.summed
        if not scale or not (features or targets):
            return
        if not len(scale.mean) == len(scale.std) == features + targets:
            given = len(scale.mean) - targets
            raise UserError(f"the server's scale has {given} features, and the data here {features}")
        if targets:
            self.task.use_units(scale.mean[-1], scale.std[-1])
        if self.scaler and self.scaler.waits:
            self.scaler.use(scale.part(0, features))
        self._scale = scale

    def moments(self, name: str, state_folder: str, run: str = "") -> Moments | None:
        """The sums of a client's training rows, and of their targets; None where no scale is made of them."""
        features, targets = self.summed
        if not features and not targets:
            return None
        experiment = self.experiment
        if len(self.plan.clients) <= KEPT_CLIENTS:
            return self.client(name, state_folder, run).data.moments(features, targets)
        data = load_client(experiment.data, name, experiment.run.target, self.plan.data)
        moments = moments_of(data.images[data.train], features)
        if targets and data.masks is not None:
            moments = moments.joined(moments_of(data.masks[data.train], 1))
        return moments

    def client(self, name: str, state_folder: str, run: str = "") -> DomainClient:
        """The client of that name in the run with that token; its data is in memory, its state below `state_folder`."""
        key = (name, state_folder, run)
        if key in self.clients:
            self.clients[key] = self.clients.pop(key)  # the newest is the last
            return self.clients[key]
        while len(self.clients) >= KEPT_CLIENTS and state_folder:
            del self.clients[next(iter(self.clients))]
        store = ClientStore(client_folder(state_folder, name), name, run)
        self.clients[key] = DomainClient(
            self.experiment,
            self.recipe,
            self.view,
            self.places,
            self.initial,
            self.local_data(name),
            store,
            self.device,
            self.plan.clients,
            self.plan.sources,
            self.plan.build_net,
            self.compiled,
        )
        return self.clients[key]

    def local_data(self, name: str) -> LocalData:
        """The data of a client, in memory."""
        if name == POOLED:
            data = load_pooled(self.experiment.data, self.experiment.run.target)
        else:
            data = self._client_data(name)
        local = LocalData(data, self.transforms, self.device, self.task)
        local.shifted = shifted_share(self.experiment, name)
        local.at_test = self.recipe.augment.at_test(local) if self.recipe.augment else None
        return local

    def data_of(self, experiment: Experiment, recipe: Recipe) -> tuple[Fingerprints, Fingerprints]:
        """Returns the fingerprints (of the data that the server can read, of the images that parts use on it)."""
        return data_of_server(experiment, recipe)

    def _client_data(self, name: str) -> ClientData:
        """Returns the data of a client; their labels are wrong where it attacks with them."""
        experiment = self.experiment
        data = load_client(experiment.data, name, experiment.run.target, self.plan.data)
        return attacked(data, experiment)

    def fingerprint(self, client: str, run: str) -> dict[str, int | str]:
        """Fingerprint of the data of a site's client as they were when this process first used them in that run."""
        if run not in self._fingerprints:
            self._fingerprints = {run: {}}
        by_client = self._fingerprints[run]
        if client not in by_client:
            by_client[client] = fingerprint(self.experiment.data, domain_of(client))
        return by_client[client]

    def findings(self, client: str) -> list[str]:
        """Returns what the files of a site's client show, as the site sends it."""
        data = self.experiment.data
        findings = domain_findings(data, client, self.plan.data)
        return sent_findings(findings, str(data_root(data)))

    def class_counts(self, name: str, state_folder: str, run: str = "") -> np.ndarray:
        """Training images of a client by class. Where not all clients stay warm, it is not opened for this."""
        if len(self.plan.clients) <= KEPT_CLIENTS:
            return self.client(name, state_folder, run).data.class_counts
        return self._client_data(name).class_counts()

    def unlabelled(self, run: str) -> UnlabelledClient:
        """Returns the unseen domain's client in the run with that token.

        Its images come without labels, and stay in memory after its first visit.
        """
        if run not in self._unlabelled:
            data = load_unlabelled(self.experiment.data, self.experiment.run.target)
            local = LocalData(data, self.transforms, self.device)
            client = UnlabelledClient(self.experiment, self.recipe, self.net, self.places, local, self.device)
            self._unlabelled = {run: client}
        return self._unlabelled[run]


_open: dict[tuple[str, str | None], Workspace] = {}


def open_workspace(plan: Plan) -> Workspace:
    """A new workspace, with the initial network, which the clients of this process then use too."""
    space = Workspace(plan)
    _keep((plan.experiment.toml(), None), space)
    return space


def workspace(settings: str, root: str | None = None) -> Workspace:
    """The process's workspace of an experiment, given as the TOML text that the server sends.

    `root` is the data folder of a separate machine (empty: its $FEDSIM_DATA), where the server's paths do not exist.
    """
    if (settings, root) not in _open:
        experiment = parse_experiment(settings)
        plan = resolve(experiment if root is None else with_own_folders(experiment, root))
        set_threads(plan.experiment.run.threads)  # before the network, which computes the texts of classes
        _keep((settings, root), Workspace(plan))
    return _open[settings, root]


def close_workspaces() -> None:
    """Drops everything that this process keeps in memory."""
    _open.clear()


def _keep(key: tuple[str, str | None], space: Workspace) -> None:
    _open.pop(key, None)
    while len(_open) >= KEPT:
        del _open[next(iter(_open))]
    _open[key] = space
