"""The typed sections of an experiment's settings, one class per section of the TOML file, and the folders they name.

`fedsim.experiment` reads files, presets and overrides.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, field_validator

from fedsim.errors import nearest
from fedsim.plugins import entry_points
from fedsim.sections import Settings, folder_name

# Rows of fedsim.data.augment.
AUGMENTS = ("none", "domainbed", "csac", "feddg-ga", "flip-jitter", "fedsb", "ccst", "flip")
SMALLEST_SIZE = 8  # pixels of an image's side


class DataSettings(Settings):
    """[data]: which images, how they are split, how batches are augmented."""

    dataset: str = Field(
        "digits",
        description="digits, rotated-mnist, pacs, vlcs, office-home, terra-incognita, folder; with masks: digit-masks, "
        "masks",
    )
    root: str = Field("", description="folder of the data set; empty: $FEDSIM_DATA, else ./data")
    domains: list[str] = Field([], description="use only these domains; empty: all of the data set")
    classes: list[str] = Field(
        [],
        description="classes of a `folder` data set, when its images are on other machines (for a deployment's "
        "server), or when a domain may lack some of them",
    )
    image_size: int = Field(
        28,
        ge=0,
        le=1024,
        description="images are decoded once to this size, in pixels, at least 8; 0: the size of the images on which "
        "the backbone's weights were trained",
    )
    columns: dict[str, str] = Field(
        {}, description="names of a table's columns where they are not path, label, domain and split"
    )
    variant: Literal["csac", "domainbed"] = Field(
        "csac", description="Rotated MNIST: same images in every domain, or disjoint"
    )
    fraction: float = Field(
        1.0, gt=0, le=1, description="share of every domain's images used (per class, by split_seed)"
    )
    holdout: float = Field(0.1, gt=0, lt=1, description="share of a client's images held out for validation")
    split: Literal["random", "stratified", "lists"] = Field(
        "random", description="DomainBed's split, per class (CSAC), or the published lists in data.lists"
    )
    lists: str = Field("", description="folder of split lists, seen from data.root: DOMAIN_train*.txt and so on")
    split_seed: int = Field(
        -1, ge=-1, description="seed of subsets, splits and partitions; -1: run.seed, so that seeds differ in data too"
    )
    test_split: Literal["all", "in", "list"] = Field(
        "all",
        description="target images tested: all, DomainBed's 'in' part, or those of DOMAIN_test*.txt in data.lists",
    )
    adapt_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the unseen domain's images for methods that train on them without labels; these images "
        "are never tested; 0: half of the images for such a method, none for others",
    )
    clients_per_domain: int = Field(1, ge=1, description="clients that share one domain")
    partition: Literal["iid", "dirichlet"] = Field("iid", description="how a domain is shared between its clients")
    alpha: float = Field(0.5, gt=0, description="concentration of the Dirichlet partition over classes")
    mix: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of every source domain's images that is dealt to all clients instead of the domain's own; "
        "0: one domain per client, 1: all clients have the same mixture (FedDG_Benchmark's lambda)",
    )
    augment: str = Field(
        "none",
        description=f"{', '.join(AUGMENTS)}, or your own as module:name",
    )
    normalize: Literal["none", "imagenet", "mnist", "weights"] = Field(
        "none",
        description="mean and std after augmentation; weights: those with which the backbone's weights were trained",
    )
    structures: dict[str, list[int]] = Field(
        {},
        description="structures of a `masks` data set, and the pixel values of the mask files for each; a value may "
        "belong to several structures: disc = [0, 128], cup = [0]",
    )
    mask_threshold: float = Field(
        0.5, gt=0, lt=1, description="probability above which a pixel belongs to a structure when masks are evaluated"
    )
    largest_component: bool = Field(
        False, description="count only the largest connected component of each predicted structure"
    )
    cache: str = Field("", description="folder of the decoded images; empty: $FEDSIM_CACHE, else ~/.cache/fedsim")
    _run_seed: int = PrivateAttr(0)  # set by the Experiment, as the next one
    _validation_domain: str = PrivateAttr("")

    @property
    def validation_domain(self) -> str:
        """The run's domain that selects the round and on which no client trains; empty for none."""
        return self._validation_domain

    @property
    def seed_of_splits(self) -> int:
        """The seed that splits are drawn from: `split_seed`, or the run's."""
        return self._run_seed if self.split_seed < 0 else self.split_seed

    @field_validator("image_size")
    @classmethod
    def _size_is_none_or_enough(cls, size: int) -> int:
        if 0 < size < SMALLEST_SIZE:
            raise ValueError(f"images have at least {SMALLEST_SIZE} pixels a side; 0 takes the size of the weights")
        return size

    @field_validator("augment")
    @classmethod
    def _augmentation_is_known(cls, name: str) -> str:
        known = [*AUGMENTS, *entry_points("augmentations")]
        if name not in known and ":" not in name:
            raise ValueError(f"no augmentation {name!r}; {nearest(name, known)}known: {', '.join(known)}")
        return name


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


class TrainSettings(Settings):
    """[train]: rounds, local work and its optimizer."""

    rounds: int = Field(10, ge=1)
    epochs: int = Field(1, ge=1, description="local passes over the data per round, unless iterations is set")
    iterations: int = Field(0, ge=0, description="local steps per round; 0: epochs count")
    batch_size: int = Field(64, ge=2)
    budget: Literal["paper", "images", "steps"] = Field(
        "paper",
        description="local work: paper: as much as the method's parts ask for; images or steps: as many as FedAvg's, "
        "preludes and copies included (clients/budget.py)",
    )
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = Field(0.01, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    schedule: Literal["constant", "cosine", "cosine-official", "step"] = Field(
        "constant",
        description="learning rate over rounds: cosine at (t-1)/T; cosine-official at t/T (gPerXAN's code); "
        "step: multiplied by 0.1 after 80 % of the rounds",
    )
    persist_optimizer: bool = Field(False, description="keep momentum and Adam moments between rounds")
    clients_per_round: int = Field(0, ge=0, description="clients drawn each round; 0: all")
    evaluate_clients: str = Field(
        "all",
        pattern="^(all|drawn|[1-9][0-9]*)$",
        description="clients that validate the model of a round, which selects the best round: all, drawn (those that "
        "trained in the round), or a number of clients that stay the same",
    )
    evaluate_every: int = Field(1, ge=1, description="rounds between validations; the last round is always validated")
    precision: Literal["fp32", "bf16"] = "fp32"
    side_by_side: int = Field(
        1,
        ge=1,
        description="so many clients train as one program where the method allows it (inline runtime); for small "
        "networks on a GPU, slower on a CPU; 1: one after the other",
    )
    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = Field(
        "off",
        description="torch.compile of the network's training pass, in this mode of PyTorch's: one graph for all "
        "clients and rounds of a process; on a GPU reduce-overhead takes CUDA graphs",
    )
    dp_clip: float = Field(
        0.0, ge=0, description="local differential privacy: largest L2 norm of a client's update; 0: off"
    )
    dp_epsilon: float = Field(
        1.0, gt=0, description="epsilon of local differential privacy in each round; no guarantee above 1"
    )
    dp_delta: float = Field(1e-5, gt=0, lt=1, description="delta of local differential privacy in each round")
    local_checks: int = Field(
        0, ge=0, description="validations during local training, of which the best model is sent; 0: off"
    )


class RunSettings(Settings):
    """[run]: what is held out, where it runs, what happens when a client fails."""

    target: str = Field("", description="the unseen domain; empty: the last one")
    seed: int = Field(0, ge=0)
    label: Annotated[str, AfterValidator(folder_name)] = Field(
        "", description="text that distinguishes this run from other runs of the same method; a grid of a sweep sets it"
    )
    runtime: Literal["inline", "ray", "flower", "deployment"] = Field(
        "inline",
        description="this process, Ray workers, Flower's own simulation engine, or a federation's own machines",
    )
    federation: str = Field("", description="the deployment's federation file")
    evaluate_target: Literal["auto", "server", "site"] = Field(
        "auto",
        description="where the unseen domain's images are: on the server, or on a site with role = target; "
        "auto: the site when the federation file has one, else the server",
    )
    wait_for_sites: float = Field(300.0, gt=0, description="seconds to wait for sites that are not online")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(
        1,
        ge=0,
        description="CPU threads of each process that computes; numbers depend on it, so that it is recorded and "
        "compared; 0: one for each core that the process may use (each site of a deployment counts its own)",
    )
    output: str = "outputs"
    keep_predictions: bool = Field(
        True, description="keep the target's predictions of the selected, last and oracle round, for `compare --metric`"
    )
    evaluate_batch_size: int = Field(256, ge=1)
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints")
    validation_domain: str = Field(
        "",
        description="a domain that is held out to select the round: no client trains on it, and the server evaluates "
        "it like the unseen one; empty: the source clients' own validation images select the round",
    )
    select_on: Literal["aggregated", "local"] = Field(
        "aggregated",
        description="the validation that selects the round: of the aggregated model, or the mean of the local models",
    )
    client_rows: Literal["auto", "clients", "domains"] = Field(
        "auto",
        description="rows of a round in clients.csv: one per client, one per domain, or (auto) per domain where "
        "more than 200 clients take part",
    )
    personalised: bool = Field(
        False, description="source clients also validate with their own batch norm (clients.csv)"
    )
    keep_personal: bool = Field(
        False, description="write every client's own model to personal-<client>.safetensors; sites keep theirs"
    )
    on_client_failure: Literal["stop", "continue"] = "stop"
    patience: float = Field(
        600.0,
        ge=0,
        description="seconds to wait for a site after its connection broke, and to ask it again, before its reply "
        "counts as lost",
    )
    update_limit: float = Field(
        100.0,
        ge=0,
        description="a reply is refused when it moves the model more than so many times as far as the median of the "
        "others; 0: none is refused",
    )
    examples_limit: float = Field(
        100.0,
        ge=0,
        description="a site is refused when it reports more than so many times the examples of the others' median; "
        "0: every number is accepted",
    )
    timeout: float = Field(3600.0, gt=0, description="seconds to wait for the replies of one phase")
    ray_address: str = Field("", description="existing Ray cluster; empty: a local one is started")
    workers: int = Field(0, ge=0, description="Ray workers; 0: as many as the resources allow, at most one per client")
    cpus_per_worker: float = Field(1.0, gt=0)
    gpus_per_worker: float = Field(0.0, ge=0, description="fraction of a GPU; 0: Ray workers share all GPUs that exist")
    tensorboard: bool = Field(False, description="also write TensorBoard scalars into the run's folder")
    callbacks: list[str] = Field([], description="your own trackers, package.module:Class (see RunCallback)")


def data_root(data: DataSettings) -> Path:
    """Folder in which the data set is looked for."""
    return Path(data.root or os.environ.get("FEDSIM_DATA", "data")).expanduser()


def cache_root(data: DataSettings) -> Path:
    """Folder of the decoded images."""
    return Path(data.cache or os.environ.get("FEDSIM_CACHE", "~/.cache/fedsim")).expanduser()
