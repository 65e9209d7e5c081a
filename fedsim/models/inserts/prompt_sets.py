"""Prompts of every client in all layers of both encoders, and aggregators that make one set of them: PLAN."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.models.inserts.learned_prompts import LearnedTextHead, TextLearner
from fedsim.models.net import Net
from fedsim.models.texts import TextHead, Texts
from fedsim.parts.facts import Fact
from fedsim.settings.experiment import Experiment

ROWS = ("prompts.text", "prompts.vision")  # the tensors with a row for each client
Side = Literal["text", "vision"]


class Aggregator(nn.Module):
    """One set of prompts from those of K clients, [K, D, n, d] -> [D, n, d]; the clients are the sequence.

        x <- LN(x + Attention(x, x, x));   x <- LN(x + W2 relu(W1 x));   mean over the K clients

    attention: of `heads` heads with W1 [2d, d] and W2 [d, 2d] behind it, one of each for all D layers, or (layers = D)
    one for each layer; the two LN are the same for all layers
    """

    def __init__(self, d: int, layers: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.MultiheadAttention(d, heads, batch_first=True) for _ in range(layers))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))
                                 for _ in range(layers))  # fmt: skip
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, rows: Tensor) -> Tensor:
        """[K, D, n, d] -> [D, n, d]."""
        x = rows.permute(1, 2, 0, 3)  # [D, n, K, d]
        if len(self.attention) == 1:
            return self._one(0, x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return torch.stack([self._one(layer, each) for layer, each in enumerate(x)])

    def _one(self, layer: int, x: Tensor) -> Tensor:
        """[B, K, d] -> [B, d]."""
        x = self.norm1(x + self.attention[layer](x, x, x, need_weights=False)[0])
        return self.norm2(x + self.mlp[layer](x)).mean(dim=1)


class PromptsOfClients(nn.Module):
    """The prompts of K clients for both encoders: text [K, D, n, d] and vision [K, D', n, d'], with an aggregator each.

    client: the one whose own prompts are used in training; None: what the aggregators make of all prompts
    through: whether gradients pass through the aggregators to the prompts
    """

    def __init__(self, text: Tensor, vision: Tensor, per_layer: bool, heads: int, through: bool) -> None:
        super().__init__()
        self.text, self.vision = nn.Parameter(text), nn.Parameter(vision)
        layers = [each.shape[1] if per_layer else 1 for each in (text, vision)]
        self.text_aggregator = Aggregator(text.shape[-1], layers[0], heads)
        self.vision_aggregator = Aggregator(vision.shape[-1], layers[1], heads)
        self.through = through
        self.client: int | None = None
        self._held: dict[str, Tensor | None] = {}  # prompts that are used whatever the client is
        self._now: Tensor | None = None  # those of the image encoder in the pass that is being made

    def aggregated(self, side: Side) -> Tensor:
        """The global prompts of one encoder, [D, n, d]."""
        rows = getattr(self, side)
        return getattr(self, f"{side}_aggregator")(rows if self.through else rows.detach())

    def chosen(self, side: Side) -> Tensor | None:
        """The prompts [D, n, d] that a pass uses now; None: a pass without prompts."""
        if side in self._held:
            return self._held[side]
        if self.training and self.client is not None:
            return getattr(self, side)[self.client]
        return self.aggregated(side)

    def learn(self, prompts: bool, aggregators: bool) -> None:
        """Chooses which tensors have gradients. The others have none, not even zeros, with which they would decay."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(prompts if f"prompts.{name}" in ROWS else aggregators)

    @contextmanager
    def holding(self, side: Side, prompts: Tensor | None) -> Iterator[None]:
        """Inside the block one encoder has these prompts, or none."""
        self._held[side] = prompts
        try:
            yield
        finally:
            del self._held[side]

    def attach(self, side: Side, transformer: nn.Module) -> None:
        """Puts a layer's prompts before every block. Bound methods: a copy of the network calls its own prompts."""
        for layer, block in enumerate(blocks_of(transformer)):
            block.register_forward_pre_hook(partial(getattr(self, f"_into_{side}"), layer))
        if side == "vision":
            transformer.register_forward_hook(self._without_prompts)

    def _into_text(self, layer: int, block: nn.Module, inputs: tuple) -> tuple | None:
        """The prompts of a layer follow the start; those of the first one are read as words."""
        if layer == 0:
            return None
        x, held = inputs[0], self._held["text"]
        assert held is not None  # the pass is inside `holding`
        prompts = held[layer]
        pieces = x[:, :1], prompts.expand(x.shape[0], -1, -1), x[:, 1 + len(prompts) :]
        return torch.cat(pieces, 1), *inputs[1:]

    def _into_vision(self, layer: int, block: nn.Module, inputs: tuple) -> tuple | None:
        """The prompts of a layer follow the patches, in the place of those of the layer before."""
        if layer == 0:
            self._now = self.chosen("vision")
        if (prompts := self._now) is None:
            return None
        x, prompt = inputs[0], prompts[layer]
        patches = x if layer == 0 else x[:, : -len(prompt)]
        return torch.cat([patches, prompt.expand(x.shape[0], -1, -1)], 1), *inputs[1:]

    def _without_prompts(self, transformer: nn.Module, inputs: tuple, x: Tensor) -> Tensor:
        prompts, self._now = self._now, None
        return x if prompts is None else x[:, : -prompts.shape[1]]


class PromptSetsHead(LearnedTextHead):
    """logits = s cos(f, t_c), where the texts t_c have the prompts `sets` in every layer of the text encoder.

    sets: `net.prompts`; as a module inside this one, whose own tensors are frozen, it would never be in training mode
    zero_shot [M, e]: the texts of model.prompt, without prompts; no part of the state, as in `TextHead`
    """

    zero_shot: Tensor

    def __init__(self, texts: Texts, sets: PromptsOfClients, zero_shot: Tensor) -> None:
        super().__init__(texts, sets.text.shape[2])
        self._sets = (sets,)
        self.register_buffer("zero_shot", zero_shot, persistent=False)

    @property
    def sets(self) -> PromptsOfClients:
        """The prompts of all clients."""
        return self._sets[0]

    def read_with(self, prompts: Tensor) -> Tensor:
        """Prompts [D, n, d] -> texts [M, e] of length 1."""
        with self.sets.holding("text", prompts):
            return self.read(prompts[0])

    def logits(self, features: Tensor, texts: Tensor) -> Tensor:
        """s cos(f, t), [B, e] and [M, e] -> [B, M]."""
        return self.scale * F.normalize(features, dim=1) @ texts.T

    def forward(self, features: Tensor) -> Tensor:
        """[B, e] -> [B, M]."""
        chosen = self.sets.chosen("text")
        assert chosen is not None  # only the image encoder has passes without prompts
        return self.logits(features, self.read_with(chosen))


def blocks_of(transformer: nn.Module) -> nn.ModuleList:
    """The blocks of open_clip's transformer, or of our own."""
    blocks = transformer.get_submodule("resblocks" if hasattr(transformer, "resblocks") else "blocks")
    assert isinstance(blocks, nn.ModuleList)
    return blocks


@dataclass(frozen=True)
class PromptSets(TextLearner):
    """n prompts of every client in all layers of both encoders; aggregators make P = mean_K LN(x + FFN(x)) of them,
    with x = LN(p + Attention(p)) over the K clients.

    Source: PLAN (Gong et al. 2024, arXiv 2411.10063). In a layer of the text
    encoder prompts stand between the start and the name, in one of the image encoder behind the patches; every layer
    replaces those of the layer before. Predictions use the aggregated prompts. A client trains its own ones or the
    aggregators (the term `prompt_stages`), and the server keeps a row for each (`own_rows`). It needs `model.head =
    "text"`, a CLIP model whose image encoder is a ViT, and model.train = "head"; 8 x 12 x (512 + 768) values for each
    client on ViT-B/16. All rows travel in both directions, of which the server takes the client's own.

    The released code cannot be run: files are missing. In it no gradient reaches the prompts from the second local
    stage on, and the global text prompt is a plain mean. Each layer has an aggregator of its own (per_layer = true:
    25.2 and 56.7 million values), and half precision is used. Here prompts are parameters. The number of heads is ours.

    n: the number of prompts in a layer
    per_layer: whether each layer has its own attention and FFN; both LN are shared over the layers
    heads: the number of heads of the attention, which must divide the widths of both encoders
    through: whether prompts are trained through the aggregators too, in the stage of these
    std: the standard deviation of the initial prompts
    """

    n: Annotated[int, Field(ge=1)] = 8
    per_layer: bool = False
    heads: Annotated[int, Field(ge=1)] = 8
    through: bool = False
    std: Annotated[float, Field(ge=0)] = 0.02
    assumes = (Fact.SEVERAL_CLIENTS,)
    counts_clients: ClassVar[bool] = True
    requires: ClassVar[dict[str, str]] = {"terms": "prompt_stages", "refine": "own_rows"}

    def check(self, experiment: Experiment) -> None:
        """Raises UserError for a compiled pass, and where more than the prompts is trained. A model without texts,
        which the recipe alone is shown with, is refused by `apply`."""
        model = experiment.model
        if model.head == "text" and model.train != "head":
            raise UserError("prompt_sets has a teacher in an image encoder that does not change, and model.train = "
                            f"{model.train!r} trains more than the prompts; set model.train = 'head'")  # fmt: skip
        if experiment.train.compile != "off":
            raise UserError("prompt_sets has other prompts in the stages and for the teacher, which one compiled pass "
                            "cannot have; set train.compile = 'off'")  # fmt: skip

    def apply(self, net: Net) -> None:
        """Adds prompts and aggregators. Raises UserError without texts or a ViT, or when the texts are too long."""
        texts = self.texts_of(net)
        texts.require("prompt_sets.n", self.n)
        image = getattr(getattr(net.backbone, "visual", net.backbone), "transformer", None)
        if image is None:
            raise UserError("insert prompt_sets: its prompts need an image encoder that is a transformer; use a ViT of "
                            "open_clip, such as open_clip:ViT-B-16")  # fmt: skip
        text = texts.encoder.transformer
        sets = PromptsOfClients(
            self._normal(net.clients, text), self._normal(net.clients, image), self.per_layer, self.heads, self.through
        )
        sets.attach("text", text)
        sets.attach("vision", image)
        net.prompts = sets
        assert isinstance(net.head, TextHead)  # or it has no texts
        self.replace(net, PromptSetsHead(texts, sets, net.head.text), set())

    def _normal(self, clients: int, transformer: nn.Module) -> Tensor:
        blocks = blocks_of(transformer)
        width = next(module for module in blocks[0].modules() if isinstance(module, nn.LayerNorm)).normalized_shape[0]
        if width % self.heads:
            raise UserError(f"prompt_sets.heads: {self.heads} does not divide the encoder's width of {width}")
        return self.std * torch.randn(clients, len(blocks), self.n, width)
