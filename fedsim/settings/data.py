"""Settings of the images: which ones, how they are split and augmented, and the folders that the settings name."""

import os
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, PrivateAttr, field_validator

from fedsim.common.errors import UserError
from fedsim.common.files import of_home
from fedsim.settings.effect import GIVEN, Above, Only, Trait
from fedsim.settings.sections import Settings

# Rows of fedsim.data.augment.
AUGMENTS = ("none", "domainbed", "csac", "feddg-ga", "flip-jitter", "fedsb", "ccst", "flip")
START_VARIABLE = "FEDSIM_START"
SMALLEST_SIZE = 8  # pixels of an image's side
# Names of columns by what they are, in [data.columns]; of a table of numbers also lists of them.
Columns = dict[str, str | list[str] | dict[str, list[str]]]
TENSORS = ("arrays", "hospitals")  # data sets of tensors that are no images
# Kinds of findings that refuse a run, and what each of them is; docs/data-reference.md lists them.
Accepted = Literal[
    "few-levels", "alpha", "pages", "mask-values", "split-domains", "hidden-signs", "numbers", "missing-labels",
    "multi-label", "continuous",
]  # fmt: skip
ACCEPTED: tuple[str, ...] = get_args(Accepted)


class DataSettings(Settings):
    """[data]: which images are used, how they are split, and how batches are augmented."""

    dataset: str = Field(
        "digits",
        description="a data set that `fedsim datasets` lists, or your own as module:name (also a FederatedDataset)",
    )
    task: Literal["", "classification", "binary", "multi-label", "regression"] = Field(
        "",
        description="what is learned; empty: the data set's own task. binary: two classes, measured by AUROC; "
        "multi-label and regression are for arrays, tables of numbers and Datasets, whose label then is several "
        "columns of 0 and 1, or a number",
    )
    root: Annotated[str, Only(Trait.ROOT)] = Field(
        "", description="folder of the data set; empty: $FEDSIM_DATA, else ./data"
    )
    domains: list[str] = Field([], description="use only these domains; empty: all of the data set")
    classes: Annotated[
        list[str], Only(dataset=("folder", "table", "hugging-face", *TENSORS), refused=True), Only(Trait.OUTSIDE)
    ] = Field(
        [],
        description="classes of a `folder` data set, when its images are on other machines (for a deployment's "
        "server), or when a domain may lack some of them; also of `arrays`",
    )
    image_size: Annotated[int, Only(Trait.IMAGES)] = Field(
        28,
        ge=0,
        le=1024,
        description="images are decoded once to this size, in pixels, at least 8; 0: the size of the images on which "
        "the backbone's weights were trained",
    )
    columns: Annotated[
        Columns, Only(dataset=("table", "hugging-face", *TENSORS), refused=True), Only(Trait.OUTSIDE)
    ] = Field(
        {},
        description="names of a table's columns, if they are not path, label, domain and split; group: the column of "
        "patients or sequences, whose images are never split; of a table of numbers also features, categories = "
        "{COLUMN = [values]} and missing = {COLUMN = [values]}, and with task = 'multi-label' label = [COLUMNS]",
    )
    levels: Annotated[str, Only(dataset="folder", refused=True), Only(Trait.OUTSIDE)] = Field(
        "",
        description="what the levels of folders below data.root are, such as 'domain/*/class': * is a level that is "
        "neither, whose folders are read together; a folder's name in its place reads this folder alone; empty: "
        "domain/class",
    )
    accept: list[Accepted] = Field(
        [],
        description="kinds of findings in the data with which a run begins all the same; `fedsim datasets PATH` "
        "shows the findings",
    )
    group: Literal["", "folder", "patient"] = Field(
        "",
        description="images that are never split between training, validation and clients: those of one folder below "
        "the class (of image trees), or of one patient (camelyon17); empty: each image is drawn by itself",
    )
    shape: Annotated[list[int], Only(dataset="arrays", refused=True), Only(Trait.OUTSIDE)] = Field(
        [], description="shape of an example of `arrays`, where all files are on other machines (for a server)"
    )
    scale: Annotated[Literal["auto", "federated", "site", "none"], Only(Trait.TENSORS, refused=True)] = Field(
        "auto",
        description="how tensors that are no images are standardized: federated, by the training rows of all sources "
        "together; site, every domain by its own; none; auto: federated for rows of numbers, none for other shapes. "
        "The targets of a regression are always standardized by all sources together, unless this is none",
    )
    missing: Annotated[Literal["mean", "indicator", "drop"], Only(Trait.TENSORS, refused=True)] = Field(
        "mean",
        description="an empty cell of a table becomes the mean, or the mean with a column that says so (indicator), or "
        "its row is left out (drop)",
    )
    variant: Annotated[
        Literal["csac", "domainbed"], Only(dataset="rotated-mnist", refused=True), Only(Trait.OUTSIDE)
    ] = Field("csac", description="Rotated MNIST: the same images in every domain (csac), or disjoint ones (domainbed)")
    fraction: float = Field(
        1.0, gt=0, le=1, description="share of every domain's images that is used (drawn per class, by split_seed)"
    )
    holdout: float = Field(0.1, gt=0, lt=1, description="share of a client's images held out for validation")
    split: Literal["random", "stratified", "lists"] = Field(
        "random", description="DomainBed's split, per class (CSAC), or the published lists in data.lists"
    )
    lists: Annotated[
        str,
        Only(Trait.FOLDERS, split="lists", refused=True),
        Only(Trait.FOLDERS, test_split="list"),
        Only(Trait.OUTSIDE),
    ] = Field("", description="folder of split lists (DOMAIN_train*.txt and so on), relative to data.root")
    split_seed: int = Field(
        -1, ge=-1, description="seed of subsets, splits and partitions; -1: run.seed, so each seed has other splits"
    )
    test_split: Annotated[Literal["all", "in", "list"], Only(Trait.UNSEEN)] = Field(
        "all",
        description="tested target images: all, DomainBed's 'in' part, or those of DOMAIN_test*.txt in data.lists",
    )
    source_test: Annotated[float, Field(ge=0, lt=1)] | Literal["list"] = Field(
        0.0,
        description="share of a source client's training images that neither trains nor selects, and is tested after "
        "each round (source_test_accuracy in clients.csv); list: the images of DOMAIN_test*.txt in data.lists; 0: none",
    )
    adapt_share: Annotated[float, Only(Trait.UNSEEN)] = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the unseen domain's images for methods that train on them without labels; these images "
        "are never tested; 0: half of the images with such a method, and none with other methods",
    )
    clients_per_domain: int = Field(1, ge=1, le=100_000, description="clients that share one domain")
    clients: Annotated[int, Field(ge=0, le=100_000)] | dict[str, Annotated[int, Field(ge=1, le=100_000)]] = Field(
        0,
        description="clients of the run, more of them for larger domains, as in FedDG_Benchmark; with fewer clients "
        "than domains a client has several; a table such as {photo = 3} has the clients of each domain, and a domain "
        "that it does not name has one; 0: clients_per_domain of each domain",
    )
    partition: Annotated[
        Literal["iid", "dirichlet", "classes"],
        Only(clients_per_domain=Above(1)),
        Only(mix=Above(0)),
        Only(clients=GIVEN),
    ] = Field(
        "iid",
        description="how a domain is shared between its clients: alike, by shares of every class, or so that each has "
        "only classes_per_client classes",
    )
    classes_per_client: Annotated[int, Only(partition="classes", clients_per_domain=Above(1), refused=True)] = Field(
        2, ge=1, description="classes of each client of a domain"
    )
    alpha: Annotated[
        float,
        Only(partition="dirichlet", clients_per_domain=Above(1)),
        Only(partition="dirichlet", mix=Above(0)),
        Only(partition="dirichlet", clients=GIVEN),
    ] = Field(0.5, gt=0, description="concentration of the Dirichlet partition over classes")
    mix: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of every source domain's images that is given to all clients, not to the domain's own ones; "
        "0: one domain per client, 1: all clients have the same mixture (FedDG_Benchmark's lambda)",
    )
    augment: Annotated[str, Only(Trait.IMAGES, refused=True)] = Field(
        "none", description=f"{', '.join(AUGMENTS)}, or your own as module:name"
    )
    normalize: Annotated[Literal["none", "imagenet", "mnist", "weights"], Only(Trait.IMAGES, refused=True)] = Field(
        "none",
        description="mean and std with which images are normalized after augmentation; weights: those of the training "
        "of the backbone's weights",
    )
    structures: Annotated[dict[str, list[int]], Only(dataset="masks", refused=True), Only(Trait.OUTSIDE)] = Field(
        {},
        description="structures of a `masks` data set, and the pixel values of the mask files for each; a value may "
        "belong to several structures: disc = [0, 128], cup = [0]",
    )
    mask_threshold: Annotated[float, Only(Trait.MASKS, refused=True)] = Field(
        0.5, gt=0, lt=1, description="probability above which a pixel belongs to a structure when masks are evaluated"
    )
    largest_component: Annotated[bool, Only(Trait.MASKS, refused=True)] = Field(
        False, description="evaluate only the largest connected component of each predicted structure"
    )
    cache: str = Field("", description="folder of the decoded images; empty: $FEDSIM_CACHE, else ~/.cache/fedsim")
    _run_seed: int = PrivateAttr(0)  # the Experiment sets this attribute and the next two
    _validation_domain: str = PrivateAttr("")
    _target: str = PrivateAttr("")

    @property
    def unseen_domain(self) -> str:
        """The unseen domain of the run; empty where the settings leave it open."""
        return self._target

    @property
    def is_dealt(self) -> bool:
        """Whether clients get images as `fedsim.data.mixing` says: of a mixture, or by the sizes of the domains."""
        return bool(self.mix or self.clients)

    @property
    def validation_domain(self) -> str:
        """The domain that selects the run's round and on which no client trains; empty when there is none."""
        return self._validation_domain

    @property
    def seed_of_splits(self) -> int:
        """The seed from which splits are drawn: `split_seed`, or the run's seed."""
        return self._run_seed if self.split_seed < 0 else self.split_seed

    def column(self, name: str, usual: str) -> str:
        """The table's own name of a column: what `columns` says, or else `usual`."""
        named = self.columns.get(name, usual)
        if not isinstance(named, str):
            raise UserError(f"data.columns.{name}: {named!r} is not the name of one column; lists of columns are for "
                            "data.dataset = 'arrays'")  # fmt: skip
        return named

    @field_validator("root", "lists", "cache")
    @classmethod
    def _path_has_no_control_sign(cls, path: str) -> str:
        if any(sign < " " for sign in path):
            raise ValueError("a tab or line end is in the path, which \\t and \\n mean in \"...\"; write / or '...'")
        return path

    @field_validator("image_size")
    @classmethod
    def _size_is_none_or_enough(cls, size: int) -> int:
        if 0 < size < SMALLEST_SIZE:
            raise ValueError(f"images have at least {SMALLEST_SIZE} pixels a side; 0 takes the size of the weights")
        return size


def data_root(data: DataSettings) -> Path:
    """The folder in which the data set is looked for."""
    return of_home(data.root or os.environ.get("FEDSIM_DATA", "data"))


def cache_root(data: DataSettings) -> Path:
    """The folder of the decoded images."""
    return of_home(data.cache or os.environ.get("FEDSIM_CACHE", "~/.cache/fedsim"))


def start_folder() -> Path:
    """The folder in which fedsim was started, from which the relative paths of settings are read.

    The processes of Flower's engine have another working folder and get this one as a variable.
    """
    return Path(os.environ.get(START_VARIABLE) or Path.cwd())
