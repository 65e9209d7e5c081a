"""The bytes that a method sends between the server and one client.

They are computed before a run from net, share rule and banks.
"""

import math
from dataclasses import dataclass

from fedsim.parts.part import part_name
from fedsim.runs.plan import Plan
from fedsim.runs.workspace import Workspace
from fedsim.tensors.arrays import to_arrays
from strategies.model import server_model, shared_parameters
from strategies.server_parts import ServerParts
from strategies.state import ServerState
from strategies.stored import Head, heads_of
from strategies.wire.compression import reply_form


@dataclass(frozen=True)
class Traffic:
    """One record of the exchange with a client.

    down, up: bytes to and from the client, or None where they depend on the data
    when: "round", "once" (before the first round, or with a client's first training) or "visit" (in each round, to the
    unseen domain's client)
    """

    record: str
    when: str
    down: int | None
    up: int | None


def reply_heads(space: Workspace) -> dict[str, Head]:
    """Returns the shape and type of every tensor that a client sends after its training, whole or compressed.

    Where a client trains on a part of the model (`Share.cut`), its tensors are as much smaller.
    """
    arrays = to_arrays(space.net.state_dict())
    sent = [name for name, place in space.places.items() if place in ("shared", "upload")]
    heads = heads_of({name: arrays[name] for name in sent})
    if space.recipe.compress is None:
        return heads
    return reply_form(space.recipe.compress, heads, shared_parameters(space.net, space.places))


def model_traffic(space: Workspace) -> list[Traffic]:
    """Returns the records of the model itself: to train, whose reply is the client's update, and to validate."""
    state = space.net.state_dict()
    shared = upload = 0  # bytes
    for name, place in space.places.items():
        if place == "shared":
            shared += state[name].nbytes
        elif place == "upload":
            upload += state[name].nbytes
    to_train = Traffic("model, to train", "round", None, None)
    if not space.recipe.share.partial:  # else each client has its own part
        reply = sum(math.prod(shape) * dtype.itemsize for shape, dtype in reply_heads(space).values())
        to_train = Traffic("model, to train", "round", shared, reply)
    return [to_train, Traffic("model, to validate", "round", shared + upload, 0)]


def traffic(plan: Plan) -> list[Traffic]:
    """Returns what a client that trains and validates receives and sends in a round, record by record.

    The model is sent to the client twice, for training and for validation. The sums equal the columns bytes_down and
    bytes_up (and those of single banks) of clients.csv from the second round on, where all clients train and validate.
    """
    space = Workspace(plan)
    exchanged = model_traffic(space)
    parts = ServerParts(plan.recipe, plan.experiment, space.places, ServerState())
    parts.model = server_model(space.net, space.places, plan.build_net, space.device)
    state = space.net.state_dict()
    arrays = to_arrays({name: state[name] for name in space.travelling})
    parts.open(0, arrays, plan.clients, plan.clients, training=False)
    for bank in parts.recipe.banks:
        view = parts.views([bank])[bank.name]
        down, up = bank.traffic(view)
        when = "once" if bank.when == "once" else "round"
        exchanged.append(Traffic(f"bank {bank.name}", when, down, up))
    for visit in plan.recipe.visits:
        exchanged.append(Traffic(part_name(visit), "visit", None, None))
    return exchanged
