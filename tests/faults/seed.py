"""Makes the mistakes of faults.toml in a copy of the tree, one after the other, and shows which ones the tests notice.

python tests/faults/seed.py [--only ID ...] [--jobs N] [--tree FOLDER] [--record FILE]

A fault counts as caught when a test fails, or does not end within the limit. Results are appended to the record, and a
later call with the same record runs what is missing in it.
"""

import argparse
import csv
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
LIMIT = 180.0  # seconds for the tests of one fault


class Fault(NamedTuple):
    """One mistake: the text that occurs once in the file, what stands there instead, and the tests to run."""

    id: str
    file: str
    text: str
    instead: str
    tests: tuple[str, ...]


def read_faults() -> list[Fault]:
    """All faults, in the order of faults.toml."""
    files = tomllib.loads((HERE / "faults.toml").read_text(encoding="utf-8"))
    return [
        Fault(id, file, *texts, tuple(own["tests"]))
        for file, own in files.items()
        for id, texts in own.items()
        if id != "tests"
    ]


def misfits(faults: Sequence[Fault], tree: Path) -> list[str]:
    """What does not fit the tree: a text that does not occur exactly once, or tests that are not there."""
    found = []
    for fault in faults:
        file = tree / fault.file
        count = file.read_text(encoding="utf-8").count(fault.text) if file.is_file() else 0
        if count != 1:
            found.append(f"{fault.id}: its text occurs {count} times in {fault.file}")
        found += [f"{fault.id}: no tests {name}" for name in fault.tests if not (tree / name).exists()]
    return found


def copy_of(tree: Path, folder: Path) -> Path:
    """The tracked files of the tree, in a new folder."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=tree, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tree / name, folder / name)
    return folder


def run_tests(folder: Path, words: Sequence[str], limit: float | None = None) -> tuple[int | None, list[str]]:
    """Pytest's exit status (None after the limit), and the tests that failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return None, []
    return done.returncode, re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)


def seed(fault: Fault, folder: Path, deselected: Sequence[str]) -> dict[str, str]:
    """Makes the mistake, runs its tests, and restores the file."""
    file, started = folder / fault.file, time.perf_counter()
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(fault.text, fault.instead), encoding="utf-8")
    try:
        status, failed = run_tests(folder, ["-x", *deselected, *fault.tests], LIMIT)
    finally:
        file.write_text(text, encoding="utf-8")
    result = {0: "missed", 1: "caught", None: "caught"}.get(status, "broken")  # broken: the tests did not even start
    seconds = f"{time.perf_counter() - started:.1f}"
    return {"id": fault.id, "result": result, "seconds": seconds, "test": failed[0] if failed else ""}


def seed_all(faults: Sequence[Fault], tree: Path, record: Path, jobs: int) -> None:
    """Runs the faults on `jobs` copies of the tree, and appends each result to the record."""
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(jobs) as pool:
        folders: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            folders.put(copy_of(tree, Path(place) / str(number)))
        first = folders.get()
        _, failing = run_tests(first, sorted({name for fault in faults for name in fault.tests}))
        folders.put(first)
        deselected = [word for name in failing for word in ("--deselect", name)]
        if failing:
            print(f"these tests fail without any fault and are left out: {', '.join(failing)}", flush=True)

        def one(fault: Fault) -> None:
            folder = folders.get()
            row = seed(fault, folder, deselected)
            folders.put(folder)
            with record.open("a", newline="") as out:
                csv.writer(out).writerow(row.values())
            print(f"{row['result']:8}{row['seconds']:>7}  {row['id']}  {row['test']}", flush=True)

        list(pool.map(one, faults))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="ID", help="these faults alone, and again when they are recorded")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--tree", type=Path, default=HERE.parents[1], help="the checkout that is seeded")
    parser.add_argument("--record", type=Path, default=Path(tempfile.gettempdir()) / "fedsim-faults.csv")
    given = parser.parse_args()
    faults = read_faults()
    chosen = [fault for fault in faults if not given.only or fault.id in given.only]
    if unfit := [*misfits(chosen, given.tree), *(set(given.only or ()) - {fault.id for fault in faults})]:
        sys.exit("\n".join(["these faults do not fit the tree:", *unfit]))
    rows = list(csv.reader(given.record.open())) if given.record.is_file() else []
    known = {row[0] for row in rows}
    left = [fault for fault in chosen if given.only or fault.id not in known]
    if left:
        seed_all(left, given.tree, given.record, given.jobs)
    ids = {fault.id for fault in chosen}
    last = {row[0]: row for row in csv.reader(given.record.open()) if row[0] in ids}
    missed = [id for id, row in last.items() if row[1] != "caught"]
    seconds = sum(float(row[2]) for row in last.values())
    print(
        f"{len(last) - len(missed)} of {len(last)} caught, {seconds:.0f} s; not caught: {', '.join(missed) or 'none'}"
    )


if __name__ == "__main__":
    main()
