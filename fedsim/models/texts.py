"""The texts of classes: the head that compares images with them, and what is needed to learn a part of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.common.errors import UserError


class TextHead(nn.Module):
    """logits = s cos(f, t_c) for features f [B, e] and texts t [M, e]; s and t are fixed, the same everywhere.

    Buffers: `text` [M, e], each row of length 1, and `scale`, s = exp(logit scale), 100 in the released weights. Every
    process computes them, and they are no part of the state: other threads or processors round them differently.

    texts: makes the `Texts` behind t, for inserts that learn a part of them; None: they cannot be learned
    """

    text: Tensor
    scale: Tensor

    def __init__(self, text: Tensor, scale: float, texts: Callable[[], "Texts"] | None = None) -> None:
        super().__init__()
        self.register_buffer("text", F.normalize(text, dim=1), persistent=False)
        self.register_buffer("scale", torch.tensor(float(scale)), persistent=False)
        self.texts = texts

    @property
    def out_features(self) -> int:
        """M, the number of classes."""
        return len(self.text)

    def forward(self, features: Tensor) -> Tensor:
        """[B, e] -> [B, M]."""
        return self.scale * F.normalize(features, dim=1) @ self.text.T


class TextEncoder(nn.Module):
    """E_T(x) = P LN(T(x + p))[end]: embedded tokens x [N, L, d] and the place of each end [N] -> [N, e].

    T reads from left to right: no token depends on those behind it. What follows the end therefore has no effect, and
    L may be smaller than the length of the context.

    transformer: T, called with x and attn_mask
    positions: p [context, d]
    norm: LN over d
    projection: P [d, e], or a linear layer
    """

    mask: Tensor

    def __init__(
        self, transformer: nn.Module, positions: Tensor, norm: nn.Module, projection: Tensor | nn.Module
    ) -> None:
        super().__init__()
        self.transformer, self.positions, self.norm, self.projection = transformer, positions, norm, projection
        size = len(positions)
        self.register_buffer("mask", torch.full((size, size), float("-inf")).triu(1), persistent=False)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """[N, L, d], [N] -> [N, e]."""
        length = x.shape[1]
        x = self.transformer(x + self.positions[:length], attn_mask=self.mask[:length, :length])
        x = self.norm(x[torch.arange(x.shape[0], device=x.device), ends])
        return self.projection(x) if isinstance(self.projection, nn.Module) else x @ self.projection


@dataclass(frozen=True)
class Texts:
    """The texts of the classes as tokens: [start, template, name and what the template has behind it, end].

    encoder: E_T
    embedding: the embeddings of tokens
    template: the tokens of the template in front of the name, the same for all classes
    names: for each class the tokens that follow them, with the end
    start: the token that marks the start
    scale: the scale s of the logits
    context: the number of tokens that E_T can read
    model: the name of the model, for messages
    """

    encoder: TextEncoder
    embedding: nn.Embedding
    template: tuple[int, ...]
    names: tuple[tuple[int, ...], ...]
    start: int
    scale: float
    context: int
    model: str

    @classmethod
    def read(
        cls,
        encode: Callable[[str], Sequence[int]],
        marks: tuple[int, int],
        prompt: str,
        names: Sequence[str],
        **rest: Any,
    ) -> "Texts":
        """The texts of these class names; `encode` gives the tokens of a text, `marks` are its start and its end."""
        texts = [prompt.format(name.replace("_", " ")) for name in names]
        tokens, template = [tuple(encode(text)) for text in texts], tuple(encode(prompt.partition("{")[0]))
        if any(each[: len(template)] != template for each in tokens):
            raise UserError(f"model.prompt: in {prompt!r} the name of a class begins inside a token; put a space in "
                            "front of {}")  # fmt: skip
        refuse_equal(names, tokens, rest["model"])
        start, end = marks
        tails = tuple((*each[len(template) :], end) for each in tokens)
        made = cls(template=template, names=tails, start=start, **rest)
        made.require("model.prompt", len(template))
        return made

    def require(self, setting: str, length: int) -> None:
        """Raise UserError when texts with `length` tokens in front of the names are longer than the context."""
        longest = 1 + length + max(map(len, self.names))
        if longest > self.context:
            raise UserError(f"{setting}: with {length} tokens in front of the names the longest text has {longest} "
                            f"tokens (two are marks), and {self.model} reads {self.context}")  # fmt: skip

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """Embeddings [n, d] of tokens, without gradients."""
        return self.embedding.weight.detach()[torch.tensor(tokens, dtype=torch.long)]

    def tails(self, length: int) -> tuple[Tensor, Tensor]:
        """(x [M, T, d], ends [M]): the embedded names with their ends, filled up with zeros to the longest one; the
        place of each end, when `length` tokens stand between the start and the name."""
        longest = max(map(len, self.names))
        parts = [F.pad(self.embedded(name), (0, 0, 0, longest - len(name))) for name in self.names]
        return torch.stack(parts), torch.tensor([length + len(name) for name in self.names])

    @torch.no_grad()
    def features(self) -> Tensor:
        """t [M, e], the texts as they are, before they are normalized."""
        lead = self.embedded([self.start, *self.template])
        tails, ends = self.tails(len(self.template))
        return self.encoder(torch.cat([lead.expand(len(tails), -1, -1), tails], 1), ends)


def refuse_equal(names: Sequence[str], tokens: Sequence[Sequence[int]], model: str) -> None:
    """UserError for two classes whose texts are equal tokens, which no image could tell apart."""
    first: dict[tuple[int, ...], str] = {}
    for name, text in zip(names, map(tuple, tokens)):
        if text in first:
            raise UserError(f"model.head = 'text': the classes {first[text]!r} and {name!r} are the same text for "
                            f"{model}; give one of them another name")  # fmt: skip
        first[text] = name
