"""Learned vectors in the texts of class names, which a key of each client scales: FedAPT."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedsim.models.inserts.learned_prompts import PromptHead, TextLearner, normal_vectors
from fedsim.models.net import Net
from fedsim.models.texts import Texts
from fedsim.parts.facts import Fact

AT_ONCE = 1024  # texts that pass through the text encoder together when every image has its own


def key_weights(scores: Tensor, T: float) -> Tensor:
    """w = softmax(z / T) with z = (scores - mean) / std over the K scores of an image, [B, K] -> [B, K].

    The variance is the unbiased one. Equal scores, and a single one, give equal weights.
    """
    centered = scores - scores.mean(dim=1, keepdim=True)
    variance = centered.square().sum(dim=1, keepdim=True) / max(scores.shape[1] - 1, 1)
    return (centered / variance.sqrt().clamp_min(1e-12) / T).softmax(dim=1)


class KeyedPromptHead(PromptHead):
    """logits = s cos(f, E_T([start, V (1 + kappa), name c, end])), kappa multiplied entry by entry, V [M, L, d].

        kappa = kappa_k while client k trains, and for an unknown image kappa = sum_i w_i kappa_i, w = key_weights(Q f)

    keys: kappa [K, L, d]; query: Q [K, e], without a bias; key: that of the client that trains, otherwise None

    With mixed keys every image has its own M texts. They pass through E_T in parts of about 1,024.
    """

    keys: Tensor

    def __init__(self, texts: Texts, context: Tensor, keys: Tensor, width: int, T: float) -> None:
        super().__init__(texts, context)
        self.register_buffer("keys", keys)
        self.query = nn.Linear(width, len(keys), bias=False)
        self.T = T
        self.key: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        """[B, e] -> [B, M]."""
        if self.training and self.key is not None:
            texts = self.read(self.context * (1 + self.key))
            return self.scale * F.normalize(features, dim=1) @ texts.T
        if torch.compiler.is_exporting():  # a program for any number of images has no loop over parts of them
            return self.mixed(features)
        return torch.cat([self.mixed(part) for part in features.split(max(AT_ONCE // self.out_features, 1))])

    def mixed(self, features: Tensor) -> Tensor:
        """Logits [B, M] of images whose client is not known."""
        keys = torch.einsum("bk,kld->bld", key_weights(self.query(features), self.T), self.keys)
        count, classes = features.shape[0], self.out_features
        context = (self.context * (1 + keys[:, None])).flatten(0, 1)
        parts = self.start.expand(count * classes, 1, -1), context, self.tails.repeat(count, 1, 1)
        texts = self.encoder(torch.cat(parts, 1), self.ends.repeat(count)).unflatten(0, (count, classes))
        return self.scale * (F.normalize(features, dim=1)[:, None] * F.normalize(texts, dim=2)).sum(2)


@dataclass(frozen=True)
class KeyedPrompts(TextLearner):
    """logits = s cos(f, E_T([start, V + V kappa, name c, end])): V [M, L, d] is learned, each client has a fixed key.

    Source: FedAPT (Su et al., AAAI 2024). Client k trains with its own key kappa_k [L, d]. For an image of an unknown
    domain kappa = sum_i w_i kappa_i, with w = softmax(z / T) and z = (Q f - mean) / std. Mean and unbiased deviation
    are over the K outputs of the query Q [K, e], and f is not normalized. The query learns to tell the clients apart by
    the term `query_loss`. So every image has its own texts: prediction costs M passes of E_T for each. Source clients
    validate in this way too.

    Keys are drawn from U[0, 1) by the seed of the run, the same on every machine, and are never sent; the released
    server draws and sends them. Clients are numbered in the order of the domains; two of one domain have a key each.
    V and Q are trained and sent with `model.train = "head"`, 24 M x 512 + 512 K values for ViT-B/32. With keys of 0 it
    is `learned_prompts` with per_class = true. The server takes the plain mean (part `uniform`). The released runs: SGD
    with a rate of .01 and a decay of 1e-5, batches of 256, 50 rounds of one epoch, in half precision.

    L: the number of vectors
    T: the temperature of the weights
    std: the standard deviation of the initial V
    """

    L: Annotated[int, Field(ge=1)] = 24
    T: Annotated[float, Field(gt=0)] = 0.01
    std: Annotated[float, Field(ge=0)] = 0.02
    assumes = (Fact.SEVERAL_CLIENTS,)
    counts_clients: ClassVar[bool] = True
    requires: ClassVar[dict[str, str]] = {"terms": "query_loss"}

    def apply(self, net: Net) -> None:
        """Gives the network a head with keys. Raises UserError without texts, or when they are too long."""
        texts = self.texts_of(net)
        texts.require("keyed_prompts.L", self.L)
        context = normal_vectors(texts, self.L, True, self.std)
        head = KeyedPromptHead(texts, context, torch.rand(net.clients, *context.shape[1:]), net.feature_dim, self.T)
        self.replace(net, head, {"context", "query.weight"})
