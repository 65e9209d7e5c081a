"""Draws whole groups of images: the images of one patient, slide or sequence are never in two parts.

A group counts as an image of the class that most of its images have; of equally frequent ones the first. The groups
stand in a seeded order. A share of n images is met by the first groups whose images together come nearest to n. It is
at least one group, and the fewer ones where two numbers of groups are equally near. Pure NumPy.
"""

from dataclasses import dataclass

import numpy as np

from fedsim.common.errors import UserError
from fedsim.data.client_data import Split
from fedsim.data.splits import MIN_IMAGES, REDRAWS, by_class, cut_by_shares, deal, shuffled

MIN_GROUPS = 2  # of a client: one to train, one to validate


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups of N images.

    numbers: the group of every image, int64 [N] from 0 to G-1; None where every image is a group of its own
    sizes: the number of images of every group, int64 [G]
    labels: the most frequent class of every group, int64 [G]
    """

    numbers: np.ndarray | None
    sizes: np.ndarray
    labels: np.ndarray

    def count(self, groups: np.ndarray) -> int:
        """The number of images of some groups."""
        return int(self.sizes[groups].sum())

    def images(self, groups: np.ndarray) -> np.ndarray:
        """Sorted positions of the images of some groups, int64 [n]."""
        if self.numbers is None:
            return np.sort(groups)
        return np.flatnonzero(np.isin(self.numbers, groups))

    def first(self, order: np.ndarray, images: float) -> np.ndarray:
        """The first groups of an order whose images come nearest to a number of images; none for 0 images."""
        if not images:
            return order[:0]
        distances = np.abs(np.cumsum(self.sizes[order]) - images)
        return order[: int(np.argmin(distances)) + 1]


def groups_of(numbers: np.ndarray | None, labels: np.ndarray) -> Groups:
    """The groups of images with these numbers of groups int64 [N], which may have gaps, and these labels int64 [N].

    Without numbers every image is a group of its own.
    """
    if numbers is None:
        return Groups(None, np.ones(len(labels), np.int64), labels)
    _, numbers, sizes = np.unique(numbers, return_inverse=True, return_counts=True)
    classes = int(labels.max(initial=0)) + 1
    cells = np.bincount(numbers * classes + labels, minlength=len(sizes) * classes)
    counts = cells.reshape(len(sizes), classes)
    return Groups(numbers, sizes, counts.argmax(axis=1))


def split_groups(
    groups: Groups,
    holdout: float,
    seed: int,
    stratified: bool,
    where: str,
) -> Split:
    """Split of 0..N-1 into (train, validation), each of whole groups and sorted.

    The first groups that come nearest to floor(holdout * N) images validate; `stratified`: of every class of groups
    those nearest to floor(holdout * n_c). One group of all, or of a class, always trains. When no class gives a group,
    the first one of the class with the most groups validates. Raises UserError, which begins with `where`, when there
    is only one group.
    """
    _refuse_one(groups, where)
    order = shuffled(len(groups.sizes), seed)
    families = by_class(order, groups.labels) if stratified else [order]
    least = 0 if stratified else 1
    held = [_held_out(groups, family, holdout, least) for family in families]
    if not sum(map(len, held)):
        largest = max(families, key=len)
        held = [largest[:1]]
    validation = groups.images(np.concatenate(held))
    positions = np.arange(groups.sizes.sum())
    return np.delete(positions, validation), validation


def _refuse_one(groups: Groups, where: str) -> None:
    """UserError, which begins with `where`, when all images are one group."""
    if len(groups.sizes) < MIN_GROUPS:
        raise UserError(
            f"{where}: its {groups.sizes.sum()} images are one group, which is never split, and two "
            "groups are needed; lower data.clients_per_domain, raise data.fraction, or leave out "
            "data.group and data.columns.group"
        )


def _held_out(
    groups: Groups,
    order: np.ndarray,
    holdout: float,
    least: int,
) -> np.ndarray:
    """The groups of an order that validate, of `least` images or more; the last one of the order never does."""
    images = max(least, int(holdout * groups.count(order)))
    return groups.first(order, images)[: len(order) - 1]


def subset_of_groups(groups: Groups, fraction: float, seed: int) -> np.ndarray:
    """Sorted positions of `fraction` of the images of every class of groups. A larger fraction contains a smaller."""
    if fraction >= 1:
        return np.arange(groups.sizes.sum(), dtype=np.int64)
    order = shuffled(len(groups.sizes), seed)
    chosen = []
    for family in by_class(order, groups.labels):
        images = fraction * groups.count(family)
        chosen.append(groups.first(family, images))
    return groups.images(np.concatenate(chosen))


def adapting_groups(
    groups: Groups,
    images: int,
    fraction: float,
    seed: int,
    where: str,
) -> np.ndarray:
    """Sorted positions of the first groups nearest to a number of images; one group is always left.

    fraction: of these images, for a run on a part of them. Raises UserError, which begins with `where`, when there is
    only one group; without images nothing is drawn.
    """
    if not images:
        return np.zeros(0, np.int64)
    _refuse_one(groups, where)
    order = shuffled(len(groups.sizes), seed)
    drawn = groups.first(order, images)[: len(order) - 1]
    used = groups.first(drawn, fraction * groups.count(drawn))
    return groups.images(used)


def partition_groups(
    groups: Groups,
    kind: str,
    clients: int,
    alpha: float,
    seed: int,
) -> list[np.ndarray]:
    """0..N-1 shared between clients, group by group: sorted positions for each client.

    kind "iid": shuffled groups are dealt one by one, so that the numbers of groups differ by at most one. "dirichlet":
    the shares of every class of groups are drawn from Dirichlet(alpha), and a group goes to the client in whose share
    of the class its middle image lies. The draw is repeated until every client has 2 groups and 3 images. Raises
    UserError when there are too few groups, or when 200 draws are not enough.
    """
    count = len(groups.sizes)
    if count < MIN_GROUPS * clients:
        raise UserError(
            f"{count} groups of a domain are too few for {clients} clients (each needs one for training "
            "and one for validation); lower data.clients_per_domain or raise data.fraction"
        )
    if kind == "iid":
        parts = deal(shuffled(count, seed), clients)
        return [groups.images(part) for part in parts]
    rng = np.random.RandomState(seed)
    for _ in range(REDRAWS):
        parts = _drawn_by_class(groups, clients, alpha, rng)
        if min(map(len, parts)) < MIN_GROUPS:
            continue
        images = [groups.images(part) for part in parts]
        if min(map(len, images)) >= MIN_IMAGES:
            return images
    raise UserError(
        f"a Dirichlet partition with data.alpha = {alpha} leaves one of {clients} clients with fewer than "
        f"{MIN_GROUPS} of {count} groups; raise data.alpha or lower data.clients_per_domain"
    )


def _drawn_by_class(
    groups: Groups,
    clients: int,
    alpha: float,
    rng: np.random.RandomState,
) -> list[np.ndarray]:
    """One draw of the groups of each client: shuffled, then cut class by class by shares from Dirichlet(alpha)."""
    order = rng.permutation(len(groups.sizes))
    pieces = []
    for family in by_class(order, groups.labels):
        shares = rng.dirichlet(np.full(clients, alpha))
        pieces.append(cut_by_shares(family, shares, groups.sizes[family]))
    return [np.concatenate(of_client) for of_client in zip(*pieces)]
