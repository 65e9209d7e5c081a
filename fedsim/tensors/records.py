"""The records of a message by their kind.

Flower's own properties (`content.array_records`, ...) build at each access a dictionary that checks every value and
writes changes back. With tiny models that is a measurable part of a round, and nothing here changes a message by it.
"""

from flwr.app import ArrayRecord, ConfigRecord, ConfigRecordValues, MetricRecord, RecordDict

Config = dict[str, ConfigRecordValues]  # the content of a record with settings


def arrays_of(content: RecordDict) -> dict[str, ArrayRecord]:
    """The records with tensors, by name."""
    return {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}


def metrics_of(content: RecordDict) -> dict[str, MetricRecord]:
    """The records with metrics, by name."""
    return {name: record for name, record in content.items() if isinstance(record, MetricRecord)}


def configs_of(content: RecordDict) -> dict[str, ConfigRecord]:
    """The records with settings, by name."""
    return {name: record for name, record in content.items() if isinstance(record, ConfigRecord)}


def config_of(content: RecordDict, name: str = "config") -> ConfigRecord:
    """The record with settings that has this name; KeyError when there is none."""
    record = content[name]
    if not isinstance(record, ConfigRecord):
        raise KeyError(name)
    return record
