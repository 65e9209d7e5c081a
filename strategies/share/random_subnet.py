"""Federated dropout: every client trains a random part of the fully connected hidden layers, and only that is sent."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from fedsim.common.errors import UserError
from fedsim.common.seeding import numpy_rng
from fedsim.models.hidden import hidden_layers
from fedsim.models.net import Net
from fedsim.settings.experiment import Experiment
from strategies.parts import Cut, Share


@dataclass(frozen=True)
class RandomSubnet(Share):
    """Each hidden unit is kept with probability 1 - rate, drawn for every client and round; only kept units are sent.

    The server fills the rest of a client's model with w^t and then averages.

    Source: FedDrop (Wen, Jeon, Huang: Federated Dropout, 2021); we did not have the paper. Units are those of the fully
    connected hidden layers at the network's end: rows of a layer, its biases and batch norm, and columns of the next
    layer. Convolutions and the outputs of the classifier are always sent whole. A unit that is not kept has only zero
    weights on the client, so that its output and its gradient are 0. Kept units are multiplied by 1 / (1 - rate) in
    training (part `kept_scale`). At least one unit of a layer is kept. Server and client draw equally from the run's
    seed, so that no mask is sent. A network without such a layer is refused, and so are optimizer buffers that are kept
    between rounds: they would move units that are not kept in this round. `rate = 0` gives FedAvg bit for bit.

    rate: the probability of leaving a unit out, equal for all clients (the paper fits it to a client's resources)
    """

    rate: Annotated[float, Field(ge=0, lt=1)] = 0.5
    requires: ClassVar[dict[str, str]] = {"inserts": "kept_scale"}

    @property
    def sets(self) -> dict[str, dict[str, object]]:
        """The scale of the kept units."""
        return {"kept_scale": {"rate": self.rate}}

    def check(self, experiment: Experiment) -> None:
        """Raises UserError when the optimizer's buffers of an earlier round would move units that are not kept."""
        train = experiment.train
        if self.rate and train.persist_optimizer and (train.momentum or train.optimizer != "sgd"):
            raise UserError("random_subnet needs a fresh optimizer each round; set train.persist_optimizer = false")

    def cut(self, net: Net, client: str, round: int, seed: int) -> dict[str, Cut]:
        """The kept rows and columns of every hidden layer."""
        if self.rate == 0:
            return {}
        axes: dict[str, dict[int, np.ndarray]] = {}
        rng = numpy_rng(seed, "subnet", client, round)
        for layer in hidden_layers(net):
            draws = rng.random(layer.units)
            drawn = np.flatnonzero(draws >= self.rate)
            drawn = drawn if len(drawn) else np.array([draws.argmax()])
            for name in layer.rows:
                axes.setdefault(name, {})[0] = drawn
            axes.setdefault(layer.columns, {})[1] = drawn
        state = net.state_dict()
        return {name: tuple(by_axis.get(axis) for axis in range(state[name].dim())) for name, by_axis in axes.items()}
