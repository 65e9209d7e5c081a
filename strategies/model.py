"""What the server knows about the network of its tensors."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from fedsim.models.net import Net
from fedsim.tensors.kinds import Kind, nonnegative_names, tensor_kinds
from strategies.server_round import CPU, Place, no_net


@dataclass(frozen=True)
class ServerModel:
    """Facts about a network, by the types of its modules, and a function that builds it; see ServerRound's fields.

    nonnegative: the names of the tensors that count or are variances
    classes, feature_dim: the outputs and inputs of the head
    net: the network, used only for its layers
    """

    kinds: Mapping[str, Kind] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()
    nonnegative: Collection[str] = ()
    classes: int = 0
    feature_dim: int = 0
    device: torch.device = CPU
    build_net: Callable[[], Net] = no_net
    net: Net | None = None


def shared_parameters(net: Net, places: Mapping[str, Place]) -> frozenset[str]:
    """The names of the network's parameters, by the type of their module, that all clients share."""
    parameters = [name for name, _ in net.named_parameters(remove_duplicate=False)]
    return frozenset(name for name in parameters if places[name] == "shared")


def server_model(
    net: Net, places: Mapping[str, Place], build_net: Callable[[], Net], device: torch.device
) -> ServerModel:
    """The facts about `net`. `build_net` makes an equal network on the CPU, which is then moved to `device`."""
    return ServerModel(
        kinds=tensor_kinds(net),
        parameters=shared_parameters(net, places),
        nonnegative=nonnegative_names(net),
        classes=net.outputs,
        feature_dim=net.feature_dim,
        device=device,
        build_net=lambda: build_net().to(device),
        net=net,
    )
