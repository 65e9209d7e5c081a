"""What banks cost: the time of a local step divided by FedAvg's, and how fast styles and amplitudes are collected.

    python benchmarks/banks.py --root FOLDER_OF_PACS --threads 2
    python benchmarks/banks.py --root FOLDER_OF_PACS --rows "ccst,ccst:cross_client_style.encoder=haar,elcfs"

The steps are complete, on real PACS images: gather, transfer, augment, forward, backward, update. Each repetition takes
one step of every row. The printed ratio is the median over the repetitions of the ratio to FedAvg's step in the same
repetition. Targets: at most 1.15 for CCST in pixel space, and 3.5 for first-order ELCFS.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from clients.augment import frequency, style
from clients.base import DomainClient
from clients.local_data import LocalData
from clients.optimizers import make_optimizer
from fedsim.runs.plan import resolve
from fedsim.runs.workspace import Workspace
from fedsim.settings.experiment import Experiment, from_table, parse_override
from strategies.parts import ServerRound

BATCH = 256  # images that are read at a time
ROWS = (
    "ccst,ccst:cross_client_style.encoder=haar,elcfs,elcfs:episodic_step.L_w=0.1,"
    "elcfs:episodic_step.second_order=true,elcfs+gfedavg,ccst+gfedavg"
)


def experiment_of(row: str, args: argparse.Namespace) -> Experiment:
    """The experiment of a row `method` or `method:part.field=value`."""
    name, _, override = row.partition(":")
    method: dict = {"name": name}
    if override:
        key, value = parse_override(override)
        part, field = key.split(".")
        method[part] = {field: value}
    data = {
        "dataset": "pacs",
        "root": str(args.root),
        "image_size": args.size,
        "augment": "domainbed",
        "normalize": "imagenet",
        **({"cache": str(args.cache)} if args.cache else {}),
    }
    return from_table(
        {
            "name": "banks",
            "method": method,
            "data": data,
            "model": {"backbone": args.backbone},
            "train": {"lr": 0.01, "momentum": 0.9},
            "run": {"target": args.target, "device": args.device},
        }
    )


def bank_records(space: Workspace, client: str) -> dict:
    """What `client` receives from all banks of the recipe."""
    names = space.plan.clients
    records = {}
    for bank in space.recipe.banks:
        config = {"round": 0, "phase": "collect", "bank": bank.name}
        entries = {name: space.client(name, "").collect({**config, "client": name}) for name in names}
        records[bank.name] = bank.hand_out(entries, client, ServerRound(1, 1, names, {}))
    return records


def timed_step(row: str, args: argparse.Namespace) -> Callable[[], None]:
    """A function that takes one complete local step of the row."""
    experiment = experiment_of(row, args)
    space = Workspace(resolve(experiment))
    name = space.plan.clients[0]
    client: DomainClient = space.client(name, "")
    client.records = bank_records(space, name)
    round = client._open({"client": name, "round": 1, "phase": "train"})
    round.lr, round.optimizer = experiment.train.lr, make_optimizer(space.net, experiment.train, experiment.train.lr)
    space.net.train()
    round.terms = [function for term in space.recipe.terms if (function := term.begin(round)) is not None]
    round.objective, round.update = space.recipe.objective.begin(round), space.recipe.update.begin(round)
    step = space.recipe.step.begin(round)
    augment = space.recipe.augment
    transfer = augment.begin(round) if augment else None
    rng = np.random.default_rng(0)
    items = client.data.examples * (augment.copies(round) if augment else 1)
    return lambda: step(client.data.batch(rng.permutation(items)[: args.batch], transfer))


def compare_steps(rows: list[str], args: argparse.Namespace) -> None:
    """Print one line per row: median milliseconds and ratio to FedAvg."""
    takes = {row: timed_step(row, args) for row in ["fedavg", *rows]}
    times: dict[str, list[float]] = {row: [] for row in takes}
    for repetition in range(args.repeats + 2):  # the first two are not counted
        for row, take in takes.items():
            seconds = timed(take, args.device)
            if repetition >= 2:
                times[row].append(seconds)
    print(f"local step, {args.backbone}, {args.size} px, batch {args.batch}")
    for row, values in times.items():
        ratio = statistics.median(value / base for value, base in zip(values, times["fedavg"], strict=True))
        print(f"{row:48} {1e3 * statistics.median(values):9.1f} ms {ratio:7.3f}")


def timed(take: Callable[[], object], device: str) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    take()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


class Collection:
    """Reads all images in batches of 256, and computes what a bank collects of them."""

    def __init__(self, data: Sequence[LocalData]) -> None:
        self.data = data
        self.images = sum(len(part.images) for part in data)

    def batches(self) -> Iterator[torch.Tensor]:
        """The images of all domains, as they are stored."""
        for part in self.data:
            for start in range(0, len(part.images), BATCH):
                stop = min(start + BATCH, len(part.images))
                yield part.raw(np.arange(start, stop))

    def gather(self) -> None:
        """The batches alone."""
        for _ in self.batches():
            pass

    def styles(self, space: style.Space) -> None:
        """One style of all images."""
        pieces = [style.statistics(space.encode(images)) for images in self.batches()]
        joined = [torch.cat(values) for values in zip(*pieces)]
        style.pool(*joined)

    def amplitudes(self, share: float) -> None:
        """The low frequencies of every image."""
        for images in self.batches():
            half = frequency.half_width(share, *images.shape[-2:])
            frequency.amplitude(images, half)

    @torch.inference_mode()
    def forward(self, net: torch.nn.Module) -> None:
        """The forward pass of a network, to compare."""
        net.eval()
        for images in self.batches():
            net(images)


def data_of_all(space: Workspace, args: argparse.Namespace) -> list[LocalData]:
    """The data of the source domains and, from a run in which it is a source, of the unseen one."""
    data = [space.client(name, "").data for name in space.plan.clients]
    other = Workspace(resolve(experiment_of("fedavg", argparse.Namespace(**{**vars(args), "target": "photo"}))))
    return data + [other.client(name, "").data for name in other.plan.clients if name == args.target]


def extraction(args: argparse.Namespace) -> None:
    """Print images per second over all of PACS: for styles, amplitudes and, to compare, the backbone's forward pass."""
    space = Workspace(resolve(experiment_of("fedavg", args)))
    collection = Collection(data_of_all(space, args))
    works = {
        "gathering alone": collection.gather,
        "styles, pixel": lambda: collection.styles(style.Pixel()),
        "styles, haar": lambda: collection.styles(style.Haar()),
        "amplitudes, L_w = 0.01": lambda: collection.amplitudes(0.01),
        "amplitudes, L_w = 0.1": lambda: collection.amplitudes(0.1),
        f"forward, {args.backbone}": lambda: collection.forward(space.net),
    }
    print(f"collecting from all {collection.images} images of PACS at {args.size} px (gathering included)")
    for name, work in works.items():
        repeats = 1 if "forward" in name else 3
        seconds = min(timed(work, args.device) for _ in range(repeats))
        print(f"{name:48} {collection.images / seconds:12.0f} images/s")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder that holds PACS")
    parser.add_argument("--cache", type=Path, help="folder of the decoded images")
    parser.add_argument("--rows", default=ROWS, help="comma-separated method[:part.field=value]; empty: no steps")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--target", default="sketch")
    parser.add_argument("--size", type=int, default=64, help="side of the images in pixels")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.threads} thread(s), {args.device}, torch {torch.__version__}")
    if args.rows:
        compare_steps(args.rows.split(","), args)
    extraction(args)


if __name__ == "__main__":
    main()
