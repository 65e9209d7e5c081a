"""The rows of a Hugging Face data set: saved on disk, or the partitions of a `FederatedDataset` of Flower Datasets.

Each partition is a domain:

    # my_data.py, next to the experiment file that has data.dataset = "my_data:federated"
    federated = FederatedDataset(dataset="imagefolder", data_dir="photos",
                                 partitioners={"train": NaturalIdPartitioner("hospital")})
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

from fedsim.common.errors import UserError, first_line
from fedsim.data.names import composed
from fedsim.data.row import Benchmark
from fedsim.settings.plugins import load


class Opened(NamedTuple):
    """The rows of a data set, the number in each of its splits, and their domains where no column has these."""

    rows: Any
    splits: dict[str, int]
    domains: tuple[str, ...] = ()


ROW = Benchmark(
    "partitions", "Partitions of a FederatedDataset", (), (), 3,
    source="your own images",
    reader="fedsim.data.hugging_face:HuggingFaceReader",
    discover="fedsim.data.hugging_face:discover",
)  # fmt: skip


def is_federated(found: object) -> bool:
    """Whether an object is a `FederatedDataset` of flwr-datasets, which is not imported for this."""
    kind = getattr(sys.modules.get("flwr_datasets"), "FederatedDataset", None)  # whoever made one has imported it
    return kind is not None and isinstance(found, kind)


def saved_rows(folder: Path) -> Opened:
    """The rows that `save_to_disk` wrote; UserError for a folder that holds none."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is no data set that `save_to_disk` wrote ({first_line(error)})") from None
    if not isinstance(loaded, datasets.DatasetDict):
        return Opened(loaded, {})
    splits = {name: len(part) for name, part in loaded.items()}
    return Opened(datasets.concatenate_datasets(list(loaded.values())), splits)


def join_partitions(reference: str) -> Opened:
    """The rows of all partitions, split by split; a partition by a column is called like its value, others by number.

    Images are not copied. Raises UserError when the data set cannot be loaded or partitioned.
    """
    import datasets

    federated = load(reference, "data.dataset")
    pieces, domains, splits = [], [], {}
    try:
        for split, partitioner in federated.partitioners.items():
            partitions = [federated.load_partition(number, split) for number in range(partitioner.num_partitions)]
            names = getattr(partitioner, "partition_id_to_natural_id", {})
            for number, part in enumerate(partitions):
                domains += [composed(str(names.get(number, number)))] * len(part)
            splits[split] = sum(map(len, partitions))
            pieces += partitions
        return Opened(datasets.concatenate_datasets(pieces), splits, tuple(domains))
    except Exception as error:  # the data set's own code and partitioners of any kind
        raise UserError(f"data.dataset {reference!r} cannot be partitioned ({first_line(error, 160)})") from error
