"""Asks clients for sums over their validation examples, to which `run.doubt` is fitted, and checks the replies."""

from collections.abc import Iterable

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsim.common.doubt import BINS
from fedsim.tensors.records import Config, arrays_of
from strategies.parts import ArrayDict
from strategies.server import Server
from strategies.stored import Heads
from strategies.wire.reply_checks import (
    LARGEST_METRIC,
    Expected,
    RejectedReplyError,
    check_arrays,
    check_echo,
    check_examples,
    check_records,
    read_arrays,
    read_metrics,
)
from strategies.wire.sites import implausible

PHASE = "doubt"
SUMS = "doubt"  # the record of a reply
Sums = tuple[ArrayDict, int]  # and the number of examples over which they are


def sums_of_sources(server: Server, grid: Grid, model: ArrayRecord, asked: Config) -> dict[str, Sums]:
    """The sums of every client that answers, by its name.

    model: all tensors that travel
    asked: `temperatures`, of which the reply has `slopes`, or a `temperature`, of whose scores it has `counts`
    """
    exchange = server.exchange
    run = server.experiment.run
    heads = heads_of_sums(asked)
    placed = server.placed(model, "shared", "upload")
    messages = exchange.messages(PHASE, placed, exchange.clients, lambda _: {}, **asked)
    replies: Iterable[Message] = grid.send_and_receive(messages, timeout=run.timeout)

    def check(content: RecordDict, expected: Expected) -> Sums:
        return check_sums(content, expected, heads)

    results, failures = exchange.check(check, replies, "sums refused")
    examples = {client: count for client, (_, count) in results.items()}
    refused = implausible(examples, run.examples_limit)
    for client, reason in refused.items():
        del results[client]
        failures[client] = f"sums refused: {reason}", ""
    return exchange.record_failures(results, failures)


def heads_of_sums(asked: Config) -> Heads:
    """The shape and type of each sum of a reply to this question."""
    temperatures = asked.get("temperatures")
    if isinstance(temperatures, list):
        shape = (len(temperatures),)
        return {"slopes": (shape, np.dtype(np.float64))}
    return {"counts": ((BINS,), np.dtype(np.int64))}


def check_sums(content: RecordDict, expected: Expected, heads: Heads) -> Sums:
    """The sums of a reply and the number of its examples; RejectedReplyError says what is wrong.

    heads: the shape and type of each sum
    """
    check_records(content, {SUMS}, {"metrics"}, {"echo"})
    check_echo(content, expected)
    examples = check_examples(read_metrics(content))
    sums = read_arrays(SUMS, arrays_of(content)[SUMS])
    check_arrays(sums, heads)
    counts = sums.get("counts")
    if counts is not None:
        is_negative = (counts < 0).any()
        if is_negative or counts.sum() != examples:
            raise RejectedReplyError(f"its counts of scores are not those of {examples} examples")
    for values in sums.values():
        if np.abs(values).max() > LARGEST_METRIC:
            raise RejectedReplyError(f"a sum is larger than {LARGEST_METRIC:g} in size")
    return sums, examples
