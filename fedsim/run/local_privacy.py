"""Local differential privacy: a client perturbs its own model before anybody else sees it, by Flower's LocalDpMod."""

import os

import numpy as np
from flwr.app import Context, Message, RecordDict

from fedsim.errors import UserError
from fedsim.message_records import arrays_of
from fedsim.settings import TrainSettings


def perturbed(content: RecordDict, message: Message, context: Context, train: TrainSettings) -> RecordDict:
    """The content of a training reply, its update clipped and with noise added; unchanged without `dp-clip`.

    delta = theta_k - theta ;  delta min(1, C / ||delta||_2) + N(0, sigma^2) ,  sigma = 2C sqrt(2 ln(1.25/d)) / epsilon

    C, epsilon and d are `train.dp_clip`, `dp_epsilon` and `dp_delta`; a site's node config (`dp-clip`, `dp-epsilon`,
    `dp-delta`) takes precedence over the server's settings. 2C is the largest distance of two clipped updates. The
    Gaussian mechanism (Dwork and Roth 2014, Theorem A.1) is proven for epsilon up to 1, for each round separately;
    metrics, counts and client state are not covered. The server knows the run's seed, so the noise does not use it.
    """
    own = context.node_config
    clip = float(own.get("dp-clip", train.dp_clip))
    if not clip:
        return content
    epsilon, delta = float(own.get("dp-epsilon", train.dp_epsilon)), float(own.get("dp-delta", train.dp_delta))
    if not (clip > 0 and epsilon > 0 and 0 < delta < 1):
        raise UserError("this site's dp-clip and dp-epsilon must be above 0, and dp-delta between 0 and 1")
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
    reply = mod(message, context, lambda asked, _: Message(content, reply_to=asked))
    if reply.has_error():
        raise UserError(f"local differential privacy covers one record of shared tensors: {reply.error.reason}")
    return reply.content
