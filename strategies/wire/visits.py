"""The exchange with the unseen domain's client in methods that adapt to it: a message and its answer."""

from collections.abc import Mapping
from functools import partial

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsim.tensors.arrays import state_to_record
from fedsim.tensors.records import Config, arrays_of
from strategies.banks.checks import owned, same_layout
from strategies.parts import SERVER, ArrayDict, Arrays, RefusedUpdateError, ServerRound, Visit
from strategies.server import Server
from strategies.wire.exchange import Exchange
from strategies.wire.handshake import NOT_ONLINE
from strategies.wire.matching import Sent
from strategies.wire.reply_checks import (
    Expected,
    RejectedReplyError,
    check_echo,
    check_finite,
    check_records,
    one_line,
    read_arrays,
)
from strategies.wire.round_notes import payloads

KIND = "query.visit"


def make_visits(server: Server, grid: Grid, moment: str, model: ArrayDict, view: ServerRound) -> ArrayDict:
    """The model after the visits of a moment; `view` gets the answers, and the banks that they fill."""
    parts, state = server.parts, server.state
    visits = parts.recipe.visits if parts.training else ()
    for each in [each for each in visits if each.moment == moment]:
        before = state.saved_parts(), view.answers, view.banks
        try:
            model = make_visit(server, grid, each, model, view)
        except RefusedUpdateError as error:
            if error.client != server.experiment.run.target:
                raise
            saved, view.answers, view.banks = before
            state.restore_parts(saved)
            refuse_answer(server.exchange, each, error.reason)
    return model


def make_visit(server: Server, grid: Grid, visit: Visit, model: ArrayDict, view: ServerRound) -> ArrayDict:
    """The model after one visit; the same model when nothing was asked, or no answer is accepted."""
    parts, key = server.parts, f"visits.{visit.phase}"
    before = parts.view(view, key)
    question = visit.ask(model, before)
    answer = None if question is None else ask_target(server.exchange, grid, visit, question, before)
    if answer is None:
        return model
    view.answers = {**view.answers, visit.phase: answer}
    if visit.bank:
        view.banks = {**view.banks, visit.bank: {SERVER: owned(answer[visit.bank])}}
    return same_layout(visit, visit.take(answer, model, parts.view(view, key)), model)


def ask_target(
    exchange: Exchange, grid: Grid, visit: Visit, records: Mapping[str, Arrays], server: ServerRound
) -> dict[str, Arrays] | None:
    """The records of the answer to a visit, or None when no answer is accepted.

    A failure is recorded, or ends the run, like that of another client. In a deployment the target's site is asked. In
    a simulation it is the first node, because every node can act as any client.
    """
    client, roster = exchange.experiment.run.target, exchange.roster
    site = roster.target if roster is not None else None
    if roster is not None and site and roster.missing([site.client]):
        exchange.fail(client, NOT_ONLINE)
        return None
    node = site.node_id if site else next(iter(exchange.sites.values())).node_id
    sent = {name: state_to_record(arrays) for name, arrays in records.items()}
    exchange.notes.count(client, "down", payloads(sent), {"arrays"})
    config: Config = {**exchange.run_config, "round": server.round, "phase": visit.phase, "client": client}
    question = Message(RecordDict({**sent, "config": ConfigRecord(config)}), node, KIND)
    reply = send_alone(exchange, grid, client, question)
    if reply is not None and reply.has_content():
        exchange.notes.count(client, "up", payloads(arrays_of(reply.content)), set(visit.records))
    expected = Expected(client, exchange.token, server.round, visit.phase, data=site.content if site else "")
    check = partial(read_answer, visit, server)
    return exchange.check_one(reply, check, expected, f"answer to {visit.phase!r} refused")


def send_alone(exchange: Exchange, grid: Grid, client: str, question: Message) -> Message | None:
    """The first reply to a message that is sent alone; None when there is none in time."""
    asked = Sent()
    asked.add(client, question)
    replies = grid.send_and_receive([question], timeout=exchange.experiment.run.timeout)
    matched = [reply for reply in replies if asked.match(reply)]
    for line in asked.strays:
        exchange.notes.note(line)
    return matched[0] if matched else None


def refuse_answer(exchange: Exchange, visit: Visit, reason: str) -> None:
    """Records that the server's part refuses the answer, or ends the run."""
    exchange.fail(exchange.experiment.run.target, f"answer to {visit.phase!r} refused: {one_line(reason)}")


def read_answer(visit: Visit, server: ServerRound, content: RecordDict, expected: Expected) -> dict[str, Arrays]:
    """The records of an answer. RejectedReplyError says what is wrong."""
    check_records(content, set(visit.records), set(), {"echo"})
    check_echo(content, expected)
    records: dict[str, Arrays] = {}
    for name in visit.records:
        records[name] = read_arrays(name, arrays_of(content)[name])
        check_finite(name, records[name])
    if reason := visit.accept(records, server):
        raise RejectedReplyError(reason)
    return records
