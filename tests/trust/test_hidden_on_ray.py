"""On Ray too, one line names a user's own folder that hides one of our packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedsim

ROOT = Path(fedsim.__file__).parents[1]


@pytest.mark.slow
def test_a_clients_folder_beside_the_command_on_ray(tmp_path):
    """fedsim is installed, so it comes last in the search path; Ray's workers search the working folder first."""
    work, site = tmp_path / "work", tmp_path / "site"
    (work / "clients").mkdir(parents=True)
    (work / "clients" / "__init__.py").write_text("")
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"import sys\nsys.path.append({str(ROOT)!r})\n")
    program = "import sys; sys.path.remove(''); from fedsim.commands.cli import main; main()"
    words = ["run", "digits", "--runtime", "ray", "--output", "out"]
    for setting in ("train.rounds=1", "data.fraction=0.05", "run.workers=1"):
        words += ["--set", setting]
    variables = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, cwd=work, env=variables, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "died twice" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("fedsim: ")]
    assert line.startswith(f"fedsim: {work / 'clients'} hides the package 'clients' of fedsim; rename it")
