"""The computation of a round: the new model from the updates, without the clients whose updates cannot be used."""

from collections.abc import Sequence

from fedsim.common.errors import ClientFailedError
from fedsim.settings.experiment import Experiment
from strategies.parts import ArrayDict, Arrays, LostRoundError, RefusedUpdateError, ServerRound, Update
from strategies.server_parts import ServerParts
from strategies.state import ServerState
from strategies.wire.exchange import Exchange
from strategies.wire.guard import Guard
from strategies.wire.reply_checks import one_line
from strategies.wire.round_notes import RoundNotes


class Computation:
    """Computes the new tensors by the parts; undoes what a refused update or an unusable model has changed."""

    def __init__(self, experiment: Experiment, parts: ServerParts, exchange: Exchange, guard: Guard) -> None:
        self.experiment, self.parts, self.exchange, self.guard = experiment, parts, exchange, guard
        self.begin()

    @property
    def state(self) -> ServerState:
        """The server's state."""
        return self.parts.state

    @property
    def log(self) -> RoundNotes:
        """The record of the current round."""
        return self.exchange.log

    def begin(self) -> None:
        """Remembers the state with which a round begins, because banks `before` and `after` training change it."""
        self._before = self.state.saved_parts(), dict(self.state.banks), self.state.known_kept()

    def undo(self, client: str, reason: str) -> None:
        """Drops the round with all that it has changed; the client, if one is named, has failed."""
        self._restore()
        if client:
            self.exchange.fail(client, f"reply refused: {reason}; the model of the round before is kept")
            self.log.drop(f"the model was taken back because of {client!r}")
        else:
            self.drop(reason)

    def fused(self, updates: list[Update]) -> ArrayDict:
        """The new tensors, or none. A client that a part refuses is left out, and the round is then computed again.

        A model that is not finite is dropped with all changes of its round, those of banks `before` training too.
        """
        # Banks alone change a part's state between the begin of a round and this moment. A copy costs time: 0.45 s for
        # FedAdam's moments of a ResNet-50.
        saved = self.state.saved_parts() if self.parts.recipe.banks else self._before[0]
        while updates:
            try:
                server, fused = self.parts.compute(updates)
            except LostRoundError as error:
                self.undo("", str(error))
                return {}
            except RefusedUpdateError as error:
                if error.client not in [update.client for update in updates]:
                    raise
                self.exchange.fail(error.client, f"reply refused: {one_line(error.reason)}")
                if self.parts.recipe.fuse.masked:
                    self.undo("", f"the sum of the updates cannot be taken apart, and {error.client!r} is in it")
                    return {}
                updates = [update for update in updates if update.client != error.client]
                self.state.restore_parts(saved)
                continue
            if reason := self._unusable(updates, fused):
                apart = not self.parts.recipe.fuse.masked
                client = self.guard.culprit(updates, lambda rest: self._usable(rest, saved)) if apart else ""
                self.state.restore_parts(saved)
                if client:
                    self.exchange.fail(client, f"reply refused: with it, {reason}; without it the model is usable")
                    updates = [update for update in updates if update.client != client]
                    continue
                self._restore()
                self._note_down(updates, server, kept=False)
                self.drop(reason)
                return {}
            self._note_down(updates, server)
            self.state.banks = dict(server.banks)
            return fused
        self._restore()
        self.log.note("no reply was accepted; the model stays as it was")
        return {}

    def _restore(self) -> None:
        """The state with which the round began. Without a model of the round, nothing of it is kept."""
        parts, banks, (stored, handed) = self._before
        self.state.restore_parts(parts)
        self.state.banks, self.state.stored, self.state.handed = dict(banks), dict(stored), dict(handed)

    def _usable(self, updates: list[Update], saved: tuple[dict, dict]) -> bool:
        """Whether the model would be finite with only these updates."""
        self.state.restore_parts(saved)
        return not self._unusable(updates, self.parts.compute(updates)[1])

    def _unusable(self, updates: list[Update], fused: Arrays) -> str:
        """The reason why the model that was just computed must not be used, or an empty string."""
        return self.guard.unusable(fused, self.parts.start) or self.guard.too_far(self.parts.move, updates)

    def drop(self, reason: str) -> None:
        """Drops the model of the round. The run ends, or a note in its record says so."""
        if self.experiment.run.on_client_failure == "stop":
            raise ClientFailedError(f"round {self.log.round}: {reason}")
        self.log.drop(reason)
        self.log.note(f"{reason}; the model stays as it was")

    def _note_down(self, updates: Sequence[Update], server: ServerRound, kept: bool = True) -> None:
        """Notes the round for its records, and what the clients keep from now on."""
        self.guard.accept(updates, self.state)
        for update in updates:
            self.log.row(update.client).update(examples=update.examples, **update.metrics)
            if update.stored and kept:
                self.state.stored[update.client] = self.log.round
        self.parts.keep([update.client for update in updates] if kept else [])
        for client, weight in server.weights.items():
            self.log.row(client)["weight"] = float(weight)
        self.log.take(server)
        for client, columns in server.client_columns.items():
            self.log.row(client).update(columns)
