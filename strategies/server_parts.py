"""The server parts of a recipe in a round: what each of them sees, and what the banks send and collect."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fedsim.common.errors import UserError
from fedsim.parts.part import Part
from fedsim.settings.experiment import Experiment
from strategies.banks.checks import odd_shapes, owned
from strategies.model import ServerModel
from strategies.parts import (
    SERVER,
    ArrayDict,
    Arrays,
    Bank,
    Broadcast,
    Compress,
    Cut,
    Entries,
    Place,
    Refine,
    RefusedUpdateError,
    ServerRound,
    Update,
)
from strategies.recipe import ServerRecipe
from strategies.state import ServerState
from strategies.stored import Head
from strategies.wire.compression import reply_form


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

    def open(self, round: int, model: Arrays, clients: Sequence[str], drawn: Sequence[str], training: bool) -> None:
        """Begins a round with the saved model. Broadcasts that were never made are made."""
        self.round, self.training = round, training
        self.clients, self.drawn = list(clients), list(drawn)
        self.start = model
        self.start = self.start_from(model)
        view = self.whole_round()
        for bank in self.broadcasts():
            if bank.name not in self.state.banks:
                self.state.banks[bank.name] = self.made(bank, view)

    def cut(self, client: str) -> dict[str, Cut]:
        """The part of the shared tensors on which a client trains in this round; empty when it gets them completely."""
        share = self.recipe.share
        if not (share.partial and self.training and self.round):
            return {}
        assert self.model.net is not None  # described before the first round
        return share.cut(self.model.net, client, self.round, self.experiment.run.seed)

    @property
    def compress(self) -> Compress | None:
        """The part that compresses the updates of this round; None where they travel as they are."""
        return self.recipe.compress if self.training and self.round else None

    def form(self, heads: Mapping[str, Head]) -> dict[str, Head]:
        """Shape and type of every tensor of a reply, given those of the model."""
        if self.compress is None:
            return self.recipe.fuse.form(heads)
        return reply_form(self.compress, heads, self.model.parameters)

    def needs(self) -> set[str]:
        """The metrics without which a reply to a train message cannot be used, those of all parts."""
        return {name for part in self.recipe.of(Part) for name in part.needs} if self.training else set()

    @property
    def signed_loss(self) -> bool:
        """Whether a training loss of this recipe may be below 0."""
        return any(part.signed_loss for part in self.recipe.of(Part))

    # --- banks ------------------------------------------------------------------------------------------------------

    def banks(self, when: str) -> list[Bank]:
        """The banks that are filled at this time."""
        return [bank for bank in self.recipe.banks if bank.when == when]

    def contributed(self) -> tuple[Bank, ...]:
        """The banks with contributions in the replies of this phase."""
        return tuple(bank for bank in self.banks("round") if bank.contributed and self.training)

    def views(self, banks: Sequence[Bank]) -> dict[str, ServerRound]:
        """The round that each of these banks gets."""
        return {bank.name: self.bank_view(bank, self.whole_round()) for bank in banks}

    def handed_out(self, names: Sequence[str] | None = None) -> Callable[[str], dict[str, Arrays]]:
        """A function that gives a client's records of all (or named) banks; one that comes once, while it lacks it."""
        banks = [bank for bank in self.recipe.banks if names is None or bank.name in names]
        views = self.views(banks)
        once = {bank.name: set(self.state.handed.setdefault(bank.name, [])) for bank in self.banks("once")}

        def records(client: str) -> dict[str, Arrays]:
            records_of_banks = {
                bank.name: bank.hand_out(self.state.banks.get(bank.name, {}), client, views[bank.name])
                for bank in banks
                if client not in once.get(bank.name, ())
            }
            return {name: arrays for name, arrays in records_of_banks.items() if arrays is not None}

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
        old, view = self.state.banks.get(bank.name, {}), self.bank_view(bank, self.whole_round())
        if entries or bank.when != "before":
            saved = self.state.saved_parts()
            try:
                self.state.banks[bank.name] = bank.merge(old, entries, view)
            except RefusedUpdateError:
                self.state.restore_parts(saved)
                raise
        return view

    def keep(self, clients: Sequence[str]) -> None:
        """Notes that these clients trained, so that they have the banks that come once."""
        for bank in self.banks("once"):
            handed = self.state.handed.setdefault(bank.name, [])
            present = set(handed)
            handed += [client for client in clients if client not in present]

    # --- what a part sees ---------------------------------------------------------------------------------------------

    def whole_round(self, updates: Sequence[Update] = ()) -> ServerRound:
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

    def view(self, view: ServerRound, key: str) -> ServerRound:
        """The round that the part with this key gets."""
        state, arrays = self.state.of_part(key)
        return replace(view, state=state, arrays=arrays)

    def bank_view(self, bank: Bank, view: ServerRound) -> ServerRound:
        """The round that a bank gets."""
        return self.view(view, f"banks.{bank.name}")

    def broadcasts(self) -> list[Broadcast]:
        """The banks whose records the server makes by itself."""
        return [bank for bank in self.recipe.banks if isinstance(bank, Broadcast)]

    def made(self, bank: Broadcast, view: ServerRound) -> dict[str, ArrayDict]:
        """The content of such a bank, made now."""
        return {SERVER: owned(bank.make(self.bank_view(bank, view)))}

    def refining(self) -> list[tuple[str, Refine]]:
        """The parts that refine the fused model in this round, with the keys of their states."""
        parts = self.recipe.refine if self.training else ()
        return [(refine_key(index, part), part) for index, part in enumerate(parts)]

    def require_places(self, state: ServerState) -> None:
        """UserError when a saved state belongs to refining parts in another order, which would begin without it."""
        keys = {refine_key(index, part) for index, part in enumerate(self.recipe.refine)}
        saved = {key for key in state.parts.keys() | state.tensors.keys() if key.startswith("refine.")}
        lost = sorted(saved - keys)
        if lost:
            raise UserError(
                f"the checkpoint has the state of {lost[0]}, which has another place in the recipe of this version; "
                "finish the run with the version that began it, or begin it anew in another folder"
            )

    def start_from(self, model: Arrays) -> Arrays:
        """The model from which clients start: the saved one, unless a refining part returns another."""
        for key, part in reversed(self.refining()):
            model = part.start(model, self.view(self.whole_round(), key))
        return model


def refine_key(index: int, part: Refine) -> str:
    """The name under which the state of a refining part is saved; `index` is its place in the recipe."""
    return f"refine.{index}.{type(part).__name__}"
