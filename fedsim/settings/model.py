"""Settings of the network."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from fedsim.common.files import of_home
from fedsim.settings.effect import Only
from fedsim.settings.sections import Settings

WEIGHT_WORDS = ("imagenet", "hub", "package")  # values of `model.weights` other than "none" and a file


def weights_file(weights: str) -> Path | None:
    """The file that `model.weights` names; None where it names none, or one that is not on this machine."""
    file = of_home(weights)
    return file if weights not in ("none", *WEIGHT_WORDS) and file.is_file() else None


class ModelSettings(Settings):
    """[model]: backbone, its initial weights and an optional bottleneck before the linear head."""

    backbone: str = Field(
        "digits-cnn-bn",
        description="digits-cnn, digits-cnn-bn, small-cnn, resnet18, resnet50, densenet121, alexnet, vit-b-16, "
        "vit-b-32; for data with masks unet, unet-small, unet-resnet18, unet-resnet50, unet-densenet121; tiny-clip to "
        "try methods that read class names; linear, mlp, cnn-1d for tensors that are no images; or timm:NAME, "
        "open_clip:NAME",
    )
    options: dict[str, Any] = Field(
        {},
        description="more arguments of timm.create_model; for open_clip: pretrained, the name of its weights; for mlp "
        "and cnn-1d: widths, norm, dropout, and kernel",
    )
    weights: str = Field(
        "none",
        description="none (random), imagenet or hub (downloaded), package (from a Python package), or a local file",
    )
    train: str = Field(
        "all",
        description="what is trained; the rest is frozen and not sent: all, or head, norm or patterns of parameters' "
        "names such as backbone.layer4.*, joined by +",
    )
    bottleneck: int = Field(
        0, ge=0, le=100_000, description="width of Linear-BatchNorm1d-ReLU before the head; 0: none"
    )
    head: Literal["linear", "text"] = Field("linear", description="linear: learned; text: CLIP's texts of the classes")
    prompt: Annotated[str, Only(head="text")] = Field(
        "a photo of a {}.", description="with head = text, the text of a class, with {} for its name"
    )

    @field_validator("prompt")
    @classmethod
    def _prompt_has_one_place(cls, prompt: str) -> str:
        if prompt.count("{}") != 1 or prompt.count("{") != 1 or prompt.count("}") != 1:
            raise ValueError("the text of a class needs exactly one {} for its name")
        return prompt
