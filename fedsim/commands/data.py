"""The commands about data: they show the known data sets, and inspect a user's own."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from fedsim.common.console import console, say
from fedsim.common.errors import UserError
from fedsim.data.names import read_from
from fedsim.data.row import Benchmark
from fedsim.settings import DataSettings

if TYPE_CHECKING:
    import pandas as pd

FOLDERS = "ROOT/DOMAIN/CLASS/IMAGE. Each folder in ROOT is a domain; the classes are the folders in it"
OWN_DATA = """\
{name}: {layout}.
Write an experiment file, e.g. mine.toml, and run it with `fedsim run mine.toml --target DOMAIN`:

[data]
dataset = "{name}"
root = "ROOT"
image_size = 224       # without a GPU: 64
augment = "{augment}"
normalize = "imagenet"
{structures}
[model]
backbone = "{backbone}"
weights = "imagenet"   # without a GPU, also: train = "head"

[train]
rounds = 40
batch_size = 64
lr = 0.01
"""


OWN_TENSORS = """\
{name}: {layout}.
`fedsim datasets FILE` describes such a file and prints an experiment file for it, as this one:

[data]
dataset = "{name}"
root = "FILE"

[data.columns]         # of a table, or names of the arrays of an .npz file
label = "LABEL"
domain = "DOMAIN"
features = ["COLUMN"]  # all other columns, where it is left out

[model]
backbone = "mlp"       # linear, mlp, or cnn-1d for signals

[train]
rounds = 20
batch_size = 16
lr = 0.05
"""


def own_data(name: str, bench: Benchmark) -> str:
    """How the files of a user's own data must be, and an experiment file for them."""
    if not bench.images:
        return OWN_TENSORS.format(name=name, layout=bench.note)
    masks = bench.task == "segmentation"
    return OWN_DATA.format(
        name=name,
        layout=FOLDERS if name == "folder" else bench.note,
        augment="none" if masks else "domainbed",
        structures="structures = {NAME = [255]}   # pixel values of the mask files\n" if masks else "",
        backbone="unet-resnet18" if masks else "resnet18",
    )


def show_inspection(path: Path, grid: Path | None, overrides: Sequence[str] = ()) -> None:
    """Print counts, sizes and modes of the images of a folder or table, and the problems found in it."""
    from fedsim.data.inspect import draw_grid, given_in, inspect
    from fedsim.data.inspect_tables import is_table_of_numbers

    if not path.exists():
        raise UserError(f"--grid and --set are for a folder or table, and there is none at {str(path)!r}")
    if path.suffix.lower() == ".npz" or is_table_of_numbers(path, given_in(overrides)):
        if grid is not None:
            raise UserError(f"--grid draws pictures, and {path} is a table of numbers; leave it out")
        show_table(path, given_in(overrides))
        return
    inspection = inspect(path, overrides)
    for title, frame in (("images", inspection.counts.reset_index()), ("files", inspection.domains)):
        show_frame(frame, f"{path}: {title}")
    say("\n".join(inspection.problems) if inspection.problems else "no problem was found")
    if grid is not None:
        say(f"pictures: {draw_grid(inspection, grid)}")


def show_table(path: Path, data: DataSettings) -> None:
    """Print what a table of numbers holds, its problems, and an experiment file for it."""
    from fedsim.data.inspect_tables import inspect_npz, inspect_table

    inspection = inspect_npz(path, data) if path.suffix.lower() == ".npz" else inspect_table(path, data)
    show_frame(inspection.counts.reset_index(), f"{path}: rows")
    empty = [name for name in inspection.columns if name.startswith("empty in ")]
    show_frame(inspection.columns.drop(columns=empty), f"{path}: columns")
    if empty:
        cells = inspection.columns[["column", *empty]].rename(columns=lambda name: name.removeprefix("empty in "))
        show_frame(cells, f"{path}: empty cells")
    say("\n".join(inspection.problems) if inspection.problems else "no problem was found")
    say("An experiment file for it, e.g. mine.toml, which `fedsim run mine.toml --target DOMAIN` runs:\n")
    print(inspection.experiment)


def show_frame(frame: "pd.DataFrame", title: str) -> None:
    """Print a table of a frame's rows."""
    table = Table(title=escape(title))
    for name in frame.columns:
        table.add_column(escape(str(name)), overflow="fold")  # no name is cut, because it may have to be copied
    for row in frame.itertuples(index=False):
        table.add_row(*(escape(str(value)) for value in row))
    console.print(table)


def show_datasets(name: str) -> None:
    """Print the known data sets, or one of them with its domains, classes and counts."""
    from fedsim.data import find_dataset
    from fedsim.settings.experiment import config_folders, known_tables

    try:
        bench = find_dataset(name) if name else None
    except UserError as error:
        missing = "" if ":" in name else f"no folder or table {name!r}{read_from(Path(name))}; "
        raise UserError(f"{missing}{error}") from None
    if bench and not bench.domains:
        print(own_data(name, bench))
        return
    if bench:
        table = Table("domain", bench.unit, title=escape(f"{bench.title}: {len(bench.classes)} classes"))
        for domain in bench.domains:
            table.add_row(escape(domain), str(bench.counts[domain]) if bench.counts else "not checked")
        console.print(table)
        classes = "read from the data" if bench.discover else ", ".join(bench.classes)
        say(f"classes: {classes}\nsource: {bench.source}\n{bench.note}")
        return
    table = Table("data set", "domains", "classes", "examples", title="fedsim datasets")
    for cells in _listed():
        table.add_row(*map(escape, cells))
    console.print(table)
    configs = sorted({file.stem for folder in config_folders() for file in folder.glob("*.toml")})
    say(f"shipped experiments: {', '.join(configs)}")
    say(f"tables of papers, for `fedsim sweep tables/NAME`: {', '.join(known_tables())}")


def _listed() -> Iterator[tuple[str, str, str, str]]:
    """Name, domains, classes and examples of every data set; of a package also its origin, or why it does not work."""
    from fedsim.data import BENCHMARKS, find_dataset
    from fedsim.settings.plugins import entry_points, origin

    for name in [*BENCHMARKS, *(name for name in entry_points("datasets") if name not in BENCHMARKS)]:
        title = name if (source := origin("datasets", name)) == "fedsim" else f"{name} ({source})"
        try:
            bench = BENCHMARKS.get(name) or find_dataset(name)
        except UserError as error:
            yield title, str(error), "-", "-"
            continue
        count = str(sum(bench.counts.values())) if bench.counts else "-"
        yield title, ", ".join(bench.domains) or "your own", str(len(bench.classes)) if bench.domains else "-", count
