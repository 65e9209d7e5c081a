"""The tables of the GPU benchmark as Markdown, and the line that names the device on which they were measured."""

import platform
import subprocess
from datetime import date

import torch

Row = dict[str, object]


def markdown(table: list[Row]) -> str:
    """The table as Markdown."""
    columns = list(dict.fromkeys(key for row in table for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(cell(row.get(c, "")) for c in columns) + " |" for row in table)])


def cell(value: object) -> str:
    """A value as text; a number has four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def machine(device: torch.device) -> str:
    """A line with device, driver, versions and date."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(asked, capture_output=True, text=True).stdout.strip() if device.type == "cuda" else "none"
    return f"{name}, driver {driver}, torch {torch.__version__}, CUDA {torch.version.cuda}, {date.today()}"
