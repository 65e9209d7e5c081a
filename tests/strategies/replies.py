"""Checked replies of the clients a, b, c, ... with a parameter, a running mean and a counter, and their round."""

import numpy as np

from strategies.parts import ServerRound, Update


def model(*w, mean=0.0, count=0):
    return {"w": np.array(w, np.float32), "mean": np.array([mean], np.float32), "count": np.array(count, np.int64)}


def replies(*moves, start=0.0, metrics=(), means=lambda k: 10 * k):
    """(updates whose `w` moved by these numbers, the round). Running means are 0, 10, ..., counters 1, 2, ..."""
    previous = model(*[start] * len(moves[0]))
    arrays = [model(*previous["w"] + np.float32(move), mean=means(k), count=k + 1) for k, move in enumerate(moves)]
    updates = [Update("abcdefghijk"[k], 10, each) for k, each in enumerate(arrays)]
    for update, values in zip(updates, metrics):
        update.metrics |= values
    clients = [update.client for update in updates]
    return updates, ServerRound(1, 4, clients, previous, updates=updates, parameters=frozenset({"w"}))


def uniform(updates):
    return {update.client: 1 / len(updates) for update in updates}
