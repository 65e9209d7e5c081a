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
    parts = server.parts
    state = server.state
    if not parts.training:
        return model
    for visit in parts.recipe.visits:
        if visit.moment != moment:
            continue
        before = state.saved_parts(), view.answers, view.banks
        try:
            model = make_visit(server, grid, visit, model, view)
        except RefusedUpdateError as error:
            if error.client != server.experiment.run.target:
                raise
            saved, view.answers, view.banks = before
            state.restore_parts(saved)
            refuse_answer(server.exchange, visit, error.reason)
    return model


def make_visit(server: Server, grid: Grid, visit: Visit, model: ArrayDict, view: ServerRound) -> ArrayDict:
    """The model after one visit; the same model when nothing was asked, or no answer is accepted."""
    parts = server.parts
    key = f"visits.{visit.phase}"
    before = parts.view(view, key)
    question = visit.ask(model, before)
    if question is None:
        return model
    answer = ask_target(server.exchange, grid, visit, question, before)
    if answer is None:
        return model
    view.answers = {**view.answers, visit.phase: answer}
    if visit.bank:
        entry = owned(answer[visit.bank])
        view.banks = {**view.banks, visit.bank: {SERVER: entry}}
    after = parts.view(view, key)
    moved = visit.take(answer, model, after)
    return same_layout(visit, moved, model)


def ask_target(
    exchange: Exchange, grid: Grid, visit: Visit, records: Mapping[str, Arrays], server: ServerRound
) -> dict[str, Arrays] | None:
    """The records of the answer to a visit, or None when no answer is accepted.

    A failure is recorded, or ends the run, like that of another client. In a deployment the target's site is asked. In
    a simulation it is the first node, because every node can act as any client.
    """
    client = exchange.experiment.run.target
    roster = exchange.roster
    site = roster.target if roster else None
    if roster and site and roster.missing([site.client]):
        exchange.fail(client, NOT_ONLINE)
        return None
    asked = site or next(iter(exchange.sites.values()))
    question = make_question(exchange, visit, records, server.round, asked.node_id)
    reply = send_alone(exchange, grid, client, question)
    if reply is not None and reply.has_content():
        sizes = payloads(arrays_of(reply.content))
        exchange.notes.count(client, "up", sizes, set(visit.records))
    expected = Expected(
        client=client,
        token=exchange.token,
        round=server.round,
        phase=visit.phase,
        data=site.content if site else "",
    )
    check = partial(read_answer, visit, server)
    return exchange.check_one(reply, check, expected, f"answer to {visit.phase!r} refused")


def make_question(exchange: Exchange, visit: Visit, records: Mapping[str, Arrays], number: int, node: int) -> Message:
    """The message of a visit to a node in round `number`, whose tensors are counted."""
    client = exchange.experiment.run.target
    sent = {name: state_to_record(arrays) for name, arrays in records.items()}
    exchange.notes.count(client, "down", payloads(sent), {"arrays"})
    config: Config = {
        **exchange.run_config,
        "round": number,
        "phase": visit.phase,
        "client": client,
    }
    content = RecordDict({**sent, "config": ConfigRecord(config)})
    return Message(content, node, KIND)


def send_alone(exchange: Exchange, grid: Grid, client: str, question: Message) -> Message | None:
    """The first reply to a message that is sent alone; None when there is none in time."""
    sent = Sent()
    sent.add(client, question)
    replies = grid.send_and_receive([question], timeout=exchange.experiment.run.timeout)
    matched = None
    for reply in replies:
        if sent.match(reply):
            matched = reply
    for line in sent.strays:
        exchange.notes.note(line)
    return matched


def refuse_answer(exchange: Exchange, visit: Visit, reason: str) -> None:
    """Records that the server's part refuses the answer, or ends the run."""
    target = exchange.experiment.run.target
    exchange.fail(target, f"answer to {visit.phase!r} refused: {one_line(reason)}")


def read_answer(visit: Visit, server: ServerRound, content: RecordDict, expected: Expected) -> dict[str, Arrays]:
    """The records of an answer. RejectedReplyError says what is wrong."""
    check_records(content, set(visit.records), set(), {"echo"})
    check_echo(content, expected)
    received = arrays_of(content)
    records: dict[str, Arrays] = {}
    for name in visit.records:
        arrays = read_arrays(name, received[name])
        check_finite(name, arrays)
        records[name] = arrays
    reason = visit.accept(records, server)
    if reason:
        raise RejectedReplyError(reason)
    return records
