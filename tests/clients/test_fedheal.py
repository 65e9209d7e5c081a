"""FedHEAL on numbers worked out by hand: what leaves the client."""

import numpy as np
import pytest
import torch
from small_round import colour_images, small_data, small_round
from torch import nn

from clients.terms.consistent_update import COUNT, HISTORY, ConsistentUpdate, consistent


@pytest.mark.parametrize(("signs", "masks", "history"), [
    ("++---", [1, 1, 0, 1, 1], 0.4),
    ("-++++", [1, 0, 1, 1, 1], 0.8),
    ("+-+-+", [1, 0, 1, 1, 1], 0.6),
])  # fmt: skip
def test_masks_of_five_rounds(signs, masks, history):
    """u = theta - theta_k is + where the weight falls."""
    past, found = None, []
    for count, sign in enumerate(signs):
        mask, past = consistent(torch.tensor([sign == "+"]), past, count, 0.3)
        found.append(int(mask))
    assert found == masks
    assert past.item() == pytest.approx(history)


def test_what_leaves_the_client_in_three_rounds():
    """Weights move by (-1, 1), (1, 1), (1, 1): the first one's turn is kept back once, and agrees with half the rounds
    then. Integers and tensors that do not come down are sent as they are."""
    net, part = nn.BatchNorm1d(2), ConsistentUpdate()
    round, sent = small_round(small_data(colour_images(3)), net=net), []
    for step in ((-1.0, 1.0), (1.0, 1.0), (1.0, 1.0)):
        round.scratch = {}
        part.begin(round)
        received = {name: tensor.numpy().copy() for name, tensor in net.state_dict().items()}
        with torch.no_grad():
            net.weight += torch.tensor(step)
            net.num_batches_tracked += 1
        part.end(round)
        trained = {name: tensor.numpy().copy() for name, tensor in net.state_dict().items()}
        left = part.leave(round, {**trained, "own": np.ones(1)}, received)
        sent.append((left["weight"] - received["weight"]).tolist())
        assert left["num_batches_tracked"] == received["num_batches_tracked"] + 1
        assert left["own"] == 1
        round.store.commit()
    assert sent == [[-1, 1], [0, 1], [1, 1]]
    stored = round.store.get(HISTORY)
    assert stored[COUNT] == 3
    assert stored["weight"].tolist() == pytest.approx([1 / 3, 0])
    assert stored["bias"].tolist() == [1, 1]  # what did not move counts as falling
