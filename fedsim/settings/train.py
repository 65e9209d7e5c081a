"""Settings of the rounds and of local training."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from fedsim.settings.effect import Above, Only, Trait
from fedsim.settings.sections import Settings
from fedsim.settings.tuned import Tuned

Chances = Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1)]


def as_lists(availability: object) -> object:
    """The same probabilities, each number as a list of one, so that both are one setting."""
    if not isinstance(availability, dict):
        return availability
    lists = {}
    for client, chances in availability.items():
        lists[client] = chances if isinstance(chances, list) else [chances]
    return lists


class TrainSettings(Settings):
    """[train]: rounds, local work and its optimizer."""

    rounds: int = Field(10, ge=1, description="rounds of training; row 0 of rounds.csv is the initial model's")
    epochs: Annotated[int, Only(Trait.PASSES, iterations=0), Only(iterations=0, budget=("images", "steps"))] = Field(
        1, ge=1, description="local passes over the data per round, unless iterations is set"
    )
    iterations: Annotated[int, Only(Trait.PASSES), Only(budget=("images", "steps"))] = Field(
        0, ge=0, description="local steps per round; 0: epochs says how many"
    )
    batch_size: Annotated[int, Tuned("8,16,32,64", "DomainBed, powers of two")] = Field(64, ge=2)
    budget: Literal["paper", "images", "steps"] = Field(
        "paper",
        description="how much a client trains: paper: as much as the method's parts ask for; images or steps: on as "
        "many images, or for as many steps, as with FedAvg, including preludes and copies (clients/budget.py)",
    )
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Annotated[
        float,
        Tuned("log:0.001:0.1", "Reddi et al., ICLR 2021, up to 0.1", optimizer="sgd"),
        Tuned("log:1e-5:3e-3", "DomainBed, both of its ranges", optimizer=("adam", "adamw")),
    ] = Field(0.01, gt=0)
    momentum: Annotated[float, Only(optimizer="sgd")] = Field(0.0, ge=0, lt=1)
    weight_decay: Annotated[float, Tuned("log:1e-6:0.01", "DomainBed")] = Field(0.0, ge=0)
    schedule: Literal["constant", "cosine", "cosine-official", "step"] = Field(
        "constant",
        description="learning rate over rounds: cosine at (t-1)/T; cosine-official at t/T (gPerXAN's code); "
        "step: multiplied by 0.1 after 80 % of the rounds",
    )
    lr_min: Annotated[float, Only(schedule=("cosine", "cosine-official"), refused=True)] = Field(
        0.0, ge=0, description="learning rate at which a cosine ends"
    )
    warmup_rounds: int = Field(
        0, ge=0, description="rounds in which the learning rate grows in equal steps up to lr; the schedule follows"
    )
    clip_norm: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="largest L2 norm of the gradient in a step of the model that is sent, over all its trained "
        "tensors; what a part trains besides it is not limited; 0: no limit",
    )
    class_weights: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        [],
        description="how much an image of each class counts in the training loss, in the order of the classes; empty: "
        "alike",
    )
    focal: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="gamma of the focal loss, which counts images less that the model is sure of; 0: cross-entropy",
    )
    huber: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="delta of a regression's Huber loss, in standard deviations of the targets: larger errors count in "
        "proportion to their size; 0: the squared error",
    )
    persist_optimizer: Annotated[bool, Only(momentum=Above(0)), Only(optimizer=("adam", "adamw"))] = Field(
        False, description="keep momentum and Adam moments between rounds"
    )
    clients_per_round: Annotated[int, Only(Trait.FEDERATED)] = Field(
        0, ge=0, description="clients drawn each round; 0: all"
    )
    availability: Annotated[dict[str, Chances], BeforeValidator(as_lists), Only(Trait.FEDERATED)] = Field(
        {},
        description="how probable it is that a client is there in a round, by client, domain or *: one number, or one "
        "for each round, which begin again after the last (a day's curve; 0 and 1 are a trace)",
    )
    lost_replies: Annotated[float, Only(Trait.FEDERATED)] = Field(
        0.0,
        ge=0,
        lt=1,
        description="how probable it is that a client that trains is gone before its reply arrives",
    )
    evaluate_clients: Annotated[str, Only(Trait.FEDERATED)] = Field(
        "all",
        pattern="^(all|drawn|[1-9][0-9]*)$",
        description="clients that validate the model of a round, which selects the best round: all, drawn (those that "
        "trained in the round), or a number of clients that stay the same",
    )
    stop_after: int = Field(
        0,
        ge=0,
        description="the run ends when this many rounds have brought no better source validation than the best one "
        "(the one that run.select_on and run.select_by say), at a round that is validated; train.rounds stays the most "
        "that are played; 0: all rounds are played",
    )
    evaluate_every: int = Field(1, ge=1, description="rounds from a validation to the next; the last is validated too")
    precision: Literal["fp32", "bf16"] = "fp32"
    side_by_side: int = Field(
        1,
        ge=1,
        description="number of clients that train together as one program, if the method allows it (inline runtime); "
        "meant for small networks on a GPU, slower on a CPU; 1: clients train one after the other",
    )
    compile: Annotated[Literal["off", "default", "reduce-overhead", "max-autotune"], Only(Trait.PLAIN_PASS)] = Field(
        "off",
        description="compile the network's training pass by torch.compile in this mode; one graph serves all clients "
        "and rounds of a process; on a GPU reduce-overhead uses CUDA graphs",
    )
    dp_clip: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="local differential privacy: largest L2 norm of a client's update; 0: off",
    )
    dp_epsilon: Annotated[float, Only(dp_clip=Above(0), refused=True)] = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="epsilon of local differential privacy in each round; no guarantee above 1",
    )
    dp_delta: Annotated[float, Only(dp_clip=Above(0), refused=True)] = Field(
        1e-5, gt=0, lt=1, description="delta of local differential privacy in each round"
    )
    dp_max_epsilon: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="privacy budget of a run with train.dp_clip or private_mean: it ends before the round after which "
        "epsilon of all its rounds would be larger; train.rounds stays the most that are played; 0: no budget",
    )
    local_checks: int = Field(
        0, ge=0, description="validations during local training, of which the best model is sent; 0: off"
    )

    @model_validator(mode="after")
    def _rates_fit(self) -> Self:
        if self.lr_min > self.lr:
            raise ValueError(f"lr_min is {self.lr_min:g}, and lr is {self.lr:g}; a cosine falls from lr to lr_min")
        if self.warmup_rounds >= self.rounds:
            raise ValueError(f"warmup_rounds is {self.warmup_rounds}, and rounds is {self.rounds}; a round must follow")
        return self

    @field_validator("rounds", mode="before")
    @classmethod
    def _at_least_one_round(cls, rounds: object) -> object:
        if rounds == 0:
            raise ValueError("at least 1, because a run trains; row 0 of every rounds.csv evaluates the initial model")
        return rounds
