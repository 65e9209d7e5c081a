"""Runs the server parts of a recipe: what they send, and what they compute from the updates of a round."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fedsim.common.errors import UserError
from fedsim.parts.part import Part
from fedsim.settings.experiment import Experiment
from strategies.banks.checks import misfit, odd_shapes, owned
from strategies.model import ServerModel
from strategies.parts import (
    SERVER,
    ArrayDict,
    Arrays,
    Bank,
    Broadcast,
    Cut,
    Entries,
    Place,
    Refine,
    RefusedUpdateError,
    ServerRound,
    Update,
    Visit,
)
from strategies.recipe import ServerRecipe
from strategies.state import ServerState
from strategies.wire.fused_check import not_finite
from strategies.wire.update_limit import update_size
from strategies.wire.visits import Visits


class ServerParts:
    """The parts of a recipe that act on the server, one round after the other.

    `open` begins a round. `start` is the model from which its clients start. `training` is False before round 1 (in the
    prelude of a step), where banks of every round and refining parts do not act.
    """

    def __init__(
        self, recipe: ServerRecipe, experiment: Experiment, places: Mapping[str, Place], state: ServerState
    ) -> None:
        self.recipe = replace(recipe, banks=tuple(bank for bank in recipe.banks if bank.shared))
        self.experiment, self.places, self.state = experiment, places, state
        self.model = ServerModel()
        self.round, self.training = 0, True
        self.clients: list[str] = []
        self.drawn: list[str] = []
        self.class_counts: dict[str, tuple[int, ...]] = {}
        self.start: Arrays = {}
        self.move = 0.0  # of the fused model of the last `compute`, where it may be too large
        self.visits: Visits | None = None  # who sends them; without, nobody answers

    def open(self, round: int, model: Arrays, clients: Sequence[str], drawn: Sequence[str], training: bool) -> None:
        """Begins a round with the saved model. Broadcasts that were never made are made."""
        self.round, self.training = round, training
        self.clients, self.drawn = list(clients), list(drawn)
        self.start = model
        self.start = self._start_from(model)
        server = self.server()
        for bank in self._broadcasts():
            if bank.name not in self.state.banks:
                self.state.banks[bank.name] = self._made(bank, server)

    def cut(self, client: str) -> dict[str, Cut]:
        """The part of the shared tensors on which a client trains in this round; empty when it gets them completely."""
        share = self.recipe.share
        if not (share.partial and self.training and self.round):
            return {}
        assert self.model.net is not None  # described before the first round
        return share.cut(self.model.net, client, self.round, self.experiment.run.seed)

    def needs(self) -> set[str]:
        """The metrics without which a reply to a train message cannot be used, those of all parts."""
        return {name for part in self.recipe.of(Part) for name in part.needs} if self.training else set()

    # --- banks ------------------------------------------------------------------------------------------------------

    def banks(self, when: str) -> list[Bank]:
        """The banks that are filled at this time."""
        return [bank for bank in self.recipe.banks if bank.when == when]

    def contributed(self) -> tuple[Bank, ...]:
        """The banks with contributions in the replies of this phase."""
        return tuple(bank for bank in self.banks("round") if bank.contributed and self.training)

    def views(self, banks: Sequence[Bank]) -> dict[str, ServerRound]:
        """The round that each of these banks gets."""
        return {bank.name: self._bank_view(bank, self.server()) for bank in banks}

    def handed_out(self, names: Sequence[str] | None = None) -> Callable[[str], dict[str, Arrays]]:
        """A function that gives a client's records of all (or named) banks; one that comes once, while it lacks it."""
        banks = [bank for bank in self.recipe.banks if names is None or bank.name in names]
        views = self.views(banks)
        once = {bank.name: set(self.state.handed.setdefault(bank.name, [])) for bank in self.banks("once")}

        def records(client: str) -> dict[str, Arrays]:
            found = {
                bank.name: bank.hand_out(self.state.banks.get(bank.name, {}), client, views[bank.name])
                for bank in banks
                if client not in once.get(bank.name, ())
            }
            return {name: arrays for name, arrays in found.items() if arrays is not None}

        return records

    def odd(self, bank: Bank, layouts: Mapping[str, str]) -> dict[str, str]:
        """Clients whose contributions are unlike the others', with the reason; the layout that is right is kept.

        layouts: the `layout_of` every client's contribution.
        """
        if not bank.uniform or not layouts:
            return {}
        odd = odd_shapes(layouts, self.state.layouts.get(bank.name, ""))
        for client in layouts.keys() - odd.keys():
            self.state.layouts.setdefault(bank.name, layouts[client])
        return odd

    def collected(self, bank: Bank, entries: Entries) -> ServerRound:
        """Merges what clients were asked to contribute into the bank; returns the round with the bank's notes.

        RefusedUpdateError names a client whose contribution the bank refuses; nothing is then changed.
        """
        old, server = self.state.banks.get(bank.name, {}), self._bank_view(bank, self.server())
        if entries or bank.when != "before":
            saved = self.state.saved_parts()
            try:
                self.state.banks[bank.name] = bank.merge(old, entries, server)
            except RefusedUpdateError:
                self.state.restore_parts(saved)
                raise
        return server

    def keep(self, clients: Sequence[str]) -> None:
        """Notes that these clients trained, so that they have the banks that come once."""
        for bank in self.banks("once"):
            handed = self.state.handed.setdefault(bank.name, [])
            known = set(handed)
            handed += [client for client in clients if client not in known]

    # --- a round ----------------------------------------------------------------------------------------------------

    def compute(self, updates: Sequence[Update]) -> tuple[ServerRound, ArrayDict]:
        """Weighs, fuses, merges the banks, refines and makes the broadcasts; returns the round and the new tensors.

        Only the parts' own states are changed. A model that is not finite is returned as soon as it exists.
        """
        server, recipe = self.server(updates), self.recipe
        self._visit("updates", dict(self.start), server)
        server.weights = recipe.weights.weigh(updates, self._view(server, "weights"))
        fused = recipe.fuse.fuse(updates, server.weights, self._view(server, "fuse"))
        like = {name: self.start[name] for name in updates[0].arrays} if recipe.fuse.masked else updates[0].arrays
        fused = same_layout(recipe.fuse, fused, like)
        self.move = update_size(fused, self.start) if recipe.fuse.amplifies else 0.0
        if recipe.fuse.masked:
            server.updates = [replace(update, arrays={}) for update in updates]
        for bank in self.banks("round") if self.training else []:
            if not isinstance(bank, Broadcast):
                server.banks = {**server.banks, bank.name: self._merged(bank, updates, server)}
        fused = self._visit("model", fused, server)
        for key, part in self._refining():
            if not_finite(fused):
                return server, fused
            fused = same_layout(part, part.refine(fused, self._view(server, key)), fused)
        server.current = self._start_from({**self.start, **fused})
        for bank in self._broadcasts():
            server.banks = {**server.banks, bank.name: self._made(bank, server)}
        return server, fused

    def _visit(self, moment: str, model: ArrayDict, server: ServerRound) -> ArrayDict:
        """Makes the visits of a moment; returns the model after them. `server` gets answers and the banks they fill."""
        visits = [visit for visit in self.recipe.visits if visit.moment == moment] if self.training else []
        for visit in visits:
            before = self.state.saved_parts(), server.answers, server.banks
            try:
                model = self._visited(visit, model, server)
            except RefusedUpdateError as error:
                if error.client != self.experiment.run.target:
                    raise
                saved, server.answers, server.banks = before
                self.state.restore_parts(saved)
                if self.visits:
                    self.visits.refuse(visit, error.reason)
        return model

    def _visited(self, visit: Visit, model: ArrayDict, server: ServerRound) -> ArrayDict:
        """The model after one visit; the same model without an answer."""
        view = self._view(server, f"visits.{visit.phase}")
        asked = visit.ask(model, view)
        answer = self.visits.ask(visit, asked, view) if self.visits and asked is not None else None
        if answer is None:
            return model
        server.answers = {**server.answers, visit.phase: answer}
        if visit.bank:
            server.banks = {**server.banks, visit.bank: {SERVER: owned(answer[visit.bank])}}
        view = self._view(server, f"visits.{visit.phase}")
        return same_layout(visit, visit.take(answer, model, view), model)

    def server(self, updates: Sequence[Update] = ()) -> ServerRound:
        """The current round, without the state of any part."""
        return ServerRound(
            round=self.round,
            rounds=self.experiment.train.rounds,
            clients=self.clients,
            previous=self.start,
            drawn=self.drawn,
            class_counts=self.class_counts,
            updates=updates,
            current=self.start,
            banks=self.state.banks,
            places=self.places,
            kinds=self.model.kinds,
            parameters=self.model.parameters,
            seed=self.experiment.run.seed,
            experiment=self.experiment,
            device=self.model.device,
            build_net=self.model.build_net,
            classes=self.model.classes,
            feature_dim=self.model.feature_dim,
            known_weights=self.recipe.weights.known,
        )

    # --- one part -----------------------------------------------------------------------------------------------------

    def _view(self, server: ServerRound, key: str) -> ServerRound:
        """The round that the part with this key gets."""
        state, arrays = self.state.of_part(key)
        return replace(server, state=state, arrays=arrays)

    def _bank_view(self, bank: Bank, server: ServerRound) -> ServerRound:
        return self._view(server, f"banks.{bank.name}")

    def _broadcasts(self) -> list[Broadcast]:
        return [bank for bank in self.recipe.banks if isinstance(bank, Broadcast)]

    def _made(self, bank: Broadcast, server: ServerRound) -> dict[str, ArrayDict]:
        return {SERVER: owned(bank.make(self._bank_view(bank, server)))}

    def _merged(self, bank: Bank, updates: Sequence[Update], server: ServerRound) -> dict[str, Arrays]:
        view = self._bank_view(bank, server)
        old = server.banks.get(bank.name, {})
        merged = bank.merge(old, {update.client: bank.gather(update, view) for update in updates}, view)
        # The updates' tensors last as long as the round: what the bank keeps of them is copied.
        return {owner: arrays if arrays is old.get(owner) else owned(arrays) for owner, arrays in merged.items()}

    def _refining(self) -> list[tuple[str, Refine]]:
        parts = self.recipe.refine if self.training else ()
        return [(refine_key(index, part), part) for index, part in enumerate(parts)]

    def require_places(self, state: ServerState) -> None:
        """UserError when a saved state belongs to refining parts in another order, which would begin without it."""
        known = {refine_key(index, part) for index, part in enumerate(self.recipe.refine)}
        saved = {key for key in state.parts.keys() | state.tensors.keys() if key.startswith("refine.")}
        lost = sorted(saved - known)
        if lost:
            raise UserError(
                f"the checkpoint has the state of {lost[0]}, which has another place in the recipe of this version; "
                "finish the run with the version that began it, or begin it anew in another folder"
            )

    def _start_from(self, model: Arrays) -> Arrays:
        """The model from which clients start: the saved one, unless a refining part returns another."""
        for key, part in reversed(self._refining()):
            model = part.start(model, self._view(self.server(), key))
        return model


def refine_key(index: int, part: Refine) -> str:
    """The name under which the state of a refining part is saved; `index` is its place in the recipe."""
    return f"refine.{index}.{type(part).__name__}"


def same_layout(part: Part, arrays: Arrays, like: Arrays) -> ArrayDict:
    """The tensors that a part returned. ValueError names a part with a bug: they are not the model's."""
    reason = misfit(arrays, like)
    if reason:
        raise ValueError(f"{type(part).__name__} returned tensors that are not the model's: {reason}")
    return dict(arrays)
