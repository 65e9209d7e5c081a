"""The data sets of tensors that are no images: their rows, the embedded ones, and how a mapping of a user is told."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_origin, get_type_hints

from fedsim.data.row import Benchmark

PARTITIONED = "datasets"  # name of the row of a mapping from domains to Datasets
READER, DISCOVER = "fedsim.data.arrays:ArrayReader", "fedsim.data.arrays:discover"


@dataclass(frozen=True)
class Embedded:
    """A table that comes with fedsim, and the names of its columns of labels and domains."""

    file: Path
    columns: Mapping[str, str]


EMBEDDED = {
    "hospitals": Embedded(
        Path(__file__).parent / "embedded" / "heart_disease.csv", {"label": "disease", "domain": "hospital"}
    )
}

MAPPING = Benchmark(
    PARTITIONED,
    "Datasets by domain",
    (),
    (),
    1,
    source="your own tensors",
    images=False,
    reader=READER,
    discover=DISCOVER,
)


def is_mapping(found: object) -> bool:
    """Whether an object is a mapping from domains to Datasets, or a function that is declared to return one."""
    if isinstance(found, Mapping | type):
        return not isinstance(found, type)
    try:
        made = get_type_hints(found).get("return")
    except Exception:  # an object without annotations, or annotations that name what is not there
        return False
    kind = get_origin(made) or made
    return isinstance(kind, type) and issubclass(kind, Mapping)
