"""Local differential privacy: a client perturbs its own model before anybody else sees it, by Flower's LocalDpMod."""

import difflib
import math
import os
import re
from collections.abc import Mapping
from typing import TypeGuard

import numpy as np
from flwr.app import Context, Message, RecordDict

from fedsim.common.errors import UserError, nearest
from fedsim.common.values import Json
from fedsim.flower.identity import with_content
from fedsim.settings import TrainSettings
from fedsim.tensors.records import arrays_of

OWN = ("dp-clip", "dp-epsilon", "dp-delta")  # keys of a site's own privacy in its node config
LEAST = "statistics-least"  # key of the least number of rows that a site tells, in its node config
BY_HAND = (*OWN, LEAST)  # keys that a person writes into site.env; every other one may be of an app of the user's own
OTHERS = ("site", "domain", "role", "state-dir", "data-dir", "peers", "partition-id", "num-partitions")
OWN_DELTA = 1e-5  # where a site leaves dp-delta out; the server's value would let the server choose the noise
EXAMPLE = 'NODE_CONFIG="dp-clip=0.5 dp-epsilon=1.0" in site.env'


def own_privacy(node: Mapping[str, Json]) -> tuple[float, float, float] | None:
    """Returns (clip, epsilon, delta) that a site has set for itself in its node config; None when it has set nothing.

    Raises UserError for whatever could have been meant as such a setting and is not one: a site that believes in its
    noise must never train without it.
    """
    for key in node:
        if key not in BY_HAND and key not in OTHERS and _resembles(key):
            hint = nearest(key.lower(), BY_HAND)
            settings = ", ".join(BY_HAND)
            raise UserError(f"this site's setting {key!r} is unknown; {hint}its own are {settings}: {EXAMPLE}")
    given = [key for key in OWN if key in node]
    if not given:
        return None
    lacking = [key for key in OWN[:2] if key not in node]
    if lacking:
        raise UserError(f"this site sets {given[0]} without {lacking[0]}, and both are needed: {EXAMPLE}")
    for key in given:
        value = node[key]
        if not is_finite(value) or value <= 0 or (key == "dp-delta" and value >= 1):
            range_of_value = "between 0 and 1" if key == "dp-delta" else "a finite number above 0"
            raise UserError(f"this site's {key} must be {range_of_value}, not {value!r}: {EXAMPLE}")
    clip = float(node["dp-clip"])
    epsilon = float(node["dp-epsilon"])
    delta = float(node.get("dp-delta", OWN_DELTA))
    return clip, epsilon, delta


def is_finite(value: object) -> TypeGuard[float]:
    """Whether a value of a node config is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _resembles(key: str) -> bool:
    """Whether a key may be a misspelled one of BY_HAND: `dp_clip`, `DP-CLIP`, `epsilon`, `statistics-lest`."""
    letters = re.sub("[^a-z]", "", key.lower())
    if letters.startswith("dp"):
        return True
    settings = [re.sub("[^a-z]", "", setting) for setting in BY_HAND]
    return bool(difflib.get_close_matches(letters, [*settings, "clip", "epsilon"], 1, 0.75))


def perturbed(content: RecordDict, message: Message, context: Context, train: TrainSettings) -> RecordDict:
    """Returns the content of a training reply, its update clipped and with noise added; unchanged without `dp-clip`.

    delta = theta_k - theta ;  delta min(1, C / ||delta||_2) + N(0, sigma^2) ,  sigma = 2C sqrt(2 ln(1.25/d)) / epsilon

    C, epsilon and d are `train.dp_clip`, `dp_epsilon` and `dp_delta`, or all three a site's own (`own_privacy`). 2C is
    the largest distance of two clipped updates. The Gaussian mechanism (Dwork and Roth 2014, Theorem A.1) is proven for
    epsilon up to 1, for each round separately; metrics, counts and client state are not covered. The server knows the
    run's seed, so the noise does not use it.
    """
    clip, epsilon, delta = own_privacy(context.node_config) or (train.dp_clip, train.dp_epsilon, train.dp_delta)
    if not clip:
        return content
    if any(array.dtype.startswith("uint") for array in arrays_of(content)["arrays"].values()):
        raise UserError(
            "this site perturbs its model (dp-clip), and secure_mean has masked it already; take dp-clip out of the "
            "site's settings, or use another fusion"
        )
    from flwr.clientapp.mod import LocalDpMod  # imported here, because a site may start a process for each message

    # The mod draws from NumPy's global generator. A forked process has its parent's state of it, so that several
    # clients would add the same noise, and the difference of two updates would have none.
    np.random.seed(np.frombuffer(os.urandom(64), np.uint32))
    mod = LocalDpMod(clip, 2 * clip, epsilon, delta)
    # The server's own records besides the model (FedCM's direction) follow from perturbed models.
    received = RecordDict({"arrays": arrays_of(message.content)["arrays"]})
    alone = with_content(message, received)
    reply = mod(alone, context, lambda asked, _: Message(content, reply_to=asked))
    if reply.has_error():
        raise UserError(f"local differential privacy covers one record of shared tensors: {reply.error.reason}")
    return reply.content
