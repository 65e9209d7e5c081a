"""Distillation of the clients' models into their average, on unlabelled images of the server."""

from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.data.augment import make_transforms, to_float
from fedsim.data.auxiliary import auxiliary_fingerprint, auxiliary_images, refuse_own_images
from fedsim.data.benchmarks import benchmark
from fedsim.models import weight_statistics
from fedsim.models.tasks import EVALUATION_BATCH
from fedsim.parts.facts import Fact
from fedsim.settings.effect import GIVEN, Only
from fedsim.settings.experiment import Experiment
from fedsim.tensors.arrays import load_arrays, to_arrays
from strategies.parts import ArrayDict, Arrays, Refine, ServerRound

Prepared = Callable[[np.ndarray], Tensor]


def distillation_loss(teacher: Tensor, student: Tensor, tau: float = 1.0) -> Tensor:
    """mean over x of KL(softmax(a / tau) || softmax(b / tau)), without a factor tau^2.

    teacher (a) and student (b) are logits [B, classes].
    """
    target, log_student = (teacher / tau).log_softmax(dim=1), (student / tau).log_softmax(dim=1)
    return F.kl_div(log_student, target, reduction="batchmean", log_target=True)


@dataclass(frozen=True)
class EnsembleDistillation(Refine):
    """From the fused w, `steps` steps of Adam on the mean of KL(softmax(a(x)/tau) || softmax(b(x)/tau)) over images x.

        a(x) = 1/K sum_k f(theta_k; x)   the mean of the logits of this round's client models, b(x) = f(w; x)

    Source: PerAda (Xie et al., CVPR 2024), its server. The images have no labels. Only parameters that clients share
    and that the prediction uses are trained (neither a projector next to the head nor FedIG-A's adapters). In every
    round the learning rate falls to 0 along a cosine. The student is in training mode except for its batch norm; both
    see each image without augmentation. A round with the model of only one client is
    not changed, because teacher and student are equal, and neither are rounds after `rounds`. Without `data` nothing
    happens (the paper's ablation without distillation).

    The released code stops early by labelled validation images of the server, and drops a distilled model that is not
    better than the average; here there are no labels. Images of a client or of the target are refused, by
    their content.

    data: the folder of images on the server's machine, with its subfolders. Empty: no distillation
    rounds: the number of first rounds with distillation (T_kd); 0: all rounds
    steps: the number of mini-batches per round (R_kd)
    batch_size: the number of images in each
    lr: eta_g
    tau: the temperature
    bn: with `freeze` the student's batch norm normalizes by the averaged statistics, which do not change; with `train`
    by those of the images, and the running statistics are updated by them (released code)
    teachers: in `eval` mode, or in `train` mode (released code), with dropout and the statistics of each mini-batch
    """

    order: ClassVar[int] = 3
    assumes = (Fact.SINGLE_UPDATES, Fact.EVERY_CLIENT, Fact.ONE_INPUT)

    data: str = ""
    rounds: Annotated[int, Field(ge=0), Only(data=GIVEN)] = 30
    steps: Annotated[int, Field(ge=1), Only(data=GIVEN)] = 100
    batch_size: Annotated[int, Field(ge=2), Only(data=GIVEN)] = 256
    lr: Annotated[float, Field(gt=0), Only(data=GIVEN)] = 1e-4
    tau: Annotated[float, Field(gt=0), Only(data=GIVEN)] = 1.0
    bn: Annotated[Literal["freeze", "train"], Only(data=GIVEN)] = "freeze"
    teachers: Annotated[Literal["eval", "train"], Only(data=GIVEN)] = "eval"

    @property
    def tag(self) -> str:
        """Says whether the results have the server's distillation."""
        return "kd" if self.data else "no kd"

    @property
    def remark(self) -> str:
        """What a run without images says."""
        if self.data:
            return ""
        return (
            "ensemble_distillation has no images, so that the server distils nothing (the paper's ablation without "
            "distillation); method.ensemble_distillation.data names a folder of images on the server"
        )

    def check_server(self, experiment: Experiment, known: Mapping[str, Mapping]) -> None:
        """Raises UserError for a folder without images, and for one that holds images of a client or of the target."""
        if self.data:
            refuse_own_images(self.data, experiment.data, known)

    def server_data(self, experiment: Experiment) -> dict[str, dict[str, int | str]]:
        """The auxiliary images."""
        return {"auxiliary images": auxiliary_fingerprint(self.data)} if self.data else {}

    def refine(self, fused: Arrays, server: ServerRound) -> ArrayDict:
        """The distilled tensors. All tensors that the student did not train keep their fused value."""
        if not self.data or len(server.updates) < 2 or (self.rounds and server.round > self.rounds):
            return dict(fused)
        prepared, count = self._images(server)
        order = batch_positions(count, min(self.batch_size, count), self.steps, server.rng("distillation"))
        net = server.build_net()
        teacher = self._teacher(net, order, prepared, server)
        load_arrays(net, {**server.previous, **fused}, list(server.previous))
        first, last = self._train(net, ((prepared(part), teacher(part)) for part in order), server)
        server.detail("", "distillation_loss", "first", first)
        server.detail("", "distillation_loss", "last", last)
        state = net.state_dict()
        trained = fused.keys() if self.bn == "train" else server.parameters & fused.keys()
        return {**fused, **to_arrays({name: state[name] for name in trained})}

    def _images(self, server: ServerRound) -> tuple[Prepared, int]:
        """A function from index arrays to normalized images on the server's device, and the number of images."""
        data, channels = server.experiment.data, benchmark(server.experiment.data).channels
        images = auxiliary_images(self.data, data, channels)
        if len(images) < 2:
            raise UserError(f"{self.data} holds one image; distillation needs at least two")
        normalize = make_transforms(data, channels, weight_statistics(server.experiment.model)).normalize
        return lambda part: normalize(to_float(torch.from_numpy(images[part]).to(server.device))), len(images)

    def _teacher(
        self, net: nn.Module, order: Sequence[np.ndarray], prepared: Prepared, server: ServerRound
    ) -> Callable[[np.ndarray], Tensor]:
        """A function from a batch's positions to the mean of the clients' logits; `net` may be used afterwards."""
        both = [[update.arrays, server.previous] for update in server.updates]
        states = [ChainMap(*cast(list[MutableMapping[str, np.ndarray]], maps)) for maps in both]  # only read
        if self.teachers == "train":  # what a model says of an image depends on the batch and on the step
            other = server.build_net()
            return lambda part: mean_logits(other, states, [part], prepared, train=True)
        used = np.unique(np.concatenate(order))
        logits = mean_logits(net, states, np.array_split(used, -(-len(used) // EVALUATION_BATCH)), prepared)
        return lambda part: logits[np.searchsorted(used, part)]

    def _train(
        self, net: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], server: ServerRound
    ) -> tuple[float, float]:
        """Trains the student; returns its loss in the first and in the last step."""
        net.train()
        keep_statistics(net, server.parameters, all_of_them=self.bn == "freeze")
        shared = [value for name, value in net.named_parameters() if name in server.parameters]
        parameters = [value for value in shared if value.requires_grad]
        optimizer = torch.optim.Adam(parameters, self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        losses = []
        seed = int(torch.randint(2**62, (), generator=server.generator("distillation")))
        with torch.random.fork_rng([server.device] if server.device.type == "cuda" else []):
            torch.manual_seed(seed)
            for images, teacher in batches:
                loss = distillation_loss(teacher, net(images).float(), self.tau)
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient  # None, which Adam skips, where the prediction does not use it
                optimizer.step()
                schedule.step()
                losses.append(loss.detach())
        return float(losses[0]), float(losses[-1])


def keep_statistics(net: nn.Module, trained: Collection[str], all_of_them: bool) -> None:
    """Puts batch norm into eval mode: all layers, or those without trained parameters (a frozen backbone's)."""
    for path, module in net.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            names = [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
            if all_of_them or not set(names) & set(trained):
                module.eval()


def batch_positions(count: int, size: int, steps: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Index arrays of `steps` batches: passes over all images, each in a new order, without short batches."""
    batches: list[np.ndarray] = []
    while len(batches) < steps:
        order = rng.permutation(count)
        batches += [order[start : start + size] for start in range(0, count - size + 1, size)]
    return batches[:steps]


@torch.no_grad()
def mean_logits(
    net: nn.Module, states: Sequence[Arrays], parts: Sequence[np.ndarray], prepared: Prepared, train: bool = False
) -> Tensor:
    """The mean over the models of their logits, [images, classes], in eval or training mode, with each in `net`."""
    net.train(train)
    total = torch.zeros(())
    for state in states:
        load_arrays(net, state, list(state))
        logits = torch.cat([net(prepared(part)).float() for part in parts])
        total = logits if total.ndim == 0 else total + logits
    return total / len(states)
