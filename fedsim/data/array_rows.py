"""The data sets of tensors that are no images: their rows, the embedded ones, and how a mapping of a user is told."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

from fedsim.data.row import Benchmark

PARTITIONED = "datasets"  # name of the row of a mapping from domains to Datasets
DATASET = "torch.utils.data.dataset.Dataset"  # which is not imported for this
READER, DISCOVER = "fedsim.data.arrays:ArrayReader", "fedsim.data.arrays:discover"


@dataclass(frozen=True)
class Embedded:
    """A table that comes with fedsim, and the names of its columns of labels and domains."""

    file: Path
    columns: Mapping[str, str]


EMBEDDED = {
    "hospitals": Embedded(
        file=Path(__file__).parent / "embedded" / "heart_disease.csv",
        columns={"label": "disease", "domain": "hospital"},
    )
}


def usual_columns(dataset: str) -> Mapping[str, str]:
    """The names of the columns of labels and domains where `data.columns` has none; empty for a user's own table."""
    if dataset not in EMBEDDED:
        return {}
    return EMBEDDED[dataset].columns


MAPPING = Benchmark(
    name=PARTITIONED,
    title="Datasets by domain",
    domains=(),
    classes=(),
    channels=1,
    source="your own tensors",
    images=False,
    reader=READER,
    discover=DISCOVER,
    takes_targets=True,
)


def is_mapping(source: object) -> bool:
    """Whether an object is a mapping, or a function that is declared to return one to torch Datasets.

    Such a function is called later, and a call may do anything: `def hospitals() -> dict[str, Dataset]:`.
    """
    if isinstance(source, type):
        return False
    if isinstance(source, Mapping):
        return True
    try:
        made = get_type_hints(source).get("return")
    except Exception:  # an object without annotations, or annotations that name what is not there
        return False
    kind, values = get_origin(made), get_args(made)[1:]
    if not (isinstance(kind, type) and issubclass(kind, Mapping)):
        return False
    return any(DATASET in _bases(value) for value in values)


def _bases(kind: object) -> list[str]:
    """The full names of a class and of all from which it derives; those of its origin for Dataset[Tensor]."""
    classes = getattr(get_origin(kind) or kind, "__mro__", ())
    return [f"{each.__module__}.{each.__qualname__}" for each in classes]
