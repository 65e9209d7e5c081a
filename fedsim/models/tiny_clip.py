"""A tiny CLIP with random weights, `model.backbone = "tiny-clip"`: it tries methods that read the names of classes.

Nobody has trained it, so that its accuracy without training is that of guessing. Results with it are never compared
with those of a real CLIP model.

Its tokens are pairs of letters, digits, and the bytes of other signs. They need no list of words, and two different
words always have different tokens.
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.models.texts import TextEncoder, TextHead, Texts

WIDTH, LAYERS, HEADS, FEATURES, PATCH = 32, 2, 2, 16, 4
START, END, FIRST = 1, 2, 3  # the tokens of a text have the numbers from 3 on
TOKENS, CONTEXT = FIRST + 36**2, 48
SCALE = 1 / 0.07  # with which the training of CLIP begins


class Block(nn.Module):
    """x + Attention(LN(x)), then x + Linear(GELU(Linear(LN(x)))), for x [N, L, d]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        wider, back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(wider, nn.GELU(), back)
        for layer in (self.attention, self.out, wider, back):
            nn.init.kaiming_normal_(layer.weight)  # with smaller weights all texts would have nearly one direction

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """[N, L, d] -> the same shape; `mask` [L, L] is added to the scores of the attention."""
        count, length, width = x.shape
        parts = self.attention(self.norm1(x)).view(count, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / key.shape[-1] ** 0.5
        weights = (scores if mask is None else scores + mask).softmax(dim=-1)
        mixed = weights @ value
        x = x + self.out(mixed.transpose(1, 2).reshape(count, length, width))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Blocks in a row."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """[N, L, d] -> the same shape."""
        for block in self.blocks:
            x = block(x, attn_mask)
        return x


class TinyClip(nn.Module):
    """Images [B, 3, s, s] -> features [B, 16]: patches of 4 px, a class token, 2 layers of width 32.

    The text encoder has the same size and reads 48 tokens.
    """

    def __init__(self, image_size: int) -> None:
        super().__init__()
        if image_size % PATCH:
            raise UserError(f"model.backbone: tiny-clip cuts images into patches of {PATCH} px, which do not fit "
                            f"data.image_size = {image_size}")  # fmt: skip
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.token = nn.Parameter(torch.randn(WIDTH) / WIDTH**0.5)
        self.positions = nn.Parameter(torch.randn((image_size // PATCH) ** 2 + 1, WIDTH) / WIDTH**0.5)
        self.transformer, self.norm = Transformer(WIDTH, LAYERS, HEADS), nn.LayerNorm(WIDTH)
        self.projection = nn.Linear(WIDTH, FEATURES, bias=False)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        positions = nn.Parameter(0.1 * torch.randn(CONTEXT, WIDTH))
        self.text = TextEncoder(
            Transformer(WIDTH, LAYERS, HEADS), positions, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, FEATURES, bias=False)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Features of the images."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], 1, -1), x], 1) + self.positions
        return self.projection(self.norm(self.transformer(x)[:, 0]))

    def text_head(self, classes: Sequence[str], prompt: str) -> TextHead:
        """The head of these class names, in their order."""
        texts = Texts.read(
            tokens_of, (START, END), prompt, classes, encoder=self.text, embedding=self.embedding, scale=SCALE,
            context=CONTEXT, model="tiny-clip",
        )  # fmt: skip
        return TextHead(texts.features(), SCALE, lambda: texts)

    def keep_images_only(self) -> None:
        """Remove the text encoder, which is not needed after the head has been made."""
        del self.text, self.embedding


def tokens_of(text: str) -> list[int]:
    """The numbers of the pairs of letters, the digits and the bytes of other signs of a text; blanks only part words.

    A piece is read as a number of base 36, where letters are digits from 10 on: digits are 0 to 9, one letter is 10 to
    35, and two are 370 to 1295. Bytes take the numbers from 36 on, which no piece has.
    """
    tokens: list[int] = []
    for piece in re.findall(r"[a-z]{1,2}|[0-9]|[^\sa-z0-9]", text.lower()):
        tokens += [int(piece, 36)] if piece.isascii() and piece.isalnum() else [36 + byte for byte in piece.encode()]
    return [FIRST + number for number in tokens]
