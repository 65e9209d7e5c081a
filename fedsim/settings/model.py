"""Settings of the network."""

from typing import Any, Literal

from pydantic import Field, field_validator

from fedsim.sections import Settings


class ModelSettings(Settings):
    """[model]: backbone, its initial weights and an optional bottleneck before the linear head."""

    backbone: str = Field(
        "digits-cnn-bn",
        description="digits-cnn, digits-cnn-bn, resnet18, resnet50, densenet121, alexnet, vit-b-16, vit-b-32; for data "
        "with masks unet, unet-small, unet-resnet18, unet-resnet50, unet-densenet121; or timm:NAME, open_clip:NAME",
    )
    options: dict[str, Any] = Field(
        {}, description="further arguments of timm.create_model; of open_clip: pretrained, which of its weights"
    )
    weights: str = Field(
        "none",
        description="none (random), imagenet or hub (downloaded), package (a Python package's), or a local file",
    )
    train: str = Field(
        "all",
        description="all; or what is trained, while the rest is frozen and not sent: head, norm, or a pattern of "
        "parameter names such as backbone.layer4.*, joined by +",
    )
    bottleneck: int = Field(0, ge=0, description="width of Linear-BatchNorm1d-ReLU before the head; 0: none")
    head: Literal["linear", "text"] = Field("linear", description="linear (learned); text: CLIP's texts of the classes")
    prompt: str = Field("a photo of a {}.", description="the text of a class, with {} for its name; for head = text")

    @field_validator("prompt")
    @classmethod
    def _prompt_has_one_place(cls, prompt: str) -> str:
        if prompt.count("{}") != 1 or prompt.count("{") != 1 or prompt.count("}") != 1:
            raise ValueError("the text of a class has one {} where its name comes")
        return prompt
