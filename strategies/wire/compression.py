"""Compressed updates: what of a reply is compressed, and how it leaves a client and is read by the server.

The parts of the slot `compress` know moves alone. Here moves become replies, and replies become models:

    client:  p = theta_k - theta + e ;  it sends encode(p) ;  e <- p - decode(encode(p)) where the part keeps errors
    server:  theta_k is read as theta + decode(what came)

theta is what the client received. Compressed are the shared parameters, whose moves are most of the bytes. Everything
else travels as it is: counters and running statistics, because a rounded variance may be negative; what clients keep to
themselves and upload, because they received nothing that it could be a move from; and the records of banks.
"""

from collections.abc import Collection

import numpy as np

from strategies.parts import Compress
from strategies.server_round import ArrayDict, Arrays
from strategies.stored import Head, Heads, heads_of


def compressed(heads: Heads, parameters: Collection[str]) -> dict[str, Head]:
    """Shapes and types of the tensors whose moves are compressed, by name, in the order of the names."""
    moves = {}
    for name in sorted(heads):
        _, dtype = heads[name]
        if name in parameters and dtype.kind == "f":
            moves[name] = heads[name]
    return moves


def reply_form(compress: Compress, heads: Heads, parameters: Collection[str]) -> dict[str, Head]:
    """Shapes and types of the tensors of a reply, given those of the model."""
    moves = compressed(heads, parameters)
    unchanged = {name: head for name, head in heads.items() if name not in moves}
    return unchanged | compress.form(moves)


def encode_update(
    compress: Compress,
    trained: Arrays,
    received: Arrays,
    parameters: Collection[str],
    error: Arrays | None,
    rng: np.random.Generator,
) -> tuple[ArrayDict, ArrayDict]:
    """(the tensors that a client sends, what they leave out of its moves; nothing where no error is kept).

    error: what earlier updates left out; None: nothing
    """
    heads = compressed(heads_of(trained), parameters)
    moves: ArrayDict = {}
    for name in heads:
        move = trained[name] - received[name]
        moves[name] = move if error is None else move + error[name]
    sent = compress.encode(moves, rng)
    left_out: ArrayDict = {}
    if compress.keeps_error:
        decoded = compress.decode(sent, heads)
        for name in heads:
            left_out[name] = moves[name] - decoded[name]
    unchanged = {name: array for name, array in trained.items() if name not in heads}
    return unchanged | sent, left_out


def decode_update(compress: Compress, sent: Arrays, start: Arrays, parameters: Collection[str]) -> ArrayDict:
    """The model of a client that sent these tensors, which have the form of `reply_form`.

    start: the model that the client received, and the other tensors of a reply. Raises ValueError as `decode`.
    """
    heads = compressed(heads_of(start), parameters)
    moves = compress.decode(sent, heads)
    model: ArrayDict = {}
    for name, array in start.items():
        if name not in heads:
            model[name] = sent[name]
            continue
        with np.errstate(over="ignore"):  # what is infinite is refused afterwards
            moved = array + moves[name]
            model[name] = np.asarray(moved, array.dtype)
    return model
