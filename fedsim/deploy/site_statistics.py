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

from fedsim.common.errors import UserError, printable
from fedsim.common.tables import MISSING
from fedsim.data import benchmark, domain_of, resolve_domain
from fedsim.data.reader import read_images, reader
from fedsim.runs.local_privacy import LEAST, is_finite
from fedsim.settings import DataSettings, Settings

FEWEST = 5  # rows: what a site hides at least, whatever its own site.env says
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
    """Returns a number of rows as a site tells it: HIDDEN for one between 1 and least - 1."""
    return HIDDEN if 0 < count < least else int(count)


def numbers_of(name: str, values: np.ndarray, least: int) -> ColumnNumbers:
    """Returns what a site tells of a column's values [N], of which NaN are missing.

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
    """Returns a number with three digits."""
    return float(f"{value:.{DIGITS}g}")


def statistics_of(data: DataSettings, client: str, least: int) -> list[ColumnNumbers]:
    """Returns what a client's site tells of the columns of its tables, or of the channels of its images in [0, 1]."""
    bench = benchmark(data)
    images, _ = read_images(reader(data, bench), resolve_domain(bench, domain_of(client)))
    values = images.reshape(len(images), images.shape[1], -1)
    names = bench.features or [f"channel {number}" for number in range(values.shape[1])]
    if bench.images:
        return [of_channel(name, values[:, place], least) for place, name in enumerate(names)]
    columns = [numbers_of(name, values[:, place].ravel(), least) for place, name in enumerate(names)]
    return columns[: bench.numeric] + without_rests(columns[bench.numeric :])


def without_rests(categories: Sequence[ColumnNumbers]) -> list[ColumnNumbers]:
    """Returns the columns of categories (`sex=Male`), of which all are hidden where one is.

    The others would tell the rest.
    """
    secret = {variable_of(column) for column in categories if column.mean is None}
    columns = []
    for column in categories:
        if variable_of(column) in secret:
            column = column.model_copy(update={"mean": None, "deviation": None})
        columns.append(column)
    return columns


def variable_of(column: ColumnNumbers) -> str:
    """Returns the variable of a category's column: `sex` for `sex=Male`."""
    return column.name.partition("=")[0]


def of_channel(name: str, values: np.ndarray, least: int) -> ColumnNumbers:
    """Returns what a site tells of a channel's uint8 pixels [N, pixels], where it has enough images."""
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
    """Returns the least number of rows that a site tells: the greatest of what is asked for, its own and FEWEST.

    A number of the site's own with a fraction (`20.5`) is rounded up. Raises UserError where it is no number.
    """
    of_site = node.get(LEAST, FEWEST)
    if not is_finite(of_site):
        raise UserError(f"this site's {LEAST} must be a finite number, not {of_site!r}: NODE_CONFIG=\"{LEAST}=20\" in "
                        "site.env")  # fmt: skip
    return max(asked, FEWEST, math.ceil(of_site))


def count_text(count: int, least: int) -> str:
    """Returns a number of rows as a table shows it: `< 5` for one that is hidden."""
    return f"< {least}" if count == HIDDEN else f"{count:,}"


def statistics_table(
    classes: Sequence[str],
    counts: Mapping[str, Sequence[int]],
    columns: Mapping[str, Sequence[ColumnNumbers]],
    least: Mapping[str, int],
) -> Table:
    """Returns a column for each site: the rows of each class, then `mean ± deviation (missing)` of the data's columns.

    counts, columns, least: by site. A site that sent no columns has a dash.
    """
    shown = Table(title="rows of each class; mean ± deviation (missing values)", box=SIMPLE_HEAD)
    shown.add_column("", overflow="fold")
    for site in counts:
        shown.add_column(escape(site), justify="right")
    for place, name in enumerate(classes):
        texts = []
        for site, of_site in counts.items():
            has_class = place < len(of_site)
            texts.append(count_text(of_site[place], least[site]) if has_class else MISSING)
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
    """Returns `54.1 ± 9.3 (12)` for a column; a dash for numbers that a site hides or has not."""
    if column is None:
        return MISSING
    text = MISSING
    if column.mean is not None and column.deviation is not None:
        text = f"{column.mean:g} ± {column.deviation:g}"
    if column.missing:
        text += f" ({count_text(column.missing, least)})"
    return text
