"""Averages of client models: {name: array} in, {name: array} out, in one pass for any number of clients.

Every model is read as a fixed sequence of blocks (tensors in sorted order, short ones packed together, long ones cut).
The float64 rows of a block then stay in the processor's cache, and the result depends neither on the order of a
dictionary nor on the number of threads.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from strategies.stored import Piece, StoredArrays, heads_of

Arrays = Mapping[str, np.ndarray]  # tensors by name, to be read
ArrayDict = dict[str, np.ndarray]  # the same, new
Shares = Sequence[float] | np.ndarray  # one number for each client

BLOCK = 32768  # elements of one block: 256 KiB per client row in float64
GROUP = 16  # client rows cast to float64 together
THREADS = 2  # NumPy releases the GIL inside a block; two threads use all memory bandwidth of small machines


def weighted_mean(states: Sequence[Arrays], weights: Shares) -> ArrayDict:
    """The convex combination of client models, tensor by tensor.

        a_k = w_k / Σ_j w_j ;  mean[n] = Σ_k a_k · state_k[n]  (float tensors) ;  max_k state_k[n]  (integer tensors)

    Sums are made in float64 and cast back to the tensor's own dtype. Integer buffers keep their dtype. The mean of one
    client is exactly its tensors. Inputs may be read-only and unaligned; outputs are new arrays, in the order of the
    first state.

    Raises ValueError when there is no client, for weights that are negative, non-finite or all zero, and (with the name
    of the tensor) for keys, shapes or dtypes that differ.

    Source: McMahan et al. 2017, FedAvg, Algorithm 1. The rule for integer buffers is ours, because an average of counts
    is not a count.

        >>> models = [{"w": np.array([1.0, 2.0])}, {"w": np.array([3.0, 6.0])}]
        >>> weighted_mean(models, [0.75, 0.25])
        {'w': array([1.5, 3. ])}
    """
    names = _common_names(states)
    return _combine(states, dict.fromkeys(names, _shares(weights, len(states))))


def tensorwise_mean(states: Sequence[Arrays], coefficients: Mapping[str, Shares]) -> ArrayDict:
    """The convex combination of client models, with a separate weight vector for every float tensor.

        c^k = w^k / Σ_j w^j  with w = coefficients[n] ;  mean[n] = Σ_k c^k · state_k[n]

    Integer tensors need no coefficients. All else is as in `weighted_mean`.

    Source: CSAC (Yuan et al., TKDE 2023), semantic aggregation: M_l = Σ_h c_l^h G_l^h.
    """
    names = _common_names(states)
    missing = [name for name in _floats(states[0]) if name not in coefficients]
    if missing:
        raise ValueError(f"no coefficients for tensor {missing[0]!r}")
    return _combine(states, {name: _shares(coefficients[name], len(states)) for name in names if name in coefficients})


def divergence_coefficients(
    states: Sequence[Arrays],
    metric: str = "l2",
    strategy: str = "divergence",
    groups: Mapping[str, str] | None = None,
) -> ArrayDict:
    """Weights [H] for each float tensor, by the distance of each client from the plain average.

        avg_l = (1/H) Σ_h G_l^h ;  dist_l^h = D(G_l^h, avg_l) ;  c_l^h = dist_l^h / Σ_j dist_l^j

    metric: D is "l2" ‖G − avg‖₂, "l1" ‖G − avg‖₁, or "cosine" 1 − cos(G, avg) (0 if both are zero, 1 if one is)
    strategy: "divergence" as above, "similarity" c ∝ 1/(dist + 1e-12), "average" c = 1/H
    groups: {tensor: group}, for example the leaf module; the float tensors of a group count as one vector l (default:
    each tensor is its own l)

    If Σ dist ≤ 1e-12 (1 + ‖avg‖), all clients agree and c = 1/H (‖·‖ is the norm of the metric). H = 1 gives c = 1. H =
    2 gives 1/2 under l2 and l1 for all tensors, so that weighting by divergence has no effect with two clients.

    Source: CSAC (Yuan et al., TKDE 2023), semantic aggregation. The released loop overwrites its sum where a
    coefficient is exactly 0; here such a client contributes nothing.
    """
    if metric not in ("l2", "l1", "cosine"):
        raise ValueError(f"unknown metric {metric!r}: l2, l1 or cosine")
    if strategy not in ("divergence", "average", "similarity"):
        raise ValueError(f"unknown strategy {strategy!r}: divergence, average or similarity")
    _common_names(states)
    names = _floats(states[0])
    if groups is not None and (missing := [name for name in names if name not in groups]):
        raise ValueError(f"tensor {missing[0]!r} belongs to no group")
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(name if groups is None else groups[name], []).append(name)
    coefficients: ArrayDict = {}
    for group in members.values():
        sums = np.sum([_distance_sums(states, name, metric) for name in group], axis=0)
        share = _divergence_shares(*_distances(sums, metric), strategy)
        coefficients.update(dict.fromkeys(group, share))
    return coefficients


def project_simplex(v: Shares) -> np.ndarray:
    """The Euclidean projection of v [K] on the probability simplex.

        u = v sorted downwards ; ρ = max{j : u_j · j > Σ_{i≤j} u_i − 1} ; θ = (Σ_{i≤ρ} u_i − 1) / ρ ; λ = max(v − θ, 0)

    Raises ValueError for an empty or non-finite vector.

    Source: Duchi et al., ICML 2008, Figure 1; the λ step of agnostic federated learning (Mohri et al., ICML 2019).
    """
    values = np.asarray(v, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or not np.isfinite(values).all():
        raise ValueError("project_simplex needs a non-empty vector of finite numbers")
    values = values - values.max()  # same projection, and large equal entries lose no digits
    u = np.sort(values)[::-1]
    excess = np.cumsum(u) - 1.0
    j = np.arange(1, values.size + 1)
    rho = j[u * j > excess][-1]
    theta = excess[rho - 1] / rho
    return np.maximum(values - theta, 0.0)


def _shares(weights: Shares, count: int) -> np.ndarray:
    """Weights [K] as non-negative float64 shares with sum 1."""
    shares = np.asarray(weights, dtype=np.float64)
    if shares.shape != (count,):
        raise ValueError(f"{count} clients need {count} weights, got shape {shares.shape}")
    if not np.isfinite(shares).all() or (shares < 0).any() or not 0 < shares.sum() < np.inf:
        raise ValueError(f"weights must be finite, non-negative and not all zero: {shares.tolist()}")
    return shares / shares.sum()


def _floats(state: Arrays) -> list[str]:
    """Sorted names of the float tensors."""
    return sorted(name for name, (_, dtype) in heads_of(state).items() if dtype.kind == "f")


def _common_names(states: Sequence[Arrays]) -> list[str]:
    """Sorted tensor names; ValueError unless all states agree on names, shapes and dtypes."""
    if not states:
        raise ValueError("no client model to average")
    first = heads_of(states[0])
    for name, (_, dtype) in first.items():
        if dtype.kind not in "fiub":
            raise ValueError(f"tensor {name!r} has dtype {dtype}, neither float, integer nor bool")
    for k, state in enumerate(states[1:], start=1):
        heads = heads_of(state)
        if heads.keys() != first.keys():
            raise ValueError(f"client {k} differs in tensor {sorted(heads.keys() ^ first.keys())[0]!r}")
        for name, (shape, dtype) in first.items():
            if heads[name] != (shape, dtype):
                raise ValueError(
                    f"client {k} sent tensor {name!r} as {heads[name][1]}{list(heads[name][0])}, "
                    f"client 0 as {dtype}{list(shape)}"
                )
    return sorted(first)


def _combine(states: Sequence[Arrays], shares: Arrays) -> ArrayDict:
    """New arrays Σ_k shares[n]_k · state_k[n] (float) and max_k state_k[n] (integer, bool)."""
    if len(states) == 1:
        return {name: np.array(array) for name, array in states[0].items()}
    names = _floats(states[0])
    result = {name: np.empty(*head) for name, head in heads_of(states[0]).items()}
    for name in result.keys() - set(names):
        result[name][...] = states[0][name]
        for state in states[1:]:
            np.maximum(result[name], state[name], out=result[name])
    rows = [state if isinstance(state, StoredArrays) else _Row(state, names) for state in states]
    outputs = {name: result[name].reshape(-1) for name in names}
    blocks = _blocks([(name, outputs[name].size) for name in names])
    if len(blocks) < 2 * THREADS:
        _combine_blocks(blocks, rows, shares, outputs)
        return result
    with ThreadPoolExecutor(THREADS) as pool:
        jobs = [pool.submit(_combine_blocks, blocks[i::THREADS], rows, shares, outputs) for i in range(THREADS)]
        for job in jobs:
            job.result()
    return result


def _blocks(sizes: Sequence[tuple[str, int]]) -> list[list[Piece]]:
    """The model cut into blocks of BLOCK elements; a block lists its pieces (name, start, stop)."""
    blocks: list[list[Piece]] = []
    room = 0
    for name, size in sizes:
        start = 0
        while start < size:
            if room == 0:
                blocks.append([])
                room = BLOCK
            stop = min(size, start + room)
            blocks[-1].append((name, start, stop))
            room -= stop - start
            start = stop
    return blocks


class _Row:
    """One client's float tensors in memory, flattened."""

    def __init__(self, state: Arrays, names: Sequence[str]) -> None:
        self._flat = {name: np.ravel(state[name]) for name in names}

    def fill(self, pieces: Sequence[Piece], out: np.ndarray) -> None:
        """Write parts of tensors one after the other into `out`."""
        np.concatenate([self._flat[name][start:stop] for name, start, stop in pieces], out=out)


def _combine_blocks(
    blocks: Sequence[Sequence[Piece]], rows: "Sequence[StoredArrays | _Row]", shares: Arrays, outputs: Arrays
) -> None:
    """The sum over k of a_k * state_k, on the given blocks, which fills `outputs`.

    GROUP rows of clients at a time are cast to float64, and their weighted sum is added.
    """
    group = min(GROUP, len(rows))
    cast, total, partial = np.empty((group, BLOCK)), np.empty(BLOCK), np.empty(BLOCK)
    for pieces in blocks:
        spans = _spans(pieces, shares)
        used = spans[-1][2]
        for k in range(0, len(rows), group):
            members = rows[k : k + group]
            for row, member in zip(cast, members):
                member.fill(pieces, row[:used])
            target = partial if k else total
            for share, lo, hi in spans:
                np.einsum("k,kb->b", share[k : k + group], cast[: len(members), lo:hi], out=target[lo:hi])
            if k:
                np.add(total[:used], partial[:used], out=total[:used])
        lo = 0
        for name, start, stop in pieces:
            outputs[name][start:stop] = total[lo : lo + stop - start]
            lo += stop - start


def _spans(pieces: Sequence[Piece], shares: Arrays) -> list[tuple[np.ndarray, int, int]]:
    """Runs (shares, start, stop) of a block's pieces that have the same shares."""
    spans: list[tuple[np.ndarray, int, int]] = []
    position = 0
    for name, start, stop in pieces:
        end = position + stop - start
        if spans and spans[-1][0] is shares[name]:
            spans[-1] = (spans[-1][0], spans[-1][1], end)
        else:
            spans.append((shares[name], position, end))
        position = end
    return spans


def _distance_sums(states: Sequence[Arrays], name: str, metric: str) -> np.ndarray:
    """For each client, the sums over one tensor from which its distance is computed, [H, 3]; they add up over a group.

    l2: Σ(G−avg)², Σavg², 0 ;  l1: Σ|G−avg|, Σ|avg|, 0 ;  cosine: Σ G·avg, Σavg², ΣG²
    """
    average = np.zeros(math.prod(heads_of(states[0])[name][0]))
    for state in states:
        average += np.ravel(state[name])
    average /= len(states)
    sums = np.zeros((len(states), 3))
    for row, state in zip(sums, states):
        tensor = np.ravel(state[name]).astype(np.float64)
        if metric == "cosine":
            row[:] = tensor @ average, average @ average, tensor @ tensor
            continue
        tensor -= average
        row[:2] = (tensor @ tensor, average @ average) if metric == "l2" else (_l1(tensor), _l1(average))
    return sums


def _l1(vector: np.ndarray) -> float:
    return float(np.abs(vector).sum())


def _distances(sums: np.ndarray, metric: str) -> tuple[np.ndarray, float]:
    """The distances [H] and the norm of the average, from the sums of `_distance_sums`."""
    first, average, norms = sums.T
    if metric == "l1":
        return first, float(average[0])
    if metric == "l2":
        return np.sqrt(first), float(np.sqrt(average[0]))
    product = np.sqrt(average) * np.sqrt(norms)
    cosine = np.divide(first, product, out=np.zeros_like(first), where=product > 0)
    distance = np.where((average == 0) & (norms == 0), 0.0, np.maximum(1.0 - cosine, 0.0))
    return distance, float(np.sqrt(average[0]))


def _divergence_shares(distance: np.ndarray, norm: float, strategy: str) -> np.ndarray:
    """The coefficients [H], with sum 1, from the distances of one l."""
    if strategy == "average" or distance.sum() <= 1e-12 * (1.0 + norm):
        return np.full(len(distance), 1.0 / len(distance))
    score = distance if strategy == "divergence" else 1.0 / (distance + 1e-12)
    return score / score.sum()
