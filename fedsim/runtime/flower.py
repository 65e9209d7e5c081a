"""Flower's own simulation engine: `flwr run` with a SuperLink that ends with the run, and with the run's exit code."""

import tempfile
from pathlib import Path

import tomli_w

from fedsim.common.errors import ClientFailedError
from fedsim.flower.processes import SuperLink, write_app
from fedsim.settings.experiment import Experiment
from fedsim.settings.paths import folders, with_absolute_paths, with_absolute_weights


def run_with_flower(experiment: Experiment, clients: int) -> None:
    """Run one complete experiment in Flower's engine, and print its log; ClientFailedError when it did not complete."""
    experiment = with_absolute_weights(with_absolute_paths(experiment))
    run = experiment.run
    federation = (
        f"num-supernodes={clients} client-resources-num-cpus={max(round(run.cpus_per_worker), 1)} "
        f"client-resources-num-gpus={run.gpus_per_worker}"
    )
    with tempfile.TemporaryDirectory(prefix="fedsim-flower-") as folder:
        settings = Path(folder) / "settings.toml"
        settings.write_text(tomli_w.dumps({"experiment": experiment.toml()}))
        with SuperLink(Path(folder), folders(experiment)) as link:
            run_id = link.submit(write_app(Path(folder) / "app"), settings, federation)
            for line in link.log(run_id):
                print(line, end="", flush=True)
            status, details = link.verdict(run_id)
    if status != "finished:completed":
        raise ClientFailedError(f"Flower's run ended as {status}: {details or 'see the log above'}")
