"""The time that recorded runs would have taken on other machines and links, and their accuracy over that time.

Everything is a function of the records and of a table of profiles:

    seconds of a client in a round = (train_seconds + evaluation_seconds) slowdown
                                     + 8 MB_up / up + 8 MB_down / down + 2 latency
    seconds of a round             = those of its slowest client

MB are 10^6 bytes, up and down are Mbit/s. A round has two exchanges with a client, training and validation, and each
waits once for the latency. The server's own time is left out, and so is what a link loses by its protocol. Pooled
training, which sends nothing, has its seconds of computing alone.
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

from fedsim.analysis.comparison import POOLED, Comparison
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
        transfer = self.transfer(bytes_up, bytes_down, exchanges)
        return self.computing(computing) + transfer

    def computing(self, seconds: float) -> float:
        """The seconds that this machine computes what took `seconds` where the run was recorded."""
        return seconds * self.slowdown

    def transfer(self, bytes_up: float, bytes_down: float, exchanges: int = EXCHANGES) -> float:
        """The seconds that so many bytes are on the way."""
        megabits_up = 8e-6 * bytes_up
        megabits_down = 8e-6 * bytes_down
        waits = exchanges * self.latency
        return megabits_up / self.up + megabits_down / self.down + waits


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
    """A table of profiles: those of a user next to the named ones, and the profile of each client.

    clients: the profile's name by client (`photo/0`), domain (`photo`), or `*` for all others
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    profiles: dict[str, Profile] = {}
    clients: dict[str, str] = Field(min_length=1)

    def of(self, client: str) -> Profile:
        """The profile of a client; UserError where the table has none for it."""
        domain = client.partition("/")[0]
        every = {**PROFILES, **self.profiles}
        for name in (client, domain, EVERYONE):
            if name in self.clients:
                chosen = self.clients[name]
                return every[chosen]
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
        moments = []
        for part in range(1, PARTS + 1):
            moments.append(horizon * part / PARTS)
        heads = ["Hours", "s/round", "Transfer %", *map(hours_text, moments)]
        measure = self.comparison.measure
        rows = []
        records = []
        for label in self.comparison.methods["label"]:
            record = self.record(label, moments)
            records.append(record)
            hours, seconds, share, *values = list(record.values())[1:]
            shown = list(map(measure.number, values))
            numbers = [f"{hours:.3g}", f"{seconds:.3g}", percent(share)]
            rows.append(Row([label, *numbers, *shown]))
        title = f"{self.comparison.title}: {measure.heading} over hours"
        columns = [LABEL, *map(Column, heads)]
        return Table(columns, rows, title=title, notes=self.notes, records=records)

    def record(self, label: str, moments: list[float]) -> dict[str, Any]:
        """The numbers of a method's row: label, hours, seconds_per_round, transfer, and the metric at these hours."""
        labels = self.times["run"].map(self.comparison.labels)
        times = self.times[labels == label]
        ends = times.groupby("run")["hours"].max()
        trained = times[times["round"] > 0]
        record: dict[str, Any] = {"label": label}
        record["hours"] = float(ends.mean())
        record["seconds_per_round"] = float(trained["seconds"].mean())
        seconds = times["seconds"].sum()
        record["transfer"] = float(times["waiting"].sum() / seconds) if seconds else 0.0
        for moment in moments:
            record[f"after_{moment:.6g}_hours"] = self.value_at(label, moment)
        return record

    def value_at(self, label: str, hours: float) -> float:
        """The average over targets, per seed and then over seeds, of what runs have selected by then.

        NaN as long as a run has finished no round.
        """
        curves = self.anytime[self.anytime["label"] == label]
        latest_hours = hours * (1 + 1e-9)
        reached = curves[curves["hours"] <= latest_hours]
        latest = reached.groupby("run").tail(1)  # a round without a value has none, and not that of the round before
        if len(latest) < curves["run"].nunique():
            return math.nan
        cells = latest.rename(columns={"value": "accuracy"})
        grid = grid_of(cells, label)
        averages = per_seed_average(grid, self.comparison.defined)
        return float(averages.mean())

    def figure(self) -> Figure:
        """The selected metric over hours, a line per method; lines go on to the end of the longest run."""
        comparison = self.comparison
        measure = comparison.measure
        labels = list(comparison.methods["label"])
        looks: Looks = styles(labels)
        title = f"{comparison.title} ({over_seeds(comparison.most_seeds)})"
        figure, axes = panels(1, ["average over unseen domains"], title)
        panel = axes[0][0]
        ends = np.sort(self.anytime["hours"].unique())
        for label in labels:
            values = []
            for moment in ends:
                value = self.value_at(label, moment)
                values.append(measure.factor * value)
            style = looks[label]
            panel.step(
                ends,
                values,
                where="post",
                color=style.color,
                linestyle=style.line,
                label=label,
            )
        panel.set_xlabel("hours")
        panel.set_ylabel(measure.heading)
        legend_below(figure, labels)
        return figure


def hours_text(hours: float) -> str:
    """A number of hours as a heading; less than one in minutes."""
    return f"{hours:.3g} h" if hours >= 1 else f"{60 * hours:.3g} min"


def clock(runs: Runs, comparison: Comparison, profiles: Profiles) -> Clock:
    """The clock of a comparison's runs; UserError for records that have no seconds or no row per client."""
    labels = comparison.labels
    _refuse_others(profiles, set(runs.clients.get("client", [])))
    parts = []
    curves = []
    for run, is_pooled in zip(comparison.table["run"], comparison.table[POOLED]):
        experiment = runs.experiments[run]
        clients = runs.clients[runs.clients["run"] == run]
        rounds = runs.rounds[runs.rounds["run"] == run]
        times = round_times(run, clients, profiles, is_pooled)
        parts.append(times.assign(run=run))
        column = validation_column(experiment, task_of(rounds).metric)
        curve = anytime(rounds, times, comparison.select, column)
        curve = curve.assign(run=run, label=labels[run])
        settings = experiment.run
        curves.append(curve.assign(target=settings.target, seed=settings.seed))
    notes = [
        "A round takes as long as its slowest client: seconds of training and validation times slowdown, and its bytes "
        "over its link. The server's own time is left out.",
        f"Seconds were recorded where the runs were made. Profiles: {described(profiles)}.",
        *comparison.notes,
    ]
    times = pd.concat(parts, ignore_index=True)
    every_curve = pd.concat(curves, ignore_index=True)
    return Clock(comparison, times, every_curve, notes)


def described(profiles: Profiles) -> str:
    """The profiles of a table in words."""
    every = {**PROFILES, **profiles.profiles}
    texts = []
    for client, name in profiles.clients.items():
        profile = every[name]
        numbers = [
            f"{profile.slowdown:g} times the seconds",
            f"{profile.up:g} up",
            f"{profile.down:g} down",
            f"{profile.latency:g} s",
        ]
        if profile.source:
            numbers.append(profile.source)
        listed = ", ".join(numbers)
        texts.append(f"{client} {name} ({listed})")
    return "; ".join(texts)


def _refuse_others(profiles: Profiles, clients: set[str]) -> None:
    """UserError when the table names a client or a domain that no run has."""
    names = set(clients)
    for client in clients:
        domain = client.partition("/")[0]
        names.add(domain)
    for name in profiles.clients:
        if name != EVERYONE and name not in names:
            near = nearest(name, names)
            listed = ", ".join(sorted(names))
            raise UserError(f"the clock names {name!r}, and no run has this client; {near}clients: {listed}")


def round_times(run: str, clients: pd.DataFrame, profiles: Profiles, is_pooled: bool = False) -> pd.DataFrame:
    """round, seconds, waiting and hours of a run's rounds, of the rows of its clients.csv.

    waiting: the seconds in which the slowest client's bytes are on the way
    is_pooled: whether all data are in one place, so that nothing is on the way
    """
    _refuse_unfit(run, clients)
    seconds: dict[int, float] = {}
    waiting: dict[int, float] = {}
    for row in clients.fillna(0.0).to_dict("records"):
        number = int(row["round"])
        client = str(row["client"])
        profile = profiles.of(client)
        transfer = 0.0 if is_pooled else profile.transfer(row["bytes_up"], row["bytes_down"])
        recorded = row["train_seconds"] + row.get("evaluation_seconds", 0.0)
        total = profile.computing(recorded) + transfer
        if total >= seconds.get(number, 0.0):
            seconds[number] = total
            waiting[number] = transfer
    times = pd.DataFrame({"seconds": seconds, "waiting": waiting})
    times = times.sort_index().rename_axis("round").reset_index()
    times["hours"] = times["seconds"].cumsum() / 3600
    return times


def _refuse_unfit(run: str, clients: pd.DataFrame) -> None:
    """UserError for rows of which no clock can be made."""
    for name in clients["client"].astype(str):
        if name.endswith("/*"):
            raise UserError(
                f"{run}: clients.csv has one row per domain, and the slowest client is not in it; repeat the run with "
                "run.client_rows = 'clients'"
            )
    for column in NEEDED:
        if column not in clients or clients[column].isna().all():
            raise UserError(f"{run}: clients.csv has no {column}, of which a clock is made")


def anytime(rounds: pd.DataFrame, times: pd.DataFrame, rule: str, column: str) -> pd.DataFrame:
    """hours and value: after each round, the target's metric of the round that the rule selects among those so far."""
    metric = f"target_{task_of(rounds).metric}"
    hours = dict(zip(times["round"], times["hours"]))
    trained = rounds[rounds["round"] >= 1].sort_values("round", kind="stable")
    rows = []
    for place, number in enumerate(trained["round"]):
        so_far = trained[: place + 1]
        value = math.nan
        with contextlib.suppress(UserError):  # no round so far can be selected
            chosen = select(so_far, rule, column)
            value = float(chosen[metric])
        rows.append({"hours": hours[number], "value": value})
    return pd.DataFrame(rows)
