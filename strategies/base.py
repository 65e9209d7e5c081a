"""FedDG: Flower's message strategy that plays the rounds of a recipe; strategies/round.py has one round."""

from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Protocol

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedsim.common.errors import UserError
from fedsim.common.tasks import CLASSIFICATION
from fedsim.common.values import Row
from fedsim.settings.experiment import Experiment
from fedsim.tensors.records import Config
from strategies.parts import Place
from strategies.recipe import ServerRecipe
from strategies.round import RoundResult, play_prelude, play_round
from strategies.server import Server
from strategies.server_parts import ServerParts
from strategies.state import ServerState
from strategies.whole_rounds import WholeRounds
from strategies.wire.exchange import Exchange

DEFAULT_TIMEOUT = 3600  # seconds, Flower's
Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


class Sink(Protocol):
    """Who is told of the rounds: records, checkpoints, trackers, progress."""

    def begin_round(self, number: int) -> None:
        """A round begins; 0 is what comes before the first one."""

    def end_round(self, result: RoundResult) -> None:
        """A round has ended."""


class FedDG(WholeRounds):
    """Federated training by the server parts of a recipe.

    `places` says which entries of the network's state are shared, and `metric` is what clients measure in their
    validation. `server` is everything that lasts from round to round, and `sinks` are told of the rounds.
    """

    def __init__(
        self,
        recipe: ServerRecipe,
        experiment: Experiment,
        places: Mapping[str, Place],
        run_config: Config,
        metric: str = CLASSIFICATION.metric,
    ) -> None:
        state = ServerState()
        parts = ServerParts(recipe, experiment, places, state)
        exchange = Exchange(experiment, run_config, state, metric)
        self.server = Server(experiment, places, state, exchange, parts)
        self.sinks: list[Sink] = []
        self.is_over: Callable[[], bool] = lambda: False  # whether no further round is to be played
        self.finished_rounds = -1  # none; 0: what comes before the first round

    def resume(self, number: int, state: ServerState) -> None:
        """Continues after a round, with the server's state of that time."""
        self.server.parts.require_places(state)
        self.server.state.take_over(state)
        self.finished_rounds = self.server.exchange.saved_round = number

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = DEFAULT_TIMEOUT,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Plays rounds, and returns the last model and the metrics of each round.

        initial_arrays: the model from which the next round starts
        num_rounds: how many rounds are played until `is_over`, after those that a resumed run has finished
        evaluate_fn: called with the number of a round and its model, before the first round (0) and after each

        Raises UserError without clients, and for a timeout or settings that differ from those of the experiment.
        """
        self._refuse(timeout, train_config, evaluate_config)
        first, model, result = self.finished_rounds + 1, initial_arrays, Result(arrays=initial_arrays)
        for number in takewhile(lambda _: not self.is_over(), range(first, first + num_rounds + (first == 0))):
            for sink in self.sinks:
                sink.begin_round(number)
            played = play_round(self.server, grid, number, model) if number else play_prelude(self.server, grid, model)
            model = result.arrays = played.model
            for sink in self.sinks:
                sink.end_round(played)
            self.finished_rounds = number
            result.evaluate_metrics_clientapp[number] = means(played.validation)
            if evaluate_fn and (scored := evaluate_fn(number, model)) is not None:
                result.evaluate_metrics_serverapp[number] = scored
        return result

    def _refuse(self, timeout: float, train_config: ConfigRecord | None, evaluate_config: ConfigRecord | None) -> None:
        """Raises UserError where the arguments of `start` would have no effect."""
        if not self.server.exchange.clients:
            raise UserError("FedDG knows no clients, and would train nobody; in a Flower app use fedsim.strategy(...), "
                            "whose start meets them (docs/own-app.md)")  # fmt: skip
        if train_config or evaluate_config:
            raise UserError("FedDG sends the settings of its experiment; leave train_config and evaluate_config out")
        if timeout not in (DEFAULT_TIMEOUT, self.server.experiment.run.timeout):
            raise UserError(f"FedDG waits as long as run.timeout says; set it to {timeout:g} and leave timeout out")


def means(validation: Mapping[str, Row]) -> MetricRecord:
    """The mean over the clients of each column of their validations; of the clients that have it."""
    columns = dict.fromkeys(name for row in validation.values() for name in row)
    values = {name: [row[name] for row in validation.values() if name in row] for name in columns}
    return MetricRecord({name: sum(column) / len(column) for name, column in values.items()})
