"""The table of bytes per round that `fedsim methods NAME --data CONFIG` prints."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Column, Table

from fedsim.common.console import console, say
from fedsim.common.errors import UserError
from fedsim.run.plan import resolve
from fedsim.run.traffic import traffic
from fedsim.settings.experiment import from_table, read_experiment


def show_traffic(name: str, config: str, preset: str = "", overrides: Sequence[str] = ()) -> None:
    """Print the bytes that one client receives and sends in a round of an experiment, with a method and with FedAvg."""
    fixed = [f"method.name={name}", "model.weights=none", "run.device=cpu"]  # sizes do not depend on initial weights
    experiment = read_experiment(config, [*overrides, *fixed], preset)
    table = Table("record", "when", Column("down", justify="right"), Column("up", justify="right"),
                  title=escape(f"bytes of one client on {experiment.name}, {experiment.model.backbone}"))  # fmt: skip
    rows = traffic(resolve(experiment))
    for row in rows:
        amounts = ["depends on the data" if amount is None else f"{amount:,}" for amount in (row.down, row.up)]
        table.add_row(escape(row.record), row.when, *amounts)
    refused = ""
    try:
        fedavg = traffic(resolve(from_table({**experiment.model_dump(), "method": {"name": "fedavg"}})))
        plain = [f"{sum(getattr(row, way) or 0 for row in fedavg):,}" for way in ("down", "up")]  # all are known
    except UserError as error:  # FedAvg cannot run with these settings, as with texts alone, of which it learns none
        plain, refused = ["-", "-"], str(error)
    table.add_row("FedAvg's model", "round", *plain, style="dim")
    console.print(table)
    if refused:
        say(f"FedAvg has no bytes to compare with, because it is refused with these settings: {refused}")
    say("sums of a round are bytes_down and bytes_up in clients.csv, single banks bytes_down_NAME and bytes_up_NAME")
