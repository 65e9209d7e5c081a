"""What a user types, tried on a GPU: commands one after the other, each in a process of its own."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_scale import Scale
from gpu_tables import Row

COMMANDS = (
    "run digits --method fedavg",
    "evaluate {run}",
    "export {run} --format torch",
    "features {run}",
    "run digits --method gperxan --set train.compile=default",
    "run digits --method fedprox --set train.compile=reduce-overhead",
    "run digits --method fedbn --set train.side_by_side=5",
    "run digits --method csac --set train.precision=bf16",
    "sweep digits --methods fedavg,gperxan --targets rot75 --seeds 0 --jobs 2 --gpus-per-cell 0.5",
)


def verbs(scale: Scale, device: torch.device) -> Iterator[Row]:
    """0. Do the commands of a user work? The exit code of each, its seconds, and its last line."""
    with tempfile.TemporaryDirectory() as name:
        output = Path(name)
        settings = f"--set run.device={device.type} --set train.rounds=2 --output {output}"
        for command in COMMANDS if len(scale.methods) > 2 else COMMANDS[:2]:
            more = {"run": f" --target rot0 --seed 0 {settings}", "sweep": f" {settings}"}
            words = command.format(run=output / "digits/fedavg/rot0/seed0") + more.get(command.split()[0], "")
            started = time.perf_counter()
            done = subprocess.run([sys.executable, "-m", "fedsim", *words.split()], capture_output=True, text=True)
            last = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-1:]
            yield {"command": f"`fedsim {command}`", "exit code": done.returncode,
                   "seconds": time.perf_counter() - started, "last line": " ".join(last)[:120]}  # fmt: skip
