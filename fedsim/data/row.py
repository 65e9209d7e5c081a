"""One row of the table of data sets: its facts, and its reader."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Benchmark:
    """Facts about one data set; domains and classes in sorted order, which gives their indices."""

    name: str
    title: str
    domains: tuple[str, ...]
    classes: tuple[str, ...]
    channels: int
    counts: dict[str, int] | None = None  # images per domain
    class_counts: dict[str, tuple[int, ...]] | None = None  # images per domain and class, in class order
    folder: tuple[str, ...] = ()  # folder names below the data root, in the form that `plain` returns; () for none
    source: str = ""
    note: str = ""
    all_domains: tuple[str, ...] = ()  # the data set's domains when `domains` is a chosen part of them
    same_images: bool = False  # every domain shows the same images in the same order: all hold out the same ones
    test_apart: bool = False  # the unseen domain is tested on images that no client holds in any domain
    joined: tuple[str, ...] = ()  # the data set's own splits, where the settings do not ask for them
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)  # fields that a `data.variant` changes
    reader: str = "fedsim.data.image_tree:ImageTree"  # module:class of its Reader
    discover: str = ""  # module:function (settings, row) -> the row with the domains and classes that the data have
    task: str = "classification"  # a row of fedsim.common.tasks
    # That masks mark, or the names of other targets than a class; classes are then strata of the images.
    structures: tuple[str, ...] = ()
    takes_targets: bool = False  # its labels may be numbers, or several labels of 0 and 1, as `data.task` says
    images: bool = True  # its examples are images; other tensors have a `shape`
    shape: tuple[int, ...] = ()  # of an example that is a tensor and no image, such as (10,); () for images
    features: tuple[str, ...] = ()  # names of the columns of such a tensor, where it is a row of a table
    numeric: int = 0  # its first columns (of other shapes: channels) that `data.scale` standardizes

    def __post_init__(self) -> None:
        if self.shape:
            object.__setattr__(self, "images", False)

    @property
    def unit(self) -> str:
        """What one example is called in messages, in the plural."""
        if self.images:
            return "images"
        return "rows" if self.features else "examples"

    def example_shape(self, image_size: int) -> tuple[int, ...]:
        """The shape of one example; images are squares of `image_size` pixels."""
        return self.shape or (self.channels, image_size, image_size)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what a network gives one logit for."""
        return self.structures or self.classes

    def environment(self, domain: str) -> int:
        """The number that seeds a domain's split: its index among ALL sorted domains (DomainBed's env_index).

        Where domains share their images it is 0 for all of them, so that subset, partition and hold-out are equal
        everywhere: an image that validates on one client is not trained on by any.
        """
        index = (self.all_domains or self.domains).index(domain)
        return 0 if self.same_images else index
