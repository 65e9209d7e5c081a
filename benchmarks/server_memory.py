"""Memory of the whole server while it aggregates many large models that arrive one after the other.

The real strategy (FedAvg) runs, with its checks of every reply, the guard, the average, the record of the new model and
the checkpoint. The replies are read from a file instead of the network. Printed is the peak resident size minus what
the process had before the round (network, global model), in units of one model. The reference is the same code with all
replies kept in memory.

    python benchmarks/server_memory.py [--clients 30] [--backbone resnet50] [--without-reference]
"""

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from rich.console import Console
from rich.table import Table

from fedsim.flower.identity import assume_identity, stamp
from fedsim.runs.checkpoint import Checkpoint, save_checkpoint
from fedsim.runs.plan import resolve
from fedsim.runs.workspace import Workspace
from fedsim.settings.experiment import from_table
from fedsim.tensors.arrays import nbytes, record_of, record_to_arrays, state_to_record
from strategies.accept import accept_updates
from strategies.base import FedDG
from strategies.model import server_model
from strategies.round import ask_to_train, compute_model, open_round
from strategies.server import Server
from strategies.stored import Storage
from strategies.wire.grids import PatientGrid
from strategies.wire.sites import Site

TOKEN, EXAMPLES, PROMISED = "0123456789abcdef", 100, 2.5


class FileGrid:
    """A grid whose clients all reply with the tensors of one file, which is read again for each reply."""

    def __init__(self, folder: Path, record: ArrayRecord) -> None:
        self.file = folder / "reply"
        self.heads = [(name, array.dtype, array.shape, array.stype, len(array.data)) for name, array in record.items()]
        with self.file.open("wb") as file:
            for array in record.values():
                file.write(array.data)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Yield one reply after the other."""
        for number, message in enumerate(messages):
            stamp(message, f"m{number}")
            yield self._reply(message)

    def _reply(self, message: Message) -> Message:
        config = message.content.config_records["config"]
        with self.file.open("rb") as file:
            arrays = {name: Array(kind, shape, stype, file.read(size)) for name, kind, shape, stype, size in self.heads}
        content = {
            "arrays": record_of(arrays),
            "metrics": MetricRecord({"num-examples": EXAMPLES, "train_loss": 1.0, "train_seconds": 1.0}),
            "echo": ConfigRecord({"token": TOKEN, **{key: config[key] for key in ("client", "round", "phase")}}),
        }
        return Message(RecordDict(content), reply_to=message)


def server_of(space: Workspace, clients: int, storage: Storage) -> Server:
    """The server of a run, as it is after the handshake with this many clients."""
    experiment = space.experiment
    strategy = FedDG(space.recipe, experiment, space.places, {"experiment": experiment.toml(), "token": TOKEN})
    server = strategy.server
    server.storage = storage
    server.parts.model = server_model(space.net, space.places, space.plan.build_net, space.device)
    names = space.plan.clients[:clients]
    server.exchange.sites = {name: Site(name, node, EXAMPLES) for node, name in enumerate(names, start=2)}
    return server


def measure(clients: int, backbone: str, held: bool, folder: Path) -> dict[str, float]:
    """Measure one round: its memory above the process's base in models, and seconds per client."""
    assume_identity(1)
    experiment = from_table(
        {
            "data": {"dataset": "digits", "image_size": 32, "clients_per_domain": -(-clients // 5)},
            "model": {"backbone": backbone},
            "run": {"target": "rot75", "output": str(folder)},
        }
    )
    space = Workspace(resolve(experiment))
    server = server_of(space, clients, Storage(folder, memory=1 << 60) if held else Storage(folder))
    arrays = state_to_record(space.net.state_dict(), space.travelling)
    model = nbytes(arrays)
    grid = PatientGrid(FileGrid(folder, arrays), server.exchange, 0.0)
    base, started = forget_peak(), time.process_time()
    server.exchange.begin(1)
    sent = open_round(server, 1, arrays, server.exchange.clients)
    before = server.state.snapshot()
    replies = grid.send_and_receive(ask_to_train(server, "train", sent, server.exchange.clients))
    updates, sizes = accept_updates(server, replies, record_to_arrays(arrays))
    fused = compute_model(server, grid, arrays, updates, sizes, before)
    seconds = time.process_time() - started
    save_checkpoint(folder / "checkpoint", Checkpoint(1, record_to_arrays(fused), server.state))
    return {"models": (status("VmHWM") - base) / model, "base": base, "seconds": seconds / clients, "model": model}


def forget_peak() -> int:
    """Start a new measurement of the largest resident size; returns the present size, without free memory."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(key: str) -> int:
    """The bytes of an entry in this process's status file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main() -> None:
    """Measure both in separate processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--backbone", default="resnet50")
    parser.add_argument("--without-reference", action="store_true")
    parser.add_argument("--one", choices=("stored", "held"), help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.one:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(wanted.clients, wanted.backbone, wanted.one == "held", Path(folder))))
        return
    table = Table("replies", "models over the base", "promised", "processor seconds a client", "base", "one model")
    for way in ("stored",) if wanted.without_reference else ("stored", "held"):
        command = [sys.executable, __file__, "--one", way, "--clients", str(wanted.clients)]
        command += ["--backbone", wanted.backbone]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        table.add_row(
            {"stored": "stored as they arrive", "held": "all in memory (reference)"}[way],
            f"{found['models']:.2f}",
            f"{PROMISED}" if way == "stored" else "",
            f"{found['seconds']:.2f}",
            f"{found['base'] / 2**20:.0f} MiB",
            f"{found['model'] / 2**20:.1f} MiB",
        )
    table.caption = f"{wanted.clients} clients, {wanted.backbone}"
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
