"""Makes the mistakes of faults.toml in a copy of the tree, one after the other, and shows which ones the tests notice.

python tests/faults/seed.py [--only ID ...] [--jobs N] [--tree FOLDER] [--record FILE]

A fault is caught when a test fails, or needs more than its processor seconds. Results are appended to the record, and
a later call with the same record runs what is missing in it. Tests that fail without any fault are left out.
"""

import argparse
import csv
import os
import queue
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
CLEAN = "clean"  # the record's row of the tests that fail without any fault
LIMIT = 180  # processor seconds for the tests of one fault


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


def limited() -> None:
    """Ends a test process, for example one in an endless loop, after its processor seconds."""
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))


def run_tests(folder: Path, words: Sequence[str], before: Callable[[], None] | None = None) -> tuple[int, list[str]]:
    """Pytest's exit status, and the tests that failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, preexec_fn=before)
    return done.returncode, re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)


def seed(fault: Fault, folder: Path, deselected: Sequence[str]) -> list[str]:
    """Makes the mistake, runs its tests, and restores the file; returns the row of the record."""
    file, started = folder / fault.file, time.perf_counter()
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(fault.text, fault.instead), encoding="utf-8")
    try:
        status, failed = run_tests(folder, ["-x", *deselected, *fault.tests], limited)
    finally:
        file.write_text(text, encoding="utf-8")
    caught = status == 1 or status < 0  # a negative one is the signal that ended an endless loop
    result = "caught" if caught else "missed" if status == 0 else "broken"
    return [fault.id, result, f"{time.perf_counter() - started:.1f}", failed[0] if failed else ""]


def failing_anyway(folder: Path, faults: Sequence[Fault], rows: Sequence[Sequence[str]]) -> list[str]:
    """The tests that fail without any fault, from the record or from a run."""
    noted = [row[3].split() for row in rows if row[0] == CLEAN]
    return noted[-1] if noted else run_tests(folder, sorted({name for fault in faults for name in fault.tests}))[1]


def seed_all(faults: Sequence[Fault], tree: Path, record: Path, jobs: int, rows: Sequence[Sequence[str]]) -> None:
    """Runs the faults on `jobs` copies of the tree, and appends each result to the record."""
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(jobs) as pool:
        folders: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            folders.put(copy_of(tree, Path(place) / str(number)))
        failing = failing_anyway(folders.queue[0], faults, rows)
        print(f"left out, because they fail without a fault: {', '.join(failing) or 'none'}", flush=True)
        note(record, [CLEAN, "", "0", " ".join(failing)])

        def one(fault: Fault) -> None:
            folder = folders.get()
            row = seed(fault, folder, [word for name in failing for word in ("--deselect", name)])
            folders.put(folder)
            note(record, row)
            print(f"{row[1]:8}{row[2]:>7}  {row[0]}  {row[3]}", flush=True)

        list(pool.map(one, faults))


def note(record: Path, row: Sequence[str]) -> None:
    with record.open("a", newline="") as out:
        csv.writer(out).writerow(row)


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
    if left := [fault for fault in chosen if given.only or fault.id not in known]:
        seed_all(left, given.tree, given.record, given.jobs, rows)
    ids = {fault.id for fault in chosen}
    last = {row[0]: row for row in csv.reader(given.record.open()) if row[0] in ids}
    missed = [id for id, row in last.items() if row[1] != "caught"]
    seconds = sum(float(row[2]) for row in last.values())
    print(f"{len(last) - len(missed)} of {len(last)} caught, {seconds:.0f} s; missed: {', '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
