"""CLIP models of open_clip as backbones, `model.backbone = "open_clip:NAME"`, and the head that reads class names.

With `model.head = "text"` the classifier is not learned: class c is the text t_c that CLIP's text encoder makes of
`model.prompt` with the class's name (Radford et al., ICML 2021). Without any training this is
zero-shot CLIP, which round 0 of FedAvg records. Methods with layers or texts that begin with random values (fedclip,
promptfl, fedapt, plan) record the accuracy of those in round 0.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.common.about import optional
from fedsim.common.errors import UserError, first_line, nearest
from fedsim.models.layout import Backbone, Statistics, survey
from fedsim.models.texts import TextEncoder, TextHead, Texts, refuse_equal
from fedsim.models.weights import StateDict


class ClipEncoder(nn.Module):
    """Images [B, 3, s, s] -> features [B, e] of CLIP's image encoder, as they are before they are normalized.

    `clip` is the whole model as long as its weights are loaded and its text encoder is needed; afterwards
    (`keep_images_only`) only the image encoder `visual` is left.
    """

    clip: Any
    visual: nn.Module

    def __init__(self, clip: Any, name: str) -> None:
        super().__init__()
        self.clip, self.name = clip, name

    def forward(self, x: Tensor) -> Tensor:
        """Features of the images."""
        return (self.clip.visual if hasattr(self, "clip") else self.visual)(x)

    @torch.no_grad()
    def text_head(self, classes: Sequence[str], prompt: str) -> TextHead:
        """The head of these class names, in their order; UserError for a prompt that is longer than the context."""
        import open_clip

        tokenizer = open_clip.get_tokenizer(self.name)
        prompts = [prompt.format(name.replace("_", " ")) for name in classes]
        for text in prompts if hasattr(tokenizer, "encode") else []:
            if len(tokenizer.encode(text)) + 2 > tokenizer.context_length:  # two mark its start and its end
                raise UserError(f"model.prompt: {text!r} is longer than the {tokenizer.context_length} tokens that "
                                f"{self.name} reads")  # fmt: skip
        tokens = tokenizer(prompts)
        refuse_equal(classes, tokens.tolist(), f"open_clip:{self.name}")
        training = self.clip.training
        text = self.clip.eval().encode_text(tokens)
        self.clip.train(training)
        scale = float(self.clip.logit_scale.exp())
        return TextHead(text, scale, partial(_texts, self.clip, self.name, tokenizer, classes, prompt, scale))

    def keep_images_only(self) -> None:
        """Remove the text encoder, which is not needed after the head has been made."""
        self.visual = self.clip.visual
        del self.clip


def _texts(clip: Any, name: str, tokenizer: Any, classes: Sequence[str], prompt: str, scale: float) -> Texts:
    """What is needed to learn a part of the texts; UserError for an encoder that is not built as CLIP's own."""
    tower: Any = getattr(clip, "text", clip)
    pooling = getattr(clip, "text_pool_type", getattr(tower, "pool_type", ""))
    causal = getattr(tower, "attn_mask", None) is not None and getattr(tower, "cls_emb", None) is None
    readable = pooling in ("argmax", "eos") and causal and hasattr(tokenizer, "eot_token_id")
    if not readable or tower.text_projection is None:
        raise UserError(f"model.backbone: the texts of open_clip:{name} cannot be learned, because its text encoder is "
                        "not built as that of CLIP (from left to right, up to a token that marks the end)")  # fmt: skip
    encoder = TextEncoder(tower.transformer, tower.positional_embedding, tower.ln_final, tower.text_projection)
    marks = tokenizer.sot_token_id, tokenizer.eot_token_id
    return Texts.read(
        tokenizer.encode, marks, prompt, classes, encoder=encoder, embedding=tower.token_embedding, scale=scale,
        context=tower.context_length, model=f"open_clip:{name}",
    )  # fmt: skip


def clip_row(name: str, options: Mapping[str, Any]) -> Backbone:
    """The catalog's row for open_clip's model `name`.

    Weights are our seed's ("none"), published ones ("hub", of which `model.options.pretrained` names one), or a local
    file of the whole model. For a file `pretrained` says how it was trained, where published weights differ in that.
    Raises UserError for an unknown name or option, and when open_clip is not installed.
    """
    open_clip = optional("open_clip", f"model.backbone: 'open_clip:{name}' needs the package open_clip", "clip")
    if name not in open_clip.list_models():
        raise UserError(f"model.backbone: open_clip has no model {name!r}; {nearest(name, open_clip.list_models())}"
                        "open_clip.list_models() lists them")  # fmt: skip
    unknown = sorted(options.keys() - {"pretrained"})
    if unknown:
        raise UserError(f"model.options: open_clip:{name} takes 'pretrained' alone, not {unknown[0]!r}")
    tags = open_clip.list_pretrained_tags_by_model(name)
    tag = str(options.get("pretrained", tags[0] if tags else ""))
    if tag and tag not in tags:
        raise UserError(f"model.options.pretrained: open_clip:{name} has no weights {tag!r}; {nearest(tag, tags)}"
                        f"known: {', '.join(tags) or 'none'}")  # fmt: skip
    quick_gelu, mean, std = _facts(name, tag)
    differ = "pretrained" not in options and len({_facts(name, other) for other in tags}) > 1
    size = open_clip.get_model_config(name)["vision_cfg"]["image_size"]
    return Backbone(
        partial(_make, name, quick_gelu),
        lambda backbone, side: survey(backbone, side, {}, f"open_clip:{name}"),
        "(none)",
        {"hub": partial(_from_hub, name, tag)} if tag else {},
        statistics=Statistics(mean, std),
        input_size=size if isinstance(size, int) else size[0],
        inner="clip",
        text=ClipEncoder.text_head,
        unclear=_unclear(name, tags) if differ else "",
        finish=ClipEncoder.keep_images_only,
    )


def _facts(name: str, tag: str) -> tuple[bool, tuple[float, ...], tuple[float, ...]]:
    """What published weights need besides their model: whether GELU is the quick one, and the mean and deviation."""
    import open_clip

    config = (open_clip.get_pretrained_cfg(name, tag) or {}) if tag else {}
    mean, std = config.get("mean", open_clip.OPENAI_DATASET_MEAN), config.get("std", open_clip.OPENAI_DATASET_STD)
    return bool(config.get("quick_gelu")), tuple(mean), tuple(std)


def _unclear(name: str, tags: Sequence[str]) -> str:
    return (f"model.options: the published weights of open_clip:{name} differ in activation or normalization, and a "
            "local file does not say which it has; name the weights that it is or began with as pretrained, known: "
            f"{', '.join(tags)}")  # fmt: skip


def _make(name: str, quick_gelu: bool, image_size: int, channels: int) -> ClipEncoder:
    import open_clip

    options = {"force_quick_gelu": quick_gelu, "force_image_size": image_size, "pretrained_text": False}
    try:
        return ClipEncoder(open_clip.create_model(name, load_weights=False, **options), name)
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        raise UserError(f"model.backbone: open_clip cannot build {name!r} for images of {image_size} px "
                        f"({first_line(error)})") from None  # fmt: skip


def _from_hub(name: str, tag: str, backbone: nn.Module, image_size: int) -> StateDict:
    import open_clip

    try:
        return open_clip.create_model(name, pretrained=tag, force_image_size=image_size).state_dict()
    except Exception as error:  # hub clients raise whatever their HTTP library does
        raise UserError(f"model.weights: cannot fetch open_clip's weights {tag!r} of {name} ({first_line(error)}); "
                        "fetch them on another machine and set model.weights to the file") from None  # fmt: skip
