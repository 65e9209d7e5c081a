"""Learned vectors in place of the words in front of a class's name: PromptFL."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedsim.common.errors import UserError
from fedsim.models.inserts.base import Insert
from fedsim.models.net import Net
from fedsim.models.texts import TextHead, Texts
from fedsim.parts.facts import Fact
from fedsim.parts.part import part_name
from fedsim.settings.experiment import Experiment
from fedsim.tensors.kinds import Kind


class LearnedTextHead(nn.Module):
    """Reads the texts t_c = E_T([start, V, name c, end]) of M classes, in which V has `length` vectors.

    encoder: E_T; start [d], tails [M, T, d], ends [M] and scale are what it reads besides V, see `Texts`
    """

    tensor_kinds: ClassVar[dict[str, Kind]] = {"ends": Kind.WEIGHT}  # places in a text, which count nothing

    start: Tensor
    tails: Tensor
    ends: Tensor
    scale: Tensor

    def __init__(self, texts: Texts, length: int) -> None:
        super().__init__()
        tails, ends = texts.tails(length)
        self.encoder = texts.encoder
        self.register_buffer("start", texts.embedded([texts.start])[0])
        self.register_buffer("tails", tails)
        self.register_buffer("ends", ends)
        self.register_buffer("scale", torch.tensor(texts.scale))

    @property
    def out_features(self) -> int:
        """M, the number of classes."""
        return len(self.tails)

    def read(self, context: Tensor) -> Tensor:
        """Vectors [L, d] or [M, L, d] -> texts t [M, e] of length 1."""
        classes, _, width = self.tails.shape
        parts = self.start.expand(classes, 1, width), context.expand(classes, -1, -1), self.tails
        return F.normalize(self.encoder(torch.cat(parts, 1), self.ends), dim=1)


class PromptHead(LearnedTextHead):
    """logits = s cos(f, t_c) with t_c = E_T([start, V, name c, end]), for features f [B, e].

    context: V [L, d], the same for all classes, or [M, L, d]; the only tensor that is learned
    """

    def __init__(self, texts: Texts, context: Tensor) -> None:
        super().__init__(texts, context.shape[-2])
        self.context = nn.Parameter(context)

    def forward(self, features: Tensor) -> Tensor:
        """[B, e] -> [B, M]; the texts are computed once for the batch."""
        return self.scale * F.normalize(features, dim=1) @ self.read(self.context).T


class TextLearner(Insert):
    """The contract of inserts that put a head with learned texts in the place of `model.head = "text"`."""

    replaces = (Fact.CLASS_TEXTS,)
    order: ClassVar[int] = 0  # an insert that makes a linear head comes after it, and is refused

    def texts_of(self, net: Net) -> Texts:
        """The texts of the network's head; UserError for a head that reads none."""
        if not isinstance(net.head, TextHead) or net.head.texts is None:
            raise UserError(f"insert {part_name(self)}: it learns a part of the texts of class names; set model.head = "
                            "'text' and a model.backbone with a text encoder (open_clip:NAME)")  # fmt: skip
        return net.head.texts()

    def replace(self, net: Net, head: LearnedTextHead, learned: set[str]) -> None:
        """Puts the head into the network; its tensors other than the learned ones are frozen."""
        net.head = head
        frozen = {name for name in net.frozen if not name.startswith("head.")}
        net.frozen = frozenset(frozen | {f"head.{name}" for name in head.state_dict() if name not in learned})


def normal_vectors(texts: Texts, count: int, per_class: bool, std: float) -> Tensor:
    """Drawn from N(0, std^2): [count, d], or [M, count, d]."""
    width = texts.embedding.embedding_dim
    return std * torch.randn(*([len(texts.names)] if per_class else []), count, width)


@dataclass(frozen=True)
class LearnedPrompts(TextLearner):
    """logits = s cos(f, E_T([start, V, name c, end])): the vectors V [L, d] are learned, and E_T is frozen.

    Source: PromptFL (Guo et al., IEEE Transactions on Mobile Computing 2024, arXiv 2208.11625), whose prompts are those
    of CoOp (Zhou et al., IJCV 2022). V stands in the place of the words of `model.prompt` in front of the name; what
    the template has behind the name stays. It needs `model.head = "text"` and a CLIP model. With `model.train = "head"`
    the image encoder is frozen too: V alone is trained and sent, 16 x 512 = 8,192 values for ViT-B/16. With other
    values of model.train what they name is trained too.

    All M texts pass through E_T once per batch, cut behind the longest one, which changes nothing (`TextEncoder`). The
    server takes the mean by numbers of examples, as in the paper; the released trainer takes the plain mean
    (method.weights = "uniform") and averages all tensors of CLIP, of which only V differ. Its runs: SGD with a rate of
    .001 and a cosine schedule, batches of 32, ten rounds of five epochs, ViT-B/16 in half precision.

    L: the number of vectors; with init = "template" it is that of the template's tokens, and L cannot be set
    per_class: whether every class has vectors of its own, V [M, L, d]
    init: `normal` draws V from N(0, std^2); `template` begins with the embeddings of the words of model.prompt, and so
    with zero-shot CLIP
    std: the standard deviation of the initial V, which cannot be set with init = "template"
    """

    L: Annotated[int, Field(ge=1)] = 16
    per_class: bool = False
    init: Literal["normal", "template"] = "normal"
    std: Annotated[float, Field(ge=0)] = 0.02

    def check(self, experiment: Experiment) -> None:
        """Raises UserError for values that the start from the template would not use."""
        for name in ("L", "std") if self.init == "template" else ():
            if getattr(self, name) != getattr(LearnedPrompts, name):
                raise UserError(f"learned_prompts.{name} has no effect with init = 'template', which begins with the "
                                f"words of model.prompt; leave {name} out, or set init = 'normal'")  # fmt: skip

    def apply(self, net: Net) -> None:
        """Gives the network a head with learned vectors. Raises UserError without texts, or when they are too long."""
        texts = self.texts_of(net)
        if self.init == "template":
            if not texts.template:
                raise UserError("learned_prompts.init = 'template': model.prompt has no word in front of the name")
            context = texts.embedded(texts.template)
            context = context.expand(len(texts.names), -1, -1) if self.per_class else context
        else:
            texts.require("learned_prompts.L", self.L)
            context = normal_vectors(texts, self.L, self.per_class, self.std)
        self.replace(net, PromptHead(texts, context.clone()), {"context"})
