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
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
OLDEST = ROOT / ".venv" / "oldest-flower"  # made by `make oldest-flower`
PYTEST = (sys.executable, "-m", "pytest", "-q", "-m")
COLUMNS = ("trial", "commit", "result", "minutes", "ended", "last line")

# A process for each folder: one that holds the memory of all slow tests takes 10 GB.
SLOW = sorted({f.parent.name for f in ROOT.glob("tests/*/test_*.py") if "mark.slow" in f.read_text(encoding="utf-8")})
TRIALS: dict[str, tuple[str, ...]] = {
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


def carry_out(name: str, folder: Path) -> Mapping[str, str]:
    """Run one trial; its row."""
    log, started = folder / f"{re.sub(r'[^a-z]+', '-', name)}.log", time.monotonic()
    with log.open("w") as file:
        done = subprocess.run(TRIALS[name], cwd=ROOT, env=environment(name), stdout=file, stderr=subprocess.STDOUT)
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    values = (
        name,
        commit(),
        "passed" if done.returncode == 0 else f"failed, exit code {done.returncode}",
        f"{(time.monotonic() - started) / 60:.1f}",
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        lines[-1] if lines else "",
    )
    return dict(zip(COLUMNS, values, strict=True))


def write_page(folder: Path, rows: Mapping[str, Mapping[str, str]]) -> None:
    """The records, and the page made of them."""
    with (folder / "trials.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows.values())
    lines = ["# Long trials", "", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(row[column].replace('|', '/') for column in COLUMNS)} |" for row in rows.values()]
    missing = [name for name in TRIALS if name not in rows]
    lines += ["", f"Not run yet: {', '.join(missing)}."] if missing else []
    (folder / "trials.md").write_text("\n".join(lines) + "\n")


def main() -> int:
    """Run what has not passed on this commit; exit code 1 when a trial failed."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--folder", type=Path, default=ROOT / "outputs" / "trials")
    words.add_argument("--only", nargs="*", choices=TRIALS, default=list(TRIALS), metavar="NAME")
    words.add_argument("--again", action="store_true", help="also run what has passed on this commit")
    asked = words.parse_args()
    # A background job of a shell ignores SIGINT, and so would its tests of Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asked.folder.mkdir(parents=True, exist_ok=True)
    file, rows = asked.folder / "trials.csv", {}
    if file.is_file():
        with file.open(newline="") as records:
            rows = {row["trial"]: row for row in csv.DictReader(records)}
    for name in asked.only:
        if not asked.again and rows.get(name, {}).get("commit") == commit() and rows[name]["result"] == "passed":
            continue
        print(f"{name}: {' '.join(TRIALS[name])}", flush=True)
        rows[name] = carry_out(name, asked.folder)
        print(f"    {rows[name]['result']} in {rows[name]['minutes']} min: {rows[name]['last line']}", flush=True)
        write_page(asked.folder, rows)
    write_page(asked.folder, rows)
    print(f"page: {asked.folder / 'trials.md'}")
    return int(any(row["result"] != "passed" for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
