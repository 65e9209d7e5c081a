"""The environment of a run: Python, platform, package versions and the commit. It imports none of the packages."""

import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from fedsim.about import VERSION, installed_version
from fedsim.cores import free_cores

PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "flwr",
    "ray",
    "numpy",
    "pandas",
    "scipy",
    "scikit-learn",
    "pydantic",
    "safetensors",
    "pillow",
    "matplotlib",
)


def environment() -> dict[str, Any]:
    """Python, platform, CPU count, versions of the packages that numbers depend on, git commit and dirty flag."""
    table = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "cores_free": free_cores(),
        "packages": {"fedsim": VERSION} | {name: found for name in PACKAGES if (found := installed_version(name))},
    }
    return table | _git(Path(__file__).resolve())


@cache  # a process runs the code that was there at its start, even when the checkout changes later
def _git(file: Path) -> dict[str, Any]:
    """Commit and dirty flag of the checkout that tracks `file`; empty for an installed package."""
    # A package installed into a virtual environment inside somebody's checkout is not part of that checkout.
    if _run_git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return {}
    commit = _run_git(file.parent, "rev-parse", "HEAD")
    changes = _run_git(file.parent, "status", "--porcelain", "--untracked-files=no")
    return {"git_commit": commit, "git_dirty": bool(changes)} if commit else {}


def _run_git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
