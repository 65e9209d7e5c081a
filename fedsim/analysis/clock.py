"""The time that recorded runs would have taken on other machines and links, and their accuracy over that time.

Everything is a function of the records and of a table of profiles:

    seconds of a client in a round = (train_seconds + evaluation_seconds) slowdown
                                     + 8 MB_up / up + 8 MB_down / down + 2 latency
    seconds of a round             = those of its slowest client

MB are 10^6 bytes, up and down are Mbit/s. A round has two exchanges with a client, training and validation, and each
waits once for the latency. The server's own time is left out, and so is what a link loses by its protocol.
"""

import contextlib
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedsim.analysis.comparison import Comparison
from fedsim.analysis.figure_style import Looks, legend_below, panels, styles
from fedsim.analysis.statistics import grid_of, over_seeds, per_seed_average
from fedsim.common.errors import UserError, nearest
from fedsim.common.tables import LABEL, Column, Row, Table, percent
from fedsim.common.tasks import task_of
from fedsim.records.reading import Runs
from fedsim.records.selection import select, validation_column

EXCHANGES = 2  # of a round with a client: training and validation
PARTS = 4  # of the time of the longest run, at whose ends the table has a column
EVERYONE = "*"  # the clients that the table of profiles does not name
NEEDED = ("bytes_up", "bytes_down", "train_seconds")
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Profile(BaseModel):
    """A machine and its link.

    slowdown: by what the recorded seconds of computing are multiplied
    up, down: Mbit/s
    latency: seconds of one exchange that are no transfer
    source: where the numbers are from
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    slowdown: Positive = 1.0
    up: Positive
    down: Positive
    latency: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    source: str = ""

    def seconds(self, computing: float, bytes_up: float, bytes_down: float, exchanges: int = EXCHANGES) -> float:
        """The seconds of a client in a round.

        >>> Profile(up=10, down=100).seconds(10, 8e6, 8e6)
        17.04
        """
        return self.computing(computing) + self.transfer(bytes_up, bytes_down, exchanges)

    def computing(self, seconds: float) -> float:
        """The seconds that this machine computes what took `seconds` where the run was recorded."""
        return seconds * self.slowdown

    def transfer(self, bytes_up: float, bytes_down: float, exchanges: int = EXCHANGES) -> float:
        """The seconds that so many bytes are on the way."""
        return 8e-6 * bytes_up / self.up + 8e-6 * bytes_down / self.down + exchanges * self.latency


# Links by the rates that their standards allow at most. Slowdowns are round assumptions, not measurements.
PROFILES = {
    "hospitals-fibre": Profile(
        up=1000, down=1000, latency=0.01, source="IEEE 802.3ah 1000BASE-BX: 1 Gbit/s each way; slowdown assumed"
    ),
    "clinics-dsl": Profile(
        slowdown=4, up=1.4, down=24, latency=0.04, source="ITU-T G.992.5 (ADSL2+), Annex A; slowdown assumed"
    ),
    "phones-lte": Profile(
        slowdown=10, up=50, down=150, latency=0.05, source="3GPP TS 36.306, LTE category 4; slowdown assumed"
    ),
}


class Profiles(BaseModel):
    """A table of profiles: those of a user beside the named ones, and the profile of each client.

    clients: the profile's name by client (`photo/0`), domain (`photo`), or `*` for all others
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    profiles: dict[str, Profile] = {}
    clients: dict[str, str] = Field(min_length=1)

    def of(self, client: str) -> Profile:
        """The profile of a client; UserError where the table has none for it."""
        domain = client.partition("/")[0]
        for name in (client, domain, EVERYONE):
            if name in self.clients:
                return {**PROFILES, **self.profiles}[self.clients[name]]
        raise UserError(f"the clock has no profile for {client!r}: add it to [clients], or '*' for all others")


def read_profiles(source: str) -> Profiles:
    """The profiles of a TOML file, or one named profile for all clients; UserError for what is neither."""
    if source in PROFILES:
        return Profiles(clients={EVERYONE: source})
    file = Path(source)
    if not file.is_file():
        raise UserError(f"--clock {source}: no such file; {nearest(source, PROFILES)}named ones: {', '.join(PROFILES)}")
    try:
        table = Profiles.model_validate(tomllib.loads(file.read_text(encoding="utf-8-sig")))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise UserError(f"{source}: {key}: {problem['msg']}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{source}: not valid TOML: {error}") from None
    names = [*PROFILES, *table.profiles]
    for client, name in table.clients.items():
        if name not in names:
            raise UserError(f"{source}: clients.{client}: no profile {name!r}; known: {', '.join(names)}")
    return table


@dataclass(frozen=True)
class Clock:
    """What a comparison's runs would have taken: `times` has a row per run and round.

    times: run, round, seconds (of the round), hours (at its end), waiting (the part of the seconds that is transfer)
    anytime: run, label, target, seed, hours, value: the metric of the round that the rule selects so far
    """

    comparison: Comparison
    times: pd.DataFrame
    anytime: pd.DataFrame
    notes: list[str] = field(default_factory=list)

    def table(self) -> Table:
        """A row per method: hours, seconds a round, the part that is transfer, and the metric after some hours."""
        horizon = float(self.anytime["hours"].max())
        moments = [horizon * part / PARTS for part in range(1, PARTS + 1)]
        columns = [LABEL, *map(Column, ["Hours", "s/round", "Transfer %", *map(hours_text, moments)])]
        rows, records = [], []
        labels = self.comparison.labels
        for label in self.comparison.methods["label"]:
            of_label = self.times[self.times["run"].map(labels) == label]
            hours = float(of_label.groupby("run")["hours"].max().mean())
            seconds = float(of_label.loc[of_label["round"] > 0, "seconds"].mean())
            share = float(of_label["waiting"].sum() / of_label["seconds"].sum()) if of_label["seconds"].sum() else 0.0
            values = [self.value_at(label, moment) for moment in moments]
            shown = [self.comparison.measure.number(value) for value in values]
            rows.append(Row([label, f"{hours:.3g}", f"{seconds:.3g}", percent(share), *shown]))
            record: dict[str, Any] = {"label": label, "hours": hours, "seconds_per_round": seconds, "transfer": share}
            records.append(record | {f"after_{moment:.6g}_hours": value for moment, value in zip(moments, values)})
        title = f"{self.comparison.title}: {self.comparison.measure.heading} over hours"
        return Table(columns, rows, title=title, notes=self.notes, records=records)

    def value_at(self, label: str, hours: float) -> float:
        """The average over targets, per seed and then over seeds, of what runs have selected by then.

        NaN as long as a run has finished no round.
        """
        reached = self.anytime[(self.anytime["label"] == label) & (self.anytime["hours"] <= hours * (1 + 1e-9))]
        latest = reached.groupby("run").last()
        runs = self.anytime.loc[self.anytime["label"] == label, "run"].nunique()
        if len(latest) < runs:
            return math.nan
        cells = latest.rename(columns={"value": "accuracy"})
        return float(per_seed_average(grid_of(cells, label), self.comparison.defined).mean())

    def figure(self) -> Figure:
        """The selected metric over hours, a line per method; lines go on to the end of the longest run."""
        comparison = self.comparison
        labels = list(comparison.methods["label"])
        looks: Looks = styles(labels)
        figure, axes = panels(1, ["average over unseen domains"], f"{comparison.title} ({over_seeds(self.seeds)})")
        panel = axes[0][0]
        ends = np.sort(self.anytime["hours"].unique())
        for label in labels:
            values = [comparison.measure.factor * self.value_at(label, moment) for moment in ends]
            style = looks[label]
            panel.step(ends, values, where="post", color=style.color, linestyle=style.line, label=label)
        panel.set_xlabel("hours")
        panel.set_ylabel(comparison.measure.heading)
        legend_below(figure, labels)
        return figure

    @property
    def seeds(self) -> int:
        """The largest number of seeds of one method."""
        return self.comparison.most_seeds


def hours_text(hours: float) -> str:
    """A number of hours as a heading; less than one in minutes."""
    return f"{hours:.3g} h" if hours >= 1 else f"{60 * hours:.3g} min"


def clock(runs: Runs, comparison: Comparison, profiles: Profiles) -> Clock:
    """The clock of a comparison's runs; UserError for records that have no seconds or no row per client."""
    labels = comparison.labels
    _refuse_others(profiles, set(runs.clients.get("client", [])))
    parts, curves = [], []
    for run in comparison.table["run"]:
        times = round_times(run, runs.clients[runs.clients["run"] == run], profiles)
        parts.append(times.assign(run=run))
        experiment = runs.experiments[run]
        rounds = runs.rounds[runs.rounds["run"] == run]
        column = validation_column(experiment, task_of(rounds).metric)
        curve = anytime(rounds, times, comparison.select, column)
        curves.append(curve.assign(run=run, label=labels[run], target=experiment.run.target, seed=experiment.run.seed))
    notes = [
        "A round takes as long as its slowest client: seconds of training and validation times slowdown, and its bytes "
        "over its link. The server's own time is left out.",
        f"Seconds were recorded where the runs were made. Profiles: {described(profiles)}.",
    ]
    return Clock(comparison, pd.concat(parts, ignore_index=True), pd.concat(curves, ignore_index=True), notes)


def described(profiles: Profiles) -> str:
    """The profiles of a table in words."""
    every = {**PROFILES, **profiles.profiles}
    texts = []
    for client, name in profiles.clients.items():
        profile = every[name]
        source = f"; {profile.source}" if profile.source else ""
        numbers = f"{profile.slowdown:g} times the seconds, {profile.up:g} up, {profile.down:g} down, "
        texts.append(f"{client} {name} ({numbers}{profile.latency:g} s{source})")
    return ", ".join(texts)


def _refuse_others(profiles: Profiles, clients: set[str]) -> None:
    """UserError when the table names a client or a domain that no run has."""
    names = clients | {client.partition("/")[0] for client in clients}
    for name in profiles.clients:
        if name != EVERYONE and name not in names:
            raise UserError(f"the clock names {name!r}, and no run has this client; {nearest(name, names)}"
                            f"clients: {', '.join(sorted(names))}")  # fmt: skip


def round_times(run: str, clients: pd.DataFrame, profiles: Profiles) -> pd.DataFrame:
    """round, seconds, waiting and hours of a run's rounds, of the rows of its clients.csv.

    waiting: the seconds in which the slowest client's bytes are on the way
    """
    summed = [name for name in clients["client"] if str(name).endswith("/*")]
    if summed:
        raise UserError(f"{run}: clients.csv has one row per domain, and the slowest client is not in it; repeat the "
                        "run with run.client_rows = 'clients'")  # fmt: skip
    missing = [name for name in NEEDED if name not in clients or clients[name].isna().all()]
    if missing:
        raise UserError(f"{run}: clients.csv has no {', '.join(missing)}, of which a clock is made")
    rows: dict[int, tuple[float, float]] = {}
    for row in clients.fillna(0.0).to_dict("records"):
        profile = profiles.of(str(row["client"]))
        waiting = profile.transfer(row["bytes_up"], row["bytes_down"])
        seconds = profile.computing(row["train_seconds"] + row.get("evaluation_seconds", 0.0)) + waiting
        number = int(row["round"])
        rows[number] = max(rows.get(number, (0.0, 0.0)), (seconds, waiting))
    numbers = sorted(rows)
    times = pd.DataFrame({"round": numbers, "seconds": [rows[number][0] for number in numbers]})
    times["waiting"] = [rows[number][1] for number in numbers]
    times["hours"] = times["seconds"].cumsum() / 3600
    return times


def anytime(rounds: pd.DataFrame, times: pd.DataFrame, rule: str, column: str) -> pd.DataFrame:
    """hours and value: after each round, the target's metric of the round that the rule selects among those so far."""
    metric = f"target_{task_of(rounds).metric}"
    hours = dict(zip(times["round"], times["hours"]))
    trained = rounds[rounds["round"] >= 1].sort_values("round", kind="stable")
    rows = []
    for number in range(1, len(trained) + 1):
        so_far = trained.iloc[:number]
        value = math.nan
        with contextlib.suppress(UserError):  # no round so far can be selected
            value = float(select(so_far, rule, column)[metric])
        rows.append({"hours": hours[int(so_far["round"].iloc[-1])], "value": value})
    return pd.DataFrame(rows)
