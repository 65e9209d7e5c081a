"""What Flower's strategies are asked for, in a strategy that plays whole rounds."""

from typing import NoReturn

from flwr.serverapp.strategy import Strategy


class WholeRounds(Strategy):
    """A strategy whose `start` plays whole rounds, and which has none of the pieces that Flower's own loop calls."""

    def summary(self) -> None:
        """Does nothing; a run says itself what it does."""

    def _play_whole_rounds(self, *_: object, **__: object) -> NoReturn:
        """Raises NotImplementedError: `start` is such a strategy's loop, and a round has no pieces to call."""
        raise NotImplementedError("FedDG plays whole rounds: call strategy.start(grid, arrays), or play_round of "
                                  "strategies/round.py, and none of Flower's four hooks")  # fmt: skip

    # Flower's own loop would call these.
    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _play_whole_rounds
