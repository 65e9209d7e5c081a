"""FINCH: clusters of a few vectors by their first neighbours, without parameters.

Source: Sarfraz et al., CVPR 2019. The code is our own, because the authors' package (finch-clust) is not free for
commercial use, and because our task is small: at most a few thousand vectors with exact neighbours.
"""

from collections.abc import Callable

import numpy as np

FEWEST = 4  # of fewer points no two clusters are ever made
TIE = 1e-12  # cosines that differ by less are equal: their products are rounded


def first_neighbour_clusters(points: np.ndarray) -> np.ndarray:
    """Cluster numbers [n] of the rows of points [n, d]. Every point is in the cluster of its nearest other point.

        nn(i) = argmin_{j != i} (1 - cos(p_i, p_j)), the lowest j of equal ones

    A zero vector has the distance 1 to all others. The links i - nn(i) also join points with a common neighbour, so
    that the connected components are those of FINCH.
    """
    norms = np.linalg.norm(points, axis=1, keepdims=True)
    directions = np.divide(points, norms, out=np.zeros_like(points), where=norms > 0)
    return _linked(directions @ directions.T)


def _linked(similarity: np.ndarray) -> np.ndarray:
    """Cluster numbers [n] of points with these cosines [n, n], whose diagonal is written over."""
    from scipy.sparse import coo_array  # this import is slow, and few processes need it
    from scipy.sparse.csgraph import connected_components

    count = len(similarity)
    if count < 2:
        return np.zeros(count, np.int64)
    np.fill_diagonal(similarity, -np.inf)
    nearest = (similarity >= similarity.max(axis=1, keepdims=True) - TIE).argmax(axis=1)
    links = coo_array((np.ones(count), (np.arange(count), nearest)), shape=(count, count))
    return connected_components(links, directed=False)[1].astype(np.int64)


def _clusters_of_products(products: np.ndarray) -> np.ndarray:
    """`first_neighbour_clusters` of points of which only the inner products [n, n] are known."""
    norms = np.sqrt(products.diagonal().clip(min=0))
    scale = norms[:, None] * norms
    return _linked(np.divide(products, scale, out=np.zeros_like(products), where=scale > 0))


def cluster_means(points: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The mean [J, d] of each cluster's rows of points [n, d], for labels 0 .. J-1."""
    return np.stack([points[labels == label].mean(axis=0) for label in range(labels.max() + 1)])


def _products_of_means(products: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The inner products [J, J] of the cluster means of points with these inner products [n, n]."""
    return cluster_means(cluster_means(products, labels).T, labels)


def partitions(points: np.ndarray) -> list[np.ndarray]:
    """FINCH's partitions from fine to coarse, each as cluster numbers [n] of the points.

    The first one joins points by their first neighbours. Each next one joins clusters by the first neighbours of their
    means (over all original members). The series ends before a partition with one cluster, or with as many clusters as
    the last one; the first partition is always returned.
    """
    return _series(np.asarray(points, np.float64), first_neighbour_clusters, cluster_means)


def partitions_of_products(products: np.ndarray) -> list[np.ndarray]:
    """The same partitions of points that are too long to be held: from their inner products [n, n], float64."""
    return _series(products, _clusters_of_products, _products_of_means)


def _series(
    points: np.ndarray,
    clusters_of: Callable[[np.ndarray], np.ndarray],
    means_of: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> list[np.ndarray]:
    partitions = [clusters_of(points)]
    while (count := partitions[-1].max(initial=0) + 1) > 1:
        coarser = clusters_of(means_of(points, partitions[-1]))[partitions[-1]]
        if coarser.max() == 0 or coarser.max() + 1 == count:
            break
        partitions.append(coarser)
    return partitions


def finch(points: np.ndarray) -> np.ndarray:
    """Cluster numbers [n] of FINCH's coarsest partition with more than one cluster; all 0 where there is none.

    No cluster has a single point, so that two or three points always form one cluster.
    """
    return partitions(points)[-1]
