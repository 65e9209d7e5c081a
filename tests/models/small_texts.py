"""Helpers of tests on the texts of class names: the tiny CLIP, and texts that are worked out by hand."""

import torch
from torch import nn

from fedsim.models import build_model
from fedsim.models.texts import TextEncoder, Texts
from fedsim.settings import ModelSettings

NAMES = ("dog", "alarm_clock", "horse")
IMAGES = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(3))
TINY = {"backbone": "tiny-clip", "head": "text", "train": "head"}


def build(part=None, names=NAMES, clients=0, **more):
    """The tiny CLIP with the texts of these names; `part` may then learn some of them, also for each client."""
    net = build_model(ModelSettings(**{**TINY, **more}), len(names), 3, 16, names=names)
    net.clients = clients
    torch.manual_seed(0)
    if part is not None:
        part.apply(net)
    return net.eval()


class Means(nn.Module):
    """A transformer for tests: every token becomes the mean of itself and those before it."""

    def forward(self, x, attn_mask):
        steps = torch.arange(1, x.shape[1] + 1)[:, None]
        return x.cumsum(1) / steps


def simple_texts(names=((3,), (4,))):
    """Tokens: 0 is (0, 0), 1 (the start) is (1, 0), 2 (the end) is (0, 0), 3 is (2, 0), 4 is (0, 2)."""
    embedding = nn.Embedding(5, 2)
    embedding.weight.data = torch.tensor([[0.0, 0], [1, 0], [0, 0], [2, 0], [0, 2]])
    encoder = TextEncoder(Means(), torch.zeros(9, 2), nn.Identity(), torch.eye(2))
    ends = tuple((*name, 2) for name in names)
    return Texts(encoder, embedding, (3, 4), ends, start=1, scale=10.0, context=9, model="means")


def fitted(space, client, number=1):
    """A client trains in one round from the model of the workspace: what it got, its batches, and what it sends."""
    start = {name: space.net.state_dict()[name].clone() for name, place in space.places.items() if place == "shared"}
    own, batches = space.client(client, ""), []
    draw = own.data.batch
    own.data.batch = lambda *given: batches.append(draw(*given)) or batches[-1]
    config = {"client": client, "phase": "train", "round": number}
    sent = own.fit([value.numpy().copy() for value in start.values()], config)[0]
    return start, batches, {name: array.copy() for name, array in zip(start, sent)}
