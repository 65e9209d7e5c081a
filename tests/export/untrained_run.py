"""The folder of a run that was not trained: its settings, its environment and the initial model."""

import json
from pathlib import Path
from typing import Any

from fedsim.runs.checkpoint import write_arrays
from fedsim.runs.plan import resolve
from fedsim.settings.experiment import from_table


def untrained_run(folder: Path, method: dict | str = "fedavg", **sections: Any) -> Path:
    """Writes what `fedsim.load` reads, as a run of one round does, and returns the folder."""
    table = {
        "name": "small", "data": {"dataset": "digits"}, "model": {"backbone": "digits-cnn-bn"},
        "method": {"name": method} if isinstance(method, str) else method, "run": {"threads": 1},
    }  # fmt: skip
    for section, values in sections.items():
        table[section] = {**table.get(section, {}), **values} if isinstance(values, dict) else values
    plan = resolve(from_table(table))
    folder.mkdir(parents=True)
    (folder / "experiment.toml").write_text(plan.experiment.toml())
    prints = {domain: {"images": 8, "content": "a" * 20, "environment": 0} for domain in plan.data.domains}
    record = {"classes": list(plan.data.classes), "data": prints}
    (folder / "environment.json").write_text(json.dumps(record))
    net = plan.build_net()
    sent = {name: tensor.numpy() for name, tensor in net.state_dict().items() if name not in net.frozen}
    for which in ("best", "last"):
        write_arrays(folder / f"{which}.safetensors", sent, {"round": "1"})
    return folder
