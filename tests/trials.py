"""Runs all long trials in order, resumes where it was stopped, and writes one page: `make trials`, or

    python tests/trials.py [--folder trials] [--only NAME ...] [--again]

Each trial is one command with a log of its own in the folder. A trial that has passed on this commit is not run again,
unless `--again` is given. The page `trials.md` has a line for each: its last result, how long it took, and when.
"""

import argparse
import csv
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
OLDEST = ROOT / ".venv" / "oldest-flower"  # made by `make oldest-flower`
PYTEST = (sys.executable, "-m", "pytest", "-q", "-m")
COLUMNS = ("trial", "commit", "result", "minutes", "ended", "last line")

# A process for each folder: one that holds the memory of all slow tests takes 10 GB.
SLOW = sorted({f.parent.name for f in ROOT.glob("tests/*/test_*.py") if "mark.slow" in f.read_text(encoding="utf-8")})
Table = Mapping[str, tuple[str, ...]]  # {name: command}
TRIALS: Table = {
    **{f"slow, {folder}": (*PYTEST, "slow", f"tests/{folder}") for folder in SLOW},
    "flower": (*PYTEST, "flower", "tests/runtime", "tests/plugins"),
    "flower, oldest": (*PYTEST, "flower", "tests/runtime", "tests/plugins"),
    "deployment": (*PYTEST, "deployment"),
    "deployment, oldest": (*PYTEST, "deployment", "tests/deployment/test_loopback.py"),
    "namespaces": (*PYTEST, "namespaces"),
    "faults of a deployment": (sys.executable, "tests/deployment/faults.py"),
    "faults in long runs": (sys.executable, "tests/deployment/soak.py", "--minutes", "30"),
    "attacks": (sys.executable, "tests/deployment/attacks.py"),
    "long run": (sys.executable, "benchmarks/soak.py"),
    "seeded faults": (sys.executable, "tests/faults/seed.py"),
}


def commit() -> str:
    """The commit that is tried, with a mark where the tree has other changes."""
    number = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    changed = subprocess.check_output(["git", "status", "--porcelain", "-uno"], cwd=ROOT, text=True).strip()
    return f"{number} with changes" if changed else number


def environment(name: str) -> dict[str, str]:
    """The variables of a trial: the trees that its modules come from, the oldest Flower first where it is asked for."""
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "deployment")]
    if name.endswith("oldest"):
        if not OLDEST.is_dir():
            sys.exit(f"{OLDEST} is missing: run `make oldest-flower` first")
        paths.insert(0, str(OLDEST))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def exit_code(command: Sequence[str], variables: Mapping[str, str], log: IO[str]) -> int:
    """Run one command to its end; the exit code. After Ctrl-C it is waited for, until it has ended what it started.

    The command has a session of its own, so that it gets a Ctrl-C once: a second one would break off its end.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise


def carry_out(name: str, command: Sequence[str], log: Path) -> Mapping[str, str]:
    """Run one trial; its row."""
    started = time.monotonic()
    with log.open("w") as file:
        code = exit_code(command, environment(name), file)
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    values = (
        name,
        commit(),
        "passed" if code == 0 else f"failed, exit code {code}",
        f"{(time.monotonic() - started) / 60:.1f}",
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        lines[-1] if lines else "",
    )
    return dict(zip(COLUMNS, values, strict=True))


def log_of(folder: Path, name: str) -> Path:
    """The file of what a trial prints."""
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.log"


def write_page(page: Path, title: str, rows: Mapping[str, Mapping[str, str]], table: Table, whole: bool) -> None:
    """The records, and the page made of them. whole: the page has all that each trial printed."""
    with page.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows.values())
    lines = [f"# {title}", "", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(row[column].replace('|', '/') for column in COLUMNS)} |" for row in rows.values()]
    missing = [name for name in table if name not in rows]
    lines += ["", f"Not run yet: {', '.join(missing)}."] if missing else []
    for name in rows if whole else ():
        said = log_of(page.parent, name).read_text(errors="replace").rstrip()
        lines += ["", f"## {name}", "", f"`{' '.join(table[name][1:])}`", "", "```", said, "```"]
    page.write_text("\n".join(lines) + "\n")


def arguments(description: str | None, folder: str) -> argparse.ArgumentParser:
    """What can be asked for."""
    words = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--folder", type=Path, default=ROOT / "outputs" / folder)
    words.add_argument("--only", nargs="*", metavar="NAME", help="these; without it all")
    words.add_argument("--again", action="store_true", help="also run what has passed on this commit")
    return words


def run(table: Table, asked: argparse.Namespace, title: str, name_of_page: str, whole: bool = False) -> int:
    """Run what has not passed on this commit; exit code 1 when a trial failed."""
    if unknown := set(asked.only or ()) - set(table):
        sys.exit(f"--only {', '.join(sorted(unknown))}: unknown; known: {', '.join(table)}")
    # A background job of a shell ignores SIGINT, and so would its tests of Ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    asked.folder.mkdir(parents=True, exist_ok=True)
    page, rows = asked.folder / name_of_page, {}
    if page.with_suffix(".csv").is_file():
        with page.with_suffix(".csv").open(newline="") as records:
            rows = {row["trial"]: row for row in csv.DictReader(records) if row["trial"] in table}
    for name in asked.only or table:
        if not asked.again and rows.get(name, {}).get("commit") == commit() and rows[name]["result"] == "passed":
            continue
        print(f"{name}: {' '.join(table[name])}", flush=True)
        rows[name] = carry_out(name, table[name], log_of(asked.folder, name))
        print(f"    {rows[name]['result']} in {rows[name]['minutes']} min: {rows[name]['last line']}", flush=True)
        write_page(page, title, rows, table, whole)
    write_page(page, title, rows, table, whole)
    print(f"page: {page}")
    return int(any(row["result"] != "passed" for row in rows.values()))


if __name__ == "__main__":
    sys.exit(run(TRIALS, arguments(__doc__, "trials").parse_args(), "Long trials", "trials.md"))
