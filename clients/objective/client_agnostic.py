"""Client-agnostic learning: features and classifier must stay valid under the statistics of other clients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from clients.optimizers import make_optimizer, optimizer_tensors, restore_optimizer
from clients.parts import Batch, LocalRound, Objective, StepFunction
from clients.tools.networks import descend, statistics_frozen
from fedsim.models.inserts.base import Insert
from fedsim.models.norms.base import Norm
from fedsim.models.norms.mixig import MixIGLayer, draw_u, draw_z, install_global, mixig_layers, switched
from fedsim.parts.facts import Fact
from fedsim.parts.part import RecipeParts
from fedsim.settings.tuned import Tuned
from strategies.bank import Bank

GLOBAL_BN = "global_bn"  # the record with the averaged batch norm
ADAPTER_OPTIMIZER = "adapter-optimizer"  # the store's entry, used with train.persist_optimizer


def cafl(features: Tensor, mixed: Tensor, reduction: str = "sum") -> Tensor:
    """mean_i ||f_i - f_D,i||^2 of features [B, D], the paper's equation.

    With "mean" it is divided by D: the mean squared difference over batch and dimensions. Gradients reach both
    arguments.
    """
    squares = (features.float() - mixed.float()).square()
    return squares.sum(dim=1).mean() if reduction == "sum" else squares.mean()


@dataclass(frozen=True)
class ClientAgnostic(Objective):
    """Two forward passes over every batch, f by local batch norm and f_D by the network's second view, and one step on

        L = CE(C(f), y) + lambda1 CE(C(stopgrad(f_D)), y) + lambda2 mean_(i,d) (f_id - f_D,id)^2 + terms

    Source: FedIG (client-agnostic learning, ICLR 2023 submission). CACL (lambda1) reaches the classifier alone; CAFL
    (lambda2) reaches everything else, through both passes. The second view is MixIG's, or that of an insert such as
    MixStyle on batch statistics (Table 3 of the paper); it does not change running statistics. When the network has
    zero-shot adapters (FedIG-A), each step is followed by one on the adapters alone:

        L_A = CE(C(F_adapted(x)), y), where the main network, just updated, is frozen; gradients flow through it.

    The features are those that the head sees. `lambda1 = lambda2 = 0` gives the supervised step of FedBN.

    The paper's equation sums over the D feature dimensions. With the papers' bottleneck (D = 256) and lambda2 = 4 this
    sum is some hundred times the cross-entropy, and training ends in NaN. From ImageNet weights at 64 pixels the sum is
    80 times the cross-entropy, and validation stays at chance; the mean is 1.4 times the cross-entropy there. lambda2
    must therefore belong to PyTorch's usual mean squared error, which is the default here. `cafl_reduction = "sum"` is
    the printed equation.

    lambda1, lambda2: the weights of CACL and CAFL; training is stable in [0.1, 0.5] and [2, 5]
    cafl_reduction: "mean" over the feature dimensions, or their "sum" (the equation), which is D times larger
    """

    lambda1: Annotated[float, Field(ge=0), Tuned("uniform:0.1:0.5", "the paper")] = 0.1
    lambda2: Annotated[float, Field(ge=0), Tuned("uniform:2:5", "the paper")] = 4.0
    cafl_reduction: Literal["mean", "sum"] = "mean"
    columns: ClassVar[tuple[str, ...]] = ("ce_loss", "cacl_loss", "cafl_loss", "adapter_loss")

    def refuses(self, recipe: RecipeParts) -> str:
        """Needs a second view that leaves running statistics alone; MixIG's needs the averages on the clients, too."""
        (norm,) = recipe.of(Norm)
        if norm.second_view and GLOBAL_BN not in [bank.name for bank in recipe.of(Bank)]:
            return (
                "mix_ig needs the averaged batch norm on the clients; add 'global_batch_norm' to method.banks, and use "
                "the share rule 'without_batch_norm'"
            )
        if not norm.second_view and Fact.BATCH_NORM in norm.breaks:
            return (
                f"client_agnostic makes its second pass by norm 'mix_ig', or by an insert on norm 'batch_norm' or "
                f"'ibn'; {type(norm).__name__} would track both passes"
            )
        if not norm.second_view and not any(insert.second_view for insert in recipe.of(Insert)):
            return "client_agnostic needs a second view: use the norm 'mix_ig' or the insert 'mix_style'"
        return ""

    def begin(self, round: LocalRound) -> StepFunction:
        """Installs the global statistics; returns the loss. The step of adapters follows each step."""
        layers = mixig_layers(round.net)
        if layers:
            install_global(round.net, round.record(GLOBAL_BN, "client_agnostic"))
        adapted = {path: layer for path, layer in layers.items() if layer.adapter is not None}
        if adapted:
            round.after_step.append(self._adapter_step(round, layers, adapted))
        return self._loss(round, layers)

    def end(self, round: LocalRound) -> None:
        """Stores the adapters' momentum when the experiment asks for it."""
        if ADAPTER_OPTIMIZER in round.scratch and round.train.persist_optimizer:
            adapters, optimizer = round.scratch[ADAPTER_OPTIMIZER]
            with trainable(adapters):
                round.store.put(ADAPTER_OPTIMIZER, optimizer_tensors(optimizer, adapters))

    def _loss(self, round: LocalRound, layers: dict[str, MixIGLayer]) -> StepFunction:
        net, generator = round.net, round.generator("mixig-u")
        acting: list[Any] = [module for module in net.modules() if hasattr(module, "second_view")]
        for module in acting:
            module.second_view = False
        if self.lambda1 == 0 and self.lambda2 == 0:
            return round.forward

        def loss(batch: Batch) -> Tensor:
            ce_loss = round.forward(batch)
            if layers:
                generator.set_state(batch.once(self, generator.get_state))
                draw_u(layers, generator)
            with round.autocast():
                with second_view(net, layers, acting), torch.set_grad_enabled(self.lambda2 != 0):
                    mixed = net.features(batch.images)
                logits = net.head(mixed.detach())
            cacl_loss = F.cross_entropy(logits.float(), batch.labels)
            cafl_loss = cafl(batch.features, mixed, self.cafl_reduction)
            for name, value in (("ce_loss", ce_loss), ("cacl_loss", cacl_loss), ("cafl_loss", cafl_loss)):
                round.tally(name, value)
            return ce_loss + self.lambda1 * cacl_loss + self.lambda2 * cafl_loss

        return loss

    def _adapter_step(
        self, round: LocalRound, layers: dict[str, MixIGLayer], adapted: dict[str, MixIGLayer]
    ) -> Callable[[Batch], None]:
        net, generator = round.net, round.generator("mixig-z")
        adapters = nn.ModuleList(layer.adapter for layer in adapted.values() if layer.adapter is not None)
        with trainable(adapters):
            optimizer = make_optimizer(adapters, round.train.model_copy(update={"weight_decay": 0.0}), round.lr)
        if round.train.persist_optimizer and (stored := round.store.get(ADAPTER_OPTIMIZER)):
            restore_optimizer(optimizer, stored)
        round.scratch[ADAPTER_OPTIMIZER] = (adapters, optimizer)

        def step(batch: Batch) -> None:
            draw_z(adapted, len(batch.labels), generator)
            with trainable(adapters):
                with round.autocast(), switched(layers, "adapted"):
                    logits = net(batch.images)
                loss = descend(optimizer, F.cross_entropy(logits.float(), batch.labels))  # no gradient in the network
            round.tally("adapter_loss", loss)

        return step


@contextmanager
def trainable(adapters: nn.Module) -> Iterator[None]:
    """Inside the block the adapters take gradients; outside it no optimizer and no term of the main step sees them."""
    adapters.requires_grad_(True)
    try:
        yield
    finally:
        adapters.requires_grad_(False)


@contextmanager
def second_view(net: nn.Module, layers: dict[str, MixIGLayer], acting: list[Any]) -> Iterator[None]:
    """Inside the block MixIG layers mix, modules with `second_view` act, and running statistics do not change."""
    for module in acting:
        module.second_view = True
    try:
        with switched(layers, "mixed"), statistics_frozen(net):
            yield
    finally:
        for module in acting:
            module.second_view = False
