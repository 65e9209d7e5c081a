"""What the attackers of a simulation send in place of their updates (`run.attackers`).

delta_k = theta_k - theta are the moves of the shared parameters. Buffers, metrics, contributions to banks and
validations stay those of honest training. n clients have replied, m of them lie, H are the honest ones.

    sign_flip(s)  theta - s delta_k
    scaled(s)     theta + s delta_k
    noise(s)      theta + N(0, s^2)
    alie(z)       theta + mean_H delta - z std_H delta for each coordinate, std with 1 / |H|; without a number
                  z = Phi^-1((n - m - s) / (n - m)), s = floor(n / 2 + 1) - m. Baruch et al., NeurIPS 2019, section 3
    mimic(h)      the update of the honest client h, by default of the first. Karimireddy et al., ICLR 2022
    drift(c)      theta + c median_H ||delta|| u, u a random direction that stays the same in all rounds: never above
                  `run.update_limit` where c is below it

Labels are attacked where the data are: `label_flip` y -> M - 1 - y, and `label_shift(l)`, the first int(l B) labels
of each batch -> y + 1 mod M (fedsim/runs/attacked_data.py).
"""

from collections.abc import Callable, Mapping
from statistics import NormalDist

import numpy as np

from fedsim.common.seeding import numpy_rng
from fedsim.settings.attackers import OF_LABELS, Attack, attack_on
from strategies.server import Server
from strategies.server_round import ArrayDict, Arrays, Update


def attack(server: Server, updates: Mapping[str, Update]) -> dict[str, ArrayDict]:
    """{attacker: the tensors that it sends} of the accepted replies of a round; empty where nobody lies."""
    attackers = server.experiment.run.attackers
    attacks = {}
    for client in updates if attackers else ():
        attack = attack_on(attackers, client)
        if attack and attack.name not in OF_LABELS:
            attacks[client] = attack
    honest = {client: update.arrays for client, update in updates.items() if client not in attacks}
    lies = {}
    for client, attack in attacks.items():
        lies[client] = lie(server, client, attack, updates[client].arrays, honest)
    return lies


def lie(server: Server, client: str, attack: Attack, arrays: Arrays, honest: Mapping[str, Arrays]) -> ArrayDict:
    """The tensors that an attacker sends; its own where an attack needs honest clients and there are none."""
    start = server.parts.start
    names = sorted(server.parts.model.parameters & arrays.keys())
    sent = dict(arrays)
    if attack.name in ("alie", "mimic", "drift") and not honest:
        return sent
    if attack.name == "mimic":
        return dict(honest.get(attack.client, next(iter(honest.values()))))
    move = mover(server, client, attack, arrays, honest, names)
    for name in names:
        before = start[name]
        sent[name] = np.asarray(before + move(name), dtype=before.dtype)
    return sent


def mover(
    server: Server,
    client: str,
    attack: Attack,
    arrays: Arrays,
    honest: Mapping[str, Arrays],
    names: list[str],
) -> Callable[[str], np.ndarray]:
    """A function that gives the attacker's move of a tensor, in float64."""
    start, seed = server.parts.start, server.experiment.run.seed
    number = attack.number or 0.0
    if attack.name in ("sign_flip", "scaled"):
        factor = -number if attack.name == "sign_flip" else number
        return lambda name: factor * moved(arrays, start, name)
    if attack.name == "noise":
        rng = numpy_rng(seed, "attack", client, server.exchange.notes.round)
        return lambda name: number * rng.standard_normal(start[name].shape)
    if attack.name == "alie":
        everyone = len(honest) + liars(server)
        deviations = alie_factor(everyone, liars(server)) if attack.number is None else number
        return lambda name: below_mean([moved(other, start, name) for other in honest.values()], deviations)
    return drift(server, client, number, honest, names)


def drift(
    server: Server, client: str, share: float, honest: Mapping[str, Arrays], names: list[str]
) -> Callable[[str], np.ndarray]:
    """A function that gives the move of a drift: its size is that share of the median honest one."""
    start = server.parts.start
    rng = numpy_rng(server.experiment.run.seed, "attack", client)
    direction = {}
    length = 0.0
    for name in names:
        direction[name] = rng.standard_normal(start[name].shape)
        length += float(np.square(direction[name]).sum())
    sizes = [size_of(arrays, start, names) for arrays in honest.values()]
    step = share * float(np.median(sizes)) / np.sqrt(length)
    return lambda name: step * direction[name]


def liars(server: Server) -> int:
    """The number of clients that lie in this run, whether they take part in this round or not."""
    attackers = server.experiment.run.attackers
    return sum(attack_on(attackers, client) is not None for client in server.exchange.clients)


def alie_factor(everyone: int, lying: int) -> float:
    """z of ALIE for n clients of which m lie; below 0 where they are too few for a majority to hide in.

    >>> round(alie_factor(10, 3), 6)
    0.180012
    """
    supporters = everyone // 2 + 1 - lying
    share = (everyone - lying - supporters) / (everyone - lying)
    return NormalDist().inv_cdf(min(max(share, 1e-9), 1 - 1e-9))


def below_mean(moves: list[np.ndarray], deviations: float) -> np.ndarray:
    """mean - z std of some moves for each coordinate; std with 1 / n."""
    stacked = np.stack(moves)
    return np.asarray(stacked.mean(axis=0) - deviations * stacked.std(axis=0))


def moved(arrays: Arrays, start: Arrays, name: str) -> np.ndarray:
    """theta_k - theta of one tensor, in float64."""
    return np.subtract(arrays[name], start[name], dtype=np.float64)


def size_of(arrays: Arrays, start: Arrays, names: list[str]) -> float:
    """The L2 norm of a client's move over these tensors."""
    return float(np.sqrt(sum(float(np.square(moved(arrays, start, name)).sum()) for name in names)))
