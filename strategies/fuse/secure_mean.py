"""Secure aggregation: the server learns the weighted sum of the updates, and no single one of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedsim.common.errors import UserError
from fedsim.parts.facts import Fact
from fedsim.parts.part import Part, RecipeParts, part_name
from fedsim.settings.experiment import Experiment
from fedsim.tensors.kinds import Kind
from strategies.aggregate import weighted_mean
from strategies.banks.secure_exchange import COMMITMENT, KEY, KEYS, LINE, OPENED, SELF, SHARES
from strategies.fuse.enough_clients import clients_in_a_round
from strategies.parts import ArrayDict, Entries, Fuse, LostRoundError, ServerRound, Update
from strategies.tools import masking


def threshold_of(threshold: int, clients: int, per_round: int = 0, listed: int = 0) -> int:
    """t: how many clients must answer for a sum to be unmasked; more than half of a round's clients by default.

    clients: of the federation; per_round: how many are drawn for a round, 0 for all; listed: in the round's list of
    keys. A server could list more clients than it draws, so that the list itself counts, and not what was agreed on.

    With more than half, a server that tells some clients that u delivered and others that it did not never gets enough
    shares of both of u's secrets.
    """
    return max(threshold or max(min(clients, per_round or clients) // 2 + 1, 2), listed // 2 + 1)


@dataclass(frozen=True)
class SecureMean(Fuse):
    """theta <- theta + (sum_k w_k delta_k) / (sum_k w_k),   delta_k = theta_k - theta

    Each client rounds w_k delta_k to integers modulo 2^bits and adds masks that cancel in the sum (Bonawitz et al., CCS
    2017; `tools.masking` has the formulas). w_k is the client's weight among the clients that sent shares, sums
    are over those that delivered; when up to n - t of n fail after the shares, the sum is unmasked all the same. It
    differs from `weighted_mean` by at most n limit / (2^bits - 2^17) / sum_k w_k in a coordinate, plus the rounding of
    the tensor's own type. Up to this, weights by numbers of examples give FedAvg. Tensors that only go up are summed as
    they are. Integer tensors (counters of steps, which the metrics tell anyway) are not masked. A round has three more
    small messages. The weights must follow from numbers of examples; parts that look at single updates, further banks
    and local noise are refused, and `run.update_limit` must
    be 0: no one can compare updates. SECURITY-DETAILS.md says what a server that deviates from the protocol could do.

    limit: the largest change of a coordinate; a client whose change is larger fails with its name
    bits: 32 (as much traffic as float32) or 64
    threshold: t; 0 for more than half of a round's clients, which is also the least
    """

    limit: Annotated[float, Field(gt=0)] = 16.0
    bits: Literal[32, 64] = 32
    threshold: Annotated[int, Field(ge=0)] = 0
    masked: ClassVar[bool] = True
    assumes = (Fact.SEVERAL_CLIENTS, Fact.KNOWN_WEIGHTS, Fact.WHOLE_MODEL)
    breaks = (Fact.WEIGHTED_MEAN, Fact.SINGLE_UPDATES)
    requires: ClassVar[dict[str, str]] = {"banks": "secure_keys", "reports": "masked_update"}

    @property
    def sets(self) -> dict[str, dict[str, object]]:
        """The client half has the same numbers."""
        return {"masked_update": {"limit": self.limit, "bits": self.bits, "threshold": self.threshold}}

    def refuses(self, recipe: RecipeParts) -> str:
        """A prelude has no masks, and the client half has the same numbers."""
        if recipe.prelude:
            return f"the prelude {recipe.prelude!r} does not go with secure_mean, which masks whole models"
        same = [part for part in recipe.of(Part) if part_name(part) in self.sets and vars(part) != vars(self)]
        return "method.masked_update must have the values of method.secure_mean" if same else ""

    def check(self, experiment: Experiment) -> None:
        """UserError for too few clients, a threshold out of range, settings that need single updates, and a run that
        would repeat more than the round in which it was interrupted."""
        if experiment.run.update_limit:
            raise UserError(
                "secure_mean hides single updates, so that run.update_limit cannot compare them; to do without that "
                "protection set run.update_limit = 0"
            )
        if experiment.train.dp_clip:
            raise UserError("train.dp_clip perturbs the model that leaves a client, which secure_mean masks; use one")
        if experiment.run.checkpoint_every > 1:
            raise UserError(
                "secure_mean needs a checkpoint after every round: a round that is repeated with one client less shows "
                "that client's update; set run.checkpoint_every = 1"
            )
        count = clients_in_a_round(experiment)
        least = threshold_of(0, count)
        if count and (count < 2 or (self.threshold and not least <= self.threshold <= count)):
            raise UserError(
                f"secure_mean with {count} clients in a round: it needs at least two, and method.secure_mean.threshold "
                f"between {least} and {count} (or 0)"
            )

    def form(self, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> dict[str, tuple]:
        """Floating tensors arrive as unsigned integers of the same shape."""
        masked = np.dtype(f"u{self.bits // 8}")
        return {name: (shape, masked if dtype.kind == "f" else dtype) for name, (shape, dtype) in shapes.items()}

    def fuse(self, updates: Sequence[Update], weights: Mapping[str, float], server: ServerRound) -> ArrayDict:
        """The unmasked sum; LostRoundError when too few clients answered."""
        first = updates[0].arrays
        total = {name: np.array(array) for name, array in first.items() if server.previous[name].dtype.kind == "f"}
        for update in updates[1:]:
            for name, array in total.items():
                np.add(array, update.arrays[name], out=array)
        for seed, sign in self._masks([update.client for update in updates], server):
            masking.add_mask(total, seed, -sign)
        lines = {client: bytes(server.banks[KEYS][client][LINE]) for client in server.banks[SHARES]}
        shares = server.known_weights({name: masking.examples_of(line) for name, line in lines.items()})
        assert shares is not None  # Fact.KNOWN_WEIGHTS
        weight = sum(shares[update.client] for update in updates)
        result = weighted_mean(
            [{name: update.arrays[name] for name in update.arrays.keys() - total.keys()} for update in updates],
            [1.0] * len(updates),  # integers: the largest
        )
        result |= {name: self._moved(name, array, weight, server) for name, array in total.items()}
        return {name: result[name] for name in first}

    def _moved(self, name: str, total: np.ndarray, weight: float, server: ServerRound) -> np.ndarray:
        """A tensor after the round; a variance does not fall below 0 by rounding."""
        change = masking.decoded(total, self.bits, self.limit) / weight
        like = server.previous[name]
        value = change + like if server.places.get(name, "shared") == "shared" else change
        if server.kinds.get(name) is Kind.BN_STATISTICS and name.endswith("running_var"):
            value = np.maximum(value, 0.0)
        return np.asarray(value, dtype=like.dtype)

    def _least(self, server: ServerRound, lines: int) -> int:
        """The number of clients whose shares give a secret, of those on the list of keys."""
        return threshold_of(self.threshold, len(server.clients), server.experiment.train.clients_per_round, lines)

    def _masks(self, delivered: Sequence[str], server: ServerRound) -> Iterator[tuple[bytes, int]]:
        """(seed, sign) of every mask that is left in the sum."""
        lines = {name: bytes(entry[LINE]) for name, entry in sorted(server.banks[KEYS].items())}
        opened, least = server.banks[OPENED], self._least(server, len(lines))
        common = masking.transcript(server.round, least, lines)
        if len(opened) < least:
            raise LostRoundError(f"only {len(opened)} clients helped to unmask the sum, {least} are needed")
        places = {name: place for place, name in enumerate(lines, start=1)}
        for client in delivered:
            mark = bytes(server.banks[SHARES][client][COMMITMENT])
            yield secret_of(client, points_of(SELF + client, opened, places), least, mark, masking.commitment), 1
        for client in sorted(server.banks[SHARES].keys() - set(delivered)):
            mark = masking.mask_key(lines[client])
            key = secret_of(client, points_of(KEY + client, opened, places), least, mark, masking.public_key)
            for other in delivered:
                seed = masking.pair_seed(key, masking.mask_key(lines[other]), common)
                yield seed, masking.pair_sign(other, client)


def points_of(share: str, opened: Entries, places: Mapping[str, int]) -> dict[int, bytes]:
    """The shares of one secret that came, by the place of their owner in the list of keys."""
    return {places[who]: bytes(entry[share]) for who, entry in opened.items() if share in entry}


def secret_of(
    client: str, points: dict[int, bytes], least: int, mark: bytes, mark_of: Callable[[bytes], bytes]
) -> bytes:
    """A client's secret, which `least` of its shares give; LostRoundError where they are too few or give another one.

    mark, mark_of: what is known of the secret, and the function that gives it
    """
    restored = masking.restored_as(points, least, mark, mark_of) if len(points) >= least else None
    if restored is None:
        raise LostRoundError(f"the shares of the masks of client {client!r} do not give its secret")
    return restored
