"""ClientApps as Flower users write them, of numbers that can be worked out by hand."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedsim.runtime.local_grid import InlineGrid

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
Metrics = Callable[[int, int], Mapping[str, float]]


def use_example(name: str) -> None:
    """Makes the package of an example importable."""
    if str(EXAMPLES / name) not in sys.path:
        sys.path.insert(0, str(EXAMPLES / name))


def shift_app(
    metrics: Metrics = lambda number, round: {},
    names: Callable[[int], str] = lambda number: f"site-{number}",
    evaluates: bool = True,
    evaluation: Callable[[int], Mapping[str, float]] = lambda number: {},
) -> ClientApp:
    """Client k adds 2^k to every float tensor, has 10 (k + 1) examples, and an accuracy of k / 10."""
    app = ClientApp()

    def config(number: int) -> ConfigRecord:
        return ConfigRecord({"domain": names(number)} if names(number) else {})

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number, round = context.node_config["partition-id"], message.content["config"]["server-round"]
        assert set(message.content) == {"arrays", "config"}
        state = message.content["arrays"].to_torch_state_dict()
        moved = {name: value + 2.0**number if value.is_floating_point() else value for name, value in state.items()}
        numbers = {"num-examples": 10 * (number + 1), **metrics(number, round)}
        records = {"arrays": ArrayRecord(moved), "metrics": MetricRecord(numbers), "config": config(number)}
        return Message(RecordDict(records), reply_to=message)

    if evaluates:

        @app.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            number = context.node_config["partition-id"]
            numbers = {"num-examples": 5, "eval_acc": number / 10, "eval_loss": 1.0, **evaluation(number)}
            return Message(RecordDict({"metrics": MetricRecord(numbers), "config": config(number)}), reply_to=message)

    return app


def zeros() -> nn.Module:
    """A linear module whose tensors are 0."""
    net = nn.Linear(2, 3)
    for parameter in net.parameters():
        torch.nn.init.zeros_(parameter)
    return net


def grid_of(app: ClientApp, nodes: int = 3) -> InlineGrid:
    return InlineGrid(app, nodes)


def weight_of(arrays: ArrayRecord) -> float:
    """The first number of the module's weight."""
    return float(arrays["weight"].numpy()[0, 0])
