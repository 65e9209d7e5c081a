"""What sites say of their data before a run (`fedsim deploy check --statistics`), without telling of few rows.

A site sends the number of rows of each class. Of each column or channel it sends mean and standard deviation, with
three digits, and how many values are missing. A number between 1 and `least` - 1 stays at the site, and so do the
numbers of a column of which so few values are present. Mean and deviation of a column with two or three values say how
often each of them occurs. They stay at the site where one of them has so few rows, and so do those of all categories of
a variable of which one is so rare. The site of the unseen domain sends
the rows of each class alone, because nothing else of it may be looked at before the run.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fedsim.common.errors import printable
from fedsim.common.tables import MISSING
from fedsim.data import benchmark, domain_of, resolve_domain
from fedsim.data.reader import read_images, reader
from fedsim.settings import DataSettings, Settings

FEWEST = 5  # rows: what a site hides at least, where its own site.env says nothing else
OWN = "statistics-least"  # key of a site's own number in its node config
HIDDEN = -1  # in place of a number that is too small to be told
DIGITS = 3
TELLING = (2, 3)  # numbers of different values, of which mean and deviation tell how often each occurs
LONGEST_NAME = 100  # characters


class ColumnNumbers(Settings):
    """What a site says of a column or a channel; None for what it hides, and where there is no value.

    missing: rows without a value
    """

    model_config = ConfigDict(frozen=True, strict=True)

    name: Annotated[str, AfterValidator(lambda text: printable(text)[:LONGEST_NAME])]
    missing: Annotated[int, Field(ge=HIDDEN)]
    mean: Annotated[float, Field(allow_inf_nan=False)] | None = None
    deviation: Annotated[float, Field(allow_inf_nan=False, ge=0)] | None = None


def hidden(count: int, least: int) -> int:
    """A number of rows as a site tells it: HIDDEN for one between 1 and least - 1."""
    return HIDDEN if 0 < count < least else int(count)


def numbers_of(name: str, values: np.ndarray, least: int) -> ColumnNumbers:
    """What a site tells of a column's values [N], of which NaN are missing.

    >>> numbers_of("age", np.array([40.0, 50, 60, 70, np.nan]), 4)
    ColumnNumbers(name='age', missing=-1, mean=55.0, deviation=11.2)
    """
    present = values[np.isfinite(values)]
    missing = hidden(len(values) - len(present), least)
    distinct, counts = np.unique(present, return_counts=True)
    fewest = counts.min() if len(distinct) in TELLING else len(present)
    if fewest < max(least, 1):
        return ColumnNumbers(name=name, missing=missing)
    mean, deviation = float(present.mean()), float(present.std())
    return ColumnNumbers(name=name, missing=missing, mean=rounded(mean), deviation=rounded(deviation))


def rounded(value: float) -> float:
    """A number with three digits."""
    return float(f"{value:.{DIGITS}g}")


def statistics_of(data: DataSettings, client: str, least: int) -> list[ColumnNumbers]:
    """What the site of a client tells of the columns of its tables, or of the channels of its images, as in [0, 1]."""
    bench = benchmark(data)
    images, _ = read_images(reader(data, bench), resolve_domain(bench, domain_of(client)))
    values = images.reshape(len(images), images.shape[1], -1)
    names = bench.features or [f"channel {number}" for number in range(values.shape[1])]
    if bench.images:
        return [of_channel(name, values[:, place], least) for place, name in enumerate(names)]
    columns = [numbers_of(name, values[:, place].ravel(), least) for place, name in enumerate(names)]
    return columns[: bench.numeric] + without_rests(columns[bench.numeric :])


def without_rests(categories: Sequence[ColumnNumbers]) -> list[ColumnNumbers]:
    """The columns of categories (`sex=Male`), of which all are hidden where one is: the others would tell the rest."""
    variables = [column.name.partition("=")[0] for column in categories]
    secret = {variable for variable, column in zip(variables, categories, strict=True) if column.mean is None}
    columns = []
    for variable, column in zip(variables, categories, strict=True):
        is_secret = variable in secret
        columns.append(column.model_copy(update={"mean": None, "deviation": None}) if is_secret else column)
    return columns


def of_channel(name: str, values: np.ndarray, least: int) -> ColumnNumbers:
    """What a site tells of a channel's uint8 pixels [N, pixels], where it has enough images."""
    if len(values) < max(least, 1):
        return ColumnNumbers(name=name, missing=0)
    counts = np.zeros(256)
    for image in values:  # which may be a memory map of many images
        counts += np.bincount(image, minlength=256)
    levels = np.arange(256) / 255
    mean = float(np.average(levels, weights=counts))
    deviation = math.sqrt(float(np.average((levels - mean) ** 2, weights=counts)))
    return ColumnNumbers(name=name, missing=0, mean=rounded(mean), deviation=rounded(deviation))


def least_of(node: Mapping[str, object], asked: int) -> int:
    """The least number of rows that a site tells: the one that is asked for, or its own where that is greater."""
    own = node.get(OWN, FEWEST)
    return max(asked, own if isinstance(own, int) else FEWEST)


def count_text(count: int, least: int) -> str:
    """A number of rows in a table: `< 5` for one that is hidden."""
    return f"< {least}" if count == HIDDEN else f"{count:,}"


def statistics_table(
    classes: Sequence[str],
    counts: Mapping[str, Sequence[int]],
    columns: Mapping[str, Sequence[ColumnNumbers]],
    least: Mapping[str, int],
) -> Table:
    """A column for each site: the rows of each class, then `mean ± deviation (missing)` of each column of the data.

    counts, columns, least: by site. A site that sent no columns has a dash.
    """
    shown = Table(title="rows of each class; mean ± deviation (missing values)", box=SIMPLE_HEAD)
    shown.add_column("", overflow="fold")
    for site in counts:
        shown.add_column(escape(site), justify="right")
    for place, name in enumerate(classes):
        texts = []
        for site, of_site in counts.items():
            texts.append(count_text(of_site[place], least[site]) if place < len(of_site) else MISSING)
        shown.add_row(escape(name), *texts)
    shown.add_section()
    by_name: dict[str, dict[str, ColumnNumbers]] = {}
    for site, answer in columns.items():
        for column in answer:
            by_name.setdefault(column.name, {})[site] = column
    for name, by_site in by_name.items():
        texts = [column_text(by_site.get(site), least[site]) for site in counts]
        shown.add_row(escape(name), *texts)
    return shown


def column_text(column: ColumnNumbers | None, least: int) -> str:
    """`54.1 ± 9.3 (12)`; a dash for numbers that a site hides or has not."""
    if column is None:
        return MISSING
    is_hidden = column.mean is None or column.deviation is None
    text = MISSING if is_hidden else f"{column.mean:g} ± {column.deviation:g}"
    return f"{text} ({count_text(column.missing, least)})" if column.missing else text
