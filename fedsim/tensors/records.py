"""The records of a message by their kind.

Flower's own properties (`content.array_records`, ...) build at each access a dictionary that checks every value and
writes changes back, and their constructors check every value of every message. With tiny models that is a measurable
part of a round, and nothing here changes a message by it.
"""

from collections.abc import Mapping
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, ConfigRecordValues, MetricRecord, MetricRecordValues, RecordDict

Config = dict[str, ConfigRecordValues]  # the content of a record with settings
Record = TypeVar("Record", ArrayRecord, MetricRecord, ConfigRecord)


def config_record(settings: Mapping[str, ConfigRecordValues]) -> ConfigRecord:
    """A record of settings of our own, which are known to be of Flower's types."""
    record = ConfigRecord()
    record.__dict__["_data"].update(settings)
    return record


def metric_record(metrics: Mapping[str, MetricRecordValues]) -> MetricRecord:
    """A record of metrics. Only where one is neither an int nor a float does Flower's constructor check them all."""
    types = set(map(type, metrics.values()))
    if not types <= {int, float}:
        return MetricRecord(dict(metrics))
    record = MetricRecord()
    record.__dict__["_data"].update(metrics)
    return record


def content_of(records: Mapping[str, ArrayRecord | MetricRecord | ConfigRecord]) -> RecordDict:
    """The content of a message with these records by name."""
    content = RecordDict()
    content.__dict__["_data"].update(records)
    return content


def arrays_of(content: RecordDict) -> dict[str, ArrayRecord]:
    """The records with tensors, by name."""
    return _of_type(content, ArrayRecord)


def metrics_of(content: RecordDict) -> dict[str, MetricRecord]:
    """The records with metrics, by name."""
    return _of_type(content, MetricRecord)


def configs_of(content: RecordDict) -> dict[str, ConfigRecord]:
    """The records with settings, by name."""
    return _of_type(content, ConfigRecord)


def _of_type(content: RecordDict, kind: type[Record]) -> dict[str, Record]:
    records: dict[str, Record] = {}
    for name, record in content.items():
        if isinstance(record, kind):
            records[name] = record
    return records


def config_of(content: RecordDict, name: str = "config") -> ConfigRecord:
    """The record with settings that has this name; KeyError when there is none."""
    record = content[name]
    if not isinstance(record, ConfigRecord):
        raise KeyError(name)
    return record
