"""How much time and memory it takes to open a table of images with many rows, which all name a few small files.

    python benchmarks/large_table.py [--rows 100000 1000000] [--parquet]

To open a table is to read its domains, classes and counts; every command does it before it reads an image. Each size is
measured in a separate process. Printed are processor seconds, and peak memory without what `import pandas` takes. The
last column is for the list of files of one domain (a quarter of the rows), which a client that trains on it needs.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

DOMAINS, CLASSES, PIECE = ("north", "east", "south", "west"), 50, 100_000


def write(file: Path, rows: int) -> None:
    """A table with that many rows."""
    parts = []
    for start in range(0, rows, PIECE):
        index = np.arange(start, min(start + PIECE, rows))
        parts.append(
            pd.DataFrame({
                "path": [f"images/{number % 1000:03d}/{number:08d}.jpg" for number in index],
                "label": [f"class {number % CLASSES}" for number in index],
                "domain": [DOMAINS[number % 4] for number in index],
            })
        )  # fmt: skip
        if file.suffix == ".csv":
            parts.pop().to_csv(file, mode="a", header=not start, index=False)
    if parts:
        pd.concat(parts).to_parquet(file)


def peak() -> float:
    """Peak memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def child(file: str) -> None:
    """Open one table; print seconds and memory for opening it and for listing a domain."""
    from fedsim.data.benchmarks import benchmark
    from fedsim.data.reader import reader
    from fedsim.settings import DataSettings

    data = DataSettings(dataset="table", root=file)
    if file.endswith(".parquet"):
        import pyarrow.parquet  # noqa: F401
    before, started = peak(), time.process_time()
    found = benchmark(data)
    opened = time.process_time() - started, peak() - before
    assert len(found.domains) == 4
    started = time.process_time()
    listing = reader(data, found).listing("north")
    print(*opened, time.process_time() - started, peak() - before, len(listing.files))


def main() -> None:
    """Print a line for every size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--parquet", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for rows in options.rows:
            file = Path(folder) / f"{rows}{'.parquet' if options.parquet else '.csv'}"
            write(file, rows)
            done = subprocess.run([sys.executable, __file__, "--child", str(file)], capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            seconds, memory, listing, whole, files = done.stdout.split()
            print(
                f"{rows:,} rows: opened in {float(seconds):.1f} s and {float(memory):.0f} MiB; the {int(files):,} "
                f"files of a domain listed in {float(listing):.1f} s, {float(whole):.0f} MiB in all"
            )
            file.unlink()


if __name__ == "__main__":
    child(sys.argv[2]) if sys.argv[1:2] == ["--child"] else main()
