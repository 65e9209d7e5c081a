"""Domains, images, splits and augmentation. Importing this package reads no images and imports no torch.

    for client in client_names(data, target="sketch"):      # "art_painting", "cartoon", "photo"
        own = load_client(data, client)
        batch = own.images[own.train[:64]]                   # uint8 [64,C,H,W]

Batched augmentation lives in `fedsim.data.augment` (it needs torch).
"""

from fedsim.data.benchmarks import benchmark, find_dataset, resolve_domain, resolve_target
from fedsim.data.catalog import BENCHMARKS
from fedsim.data.client_data import ClientData, domain_of
from fedsim.data.loading import (
    check_partitions,
    client_names,
    count_classes,
    domain_findings,
    find_data,
    load_client,
    load_pooled,
    load_target,
    load_target_masks,
    load_unlabelled,
    source_domains,
    unseen_domains,
)
from fedsim.data.row import Benchmark

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "ClientData",
    "benchmark",
    "check_partitions",
    "client_names",
    "count_classes",
    "domain_findings",
    "domain_of",
    "find_data",
    "find_dataset",
    "load_client",
    "load_pooled",
    "load_target",
    "load_target_masks",
    "load_unlabelled",
    "resolve_domain",
    "resolve_target",
    "source_domains",
    "unseen_domains",
]
