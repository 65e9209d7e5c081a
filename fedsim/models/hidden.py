"""The fully connected hidden layers at the end of a network, which consist of units that can be left out."""

from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from fedsim.models.net import Net

# Modules that may be between two of these linear layers. After each of them, a unit with only zero weights gives 0.
BETWEEN = (nn.BatchNorm1d, nn.ReLU, nn.Dropout, nn.Identity)


@dataclass(frozen=True)
class HiddenLayer:
    """One hidden layer.

    units: the number of its units
    rows: the entries of the state with the units as first axis (weights, biases, batch norm)
    columns: the next layer's weight, which has the units as second axis
    reader: the path of that next layer
    """

    units: int
    rows: tuple[str, ...]
    columns: str
    reader: str


def hidden_layers(net: Net) -> list[HiddenLayer]:
    """The hidden layers of the chain of linear layers that ends with `net.head`, from the first to the last.

    The chain is found from the order in which modules are registered. It goes backwards from the head over linear
    layers of fitting widths, and over modules that may be between them, to the first module of another kind. Layers
    with entries that are not trained (`net.frozen`) are left out, and a head of several modules has no such chain.
    """
    chain = _chain(net)
    linear = [place for place, (_, module) in enumerate(chain) if isinstance(module, nn.Linear)]
    layers = []
    for first, second in pairwise(linear):
        producer, (reader, consumer) = chain[first][1], chain[second]
        if not isinstance(producer, nn.Linear) or not isinstance(consumer, nn.Linear):
            continue
        if producer.out_features != consumer.in_features:
            continue
        rows = [f"{path}.{name}" for path, module in chain[first:second] for name, value in module.state_dict().items()
                if value.dim()]  # fmt: skip
        columns = f"{reader}.weight"
        if not {*rows, columns} & net.frozen:
            layers.append(HiddenLayer(producer.out_features, tuple(rows), columns, reader))
    return layers


def _chain(net: Net) -> list[tuple[str, nn.Module]]:
    """(path, module) of the linear layers before the head, of the head, and of what may be between them."""
    chain: list[tuple[str, nn.Module]] = []
    leaves = [(path, module) for path, module in net.named_modules() if not list(module.children())]
    places = [place for place, (_, module) in enumerate(leaves) if module is net.head]
    for path, module in reversed(leaves[: places[0] + 1] if places else []):
        if not isinstance(module, (nn.Linear, *BETWEEN)):
            break
        chain.insert(0, (path, module))
    return chain
