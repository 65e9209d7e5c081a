"""What the server keeps from round to round, and passes to each step of a round."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import ArrayRecord

from fedsim.settings.experiment import Experiment
from strategies.parts import ArrayDict, Entries, Place, Update
from strategies.server_parts import ServerParts
from strategies.state import ServerState
from strategies.stored import Storage
from strategies.wire.exchange import Exchange
from strategies.wire.fused_check import Probe
from strategies.wire.target_site import Asked

Watch = Callable[[int, ArrayDict, Sequence[Update]], None]  # (number of a round, the model before it, its updates)


@dataclass
class Server:
    """The server of one run.

    experiment: the run's settings
    places: the place of every tensor of the network (see Share.place)
    state: everything that a checkpoint needs besides the global model
    exchange: sends messages to the clients, and knows who they are
    parts: the recipe's parts that act on the server
    storage: holds the tensors of a round's replies
    target: evaluates the unseen domain; None: nobody does
    probe: says whether a model gives finite outputs; None: only the values of a model are looked at
    watch: is told of the accepted updates of each round, before they are fused; None: nobody is
    lost_rounds: rounds in a row that have left the model as it was
    """

    experiment: Experiment
    places: Mapping[str, Place]
    state: ServerState
    exchange: Exchange
    parts: ServerParts
    storage: Storage = field(default_factory=Storage)
    target: Asked | None = None
    probe: Probe | None = None
    watch: Watch | None = None
    lost_rounds: int = 0

    def wanted_entries(self) -> Entries:
        """The entries by client of the bank that the inference rule needs for the unseen domain; empty for no bank."""
        return self.state.banks.get(self.parts.recipe.infer.bank, {})

    def placed(self, model: ArrayRecord, *places: Place) -> ArrayRecord:
        """The tensors of a model that have one of these places; the record itself when all have."""
        names = [name for name in model if self.places[name] in places]
        if len(names) == len(model):
            return model
        return ArrayRecord({name: model[name] for name in names})
