"""Runs every command of a page as the page has it, and draws the pictures of what they print.

    python docs/walk.py docs/hospitals.md [FOLDER]   # in a new folder; an old one keeps its finished runs
    python docs/walk.py patients FOLDER              # only writes the embedded patients, one CSV file for each hospital

It ends with the first command that fails. The page is the script: a ```toml block whose first line is a comment with a
name becomes that file, a ```bash block is run, and a picture below a bash block shows that block with what it printed.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pandas as pd
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
STEP = re.compile(r"^```(bash|toml)\n(.*?)^```$|^!\[[^\]]*\]\((figures/walk/[\w-]+\.svg)\)$", re.M | re.S)
WIDTH = 116
MOST_LINES = 48
PLAIN = {"FORCE_COLOR": "1", "TTY_INTERACTIVE": "0", "COLUMNS": str(WIDTH), "OMP_NUM_THREADS": "1"}

PATIENTS = HERE.parent / "fedsim" / "data" / "embedded" / "heart_disease.csv"


def write_patients(folder: Path) -> None:
    """Write HOSPITAL.csv for each of the four hospitals into the folder; it has no column of the hospital."""
    rows = pd.read_csv(PATIENTS, dtype=str, keep_default_na=False)
    folder.mkdir(parents=True, exist_ok=True)
    for hospital, patients in rows.groupby("hospital"):
        patients.drop(columns="hospital").to_csv(folder / f"{hospital}.csv", index=False)


def steps(page: str) -> Iterator[tuple[str, str]]:
    """The blocks and pictures of a page, in order: ("bash", commands), ("toml", text) or ("picture", its path)."""
    for kind, text, picture in STEP.findall(page):
        yield (kind, text) if kind else ("picture", picture)


def run(commands: str, folder: Path) -> str:
    """Run a block of commands, and return them with what each printed, as on a terminal."""
    shown = []
    for command in commands.replace("\\\n", " ").strip().splitlines():
        if command.startswith("export "):
            os.environ.update([command.removeprefix("export ").replace('"', "").split("=", 1)])
            continue
        shown.append(f"\x1b[32m$\x1b[0m {re.sub(r'  +', ' ', command)}")
        print(command, flush=True)
        with tempfile.TemporaryFile("w+") as said:  # a pipe would stay open as long as what a start.sh starts
            done = subprocess.run(
                ["bash", "-c", command], cwd=folder, env={**os.environ, **PLAIN}, stdin=subprocess.DEVNULL,
                stdout=said, stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
            said.seek(0)
            text = re.sub(r"\n(\s*\n)+", "\n", said.read().replace(f"{folder}/", "")).rstrip()
        print(text, flush=True)
        if done.returncode:
            raise SystemExit(f"exit code {done.returncode}: {command}")
        shown += [text] if text else []
    return "\n".join(shown)


def draw(text: str, file: Path) -> None:
    """A picture of a terminal with that text, in the reader's own font; of a long text, its beginning and its end."""
    lines = text.splitlines()
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES // 2], "\x1b[2m…\x1b[0m", *lines[-MOST_LINES // 2 :]]
    console = Console(width=WIDTH, record=True, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi("\n".join(lines)))
    form = re.sub(r"@font-face {{.*?}}\s*", "", CONSOLE_SVG_FORMAT, flags=re.S)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(console.export_svg(title="", code_format=form, unique_id=file.stem))


def main(page: Path, folder: Path) -> None:
    """Run a page in a folder, which stays for a look."""
    print(f"in {folder}")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["WALK"] = str(HERE.parent)
    said = ""
    try:
        for kind, text in steps(page.read_text()):
            if kind == "toml":
                (folder / re.match(r"# (\S+)", text)[1]).write_text(text)
            elif kind == "bash":
                said = run(text, folder)
            else:
                draw(said, HERE / text)
    finally:
        for script in folder.glob("*-kits/*/stop.sh"):  # also after a failure
            subprocess.run([script], stdout=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    first, *rest = sys.argv[1:]
    if first == "patients":
        write_patients(Path(rest[0]))
    else:
        main(Path(first), Path(rest[0]).resolve() if rest else Path(tempfile.mkdtemp(prefix="walk-")))
