"""Copies the records of finished runs into docs/results, without weights, predictions and paths of this machine.

    python docs/publish.py outputs/pacs docs/results/pacs-128

`fedsim compare`, `plot` and `report` read the copy as they read the runs; `experiment.toml` and `environment.json` say
with which settings, data and versions these were made.
"""

import re
import shutil
import sys
from pathlib import Path

KEPT = ("rounds.csv", "summary.csv", "environment.json", "experiment.toml")
PATHS = {"root": "", "output": "outputs", "cache": ""}  # settings that name folders of a machine


def publish(runs: Path, out: Path) -> int:
    """Copy every finished run below a folder; returns their number."""
    found = [summary.parent for summary in sorted(runs.rglob("summary.csv"))]
    for run in found:
        copy = out / run.relative_to(runs)
        copy.mkdir(parents=True, exist_ok=True)
        for name in KEPT:
            shutil.copyfile(run / name, copy / name)
        settings = copy / "experiment.toml"
        text = settings.read_text(encoding="utf-8")
        for key, value in PATHS.items():
            text = re.sub(rf'^{key} = ".*"$', f'{key} = "{value}"', text, flags=re.MULTILINE)
        settings.write_text(text, encoding="utf-8")
    return len(found)


if __name__ == "__main__":
    print(f"{publish(Path(sys.argv[1]), Path(sys.argv[2]))} runs")
