"""All measurements that need a GPU, in order; prints tables and appends them to benchmarks/GPU.md.

    python benchmarks/gpu.py                                 (everything, on the GPU)
    python benchmarks/gpu.py --checks rate,small-nets
    python benchmarks/gpu.py --small --device cpu --output /tmp/GPU.md     (the same code, small enough for a CPU)

Every measurement takes turns with its reference in one process. Compare the ratios; times are of this device only. Real
training (PACS, four targets, several seeds) takes hours, so its commands are only printed; `fedsim sweep` can resume
it.
"""

import argparse
import itertools
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from gpu_runs import runs, synchronisation
from gpu_scale import FULL, SMALL, Scale
from gpu_tables import Row, machine, markdown
from gpu_verbs import verbs
from launches import launches
from overhead import bare_loop, experiment_for
from steps import RandomData, build, compare, experiment_of, measurable

from fedsim.runs.workspace import close_workspaces, sum_in_one_order
from fedsim.runtime.launch import launch
from fedsim.settings.experiment import Experiment

GROUP = 20  # rows whose steps take turns
PASSES = 5  # between two waits for the device, as a round does not wait after each step
TRAINING = (
    "fedsim sweep pacs --methods fedavg,gperxan,feddg-ga,csac,fedig-a,deepall --targets all --seeds 0,1,2",
    "fedsim sweep digits --methods fedavg,gperxan --targets rot75 --seeds 0 --jobs 2 --gpus-per-cell 0.5",
)


def steps(scale: Scale, device: torch.device) -> Iterator[Row]:
    """2 and 6. Milliseconds and peak device memory (MiB) of one local step of every method, and the ratios to FedAvg's.

    FedIG-A's Table 4, on an A5000: FedAvg 1.43, FedIG 2.25, FedIG-A 3.50 ms, which is 1.57 and 2.45 times FedAvg's.
    """
    for backbone in scale.backbones:
        for start in range(1, len(scale.methods), GROUP):  # a GPU holds the networks of so many rows
            methods = [scale.methods[0], *scale.methods[start : start + GROUP]]
            peaks: dict[str, float] = {}
            rows = {method: take for method in methods for take in measured(method, scale, backbone, device, peaks)}
            medians, ratios = compare(rows, scale.repeats, device)
            first = peaks[methods[0]]
            for method in rows:
                if start == 1 or method != methods[0]:
                    row = {"backbone": backbone, "method": method, "ms": medians[method], "ratio": ratios[method]}
                    yield row | {"MiB": peaks[method], "memory ratio": peaks[method] / first}


def measured(
    method: str, scale: Scale, backbone: str, device: torch.device, peaks: dict[str, float]
) -> Iterator[Callable[[], None]]:
    """The step of a row, if it can be measured; its peak memory, with the network, is written to `peaks`."""
    before = allocated(device)
    for take in measurable([method], options(scale, backbone), device).values():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        take()
        peaks[method] = allocated(device, peak=True) - before
        yield take


def allocated(device: torch.device, peak: bool = False) -> float:
    """MiB of device memory in use, or the most since the last reset; NaN on a CPU."""
    if device.type != "cuda":
        return float("nan")
    return (torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()) / 2**20


def options(scale: Scale, backbone: str) -> argparse.Namespace:
    """The settings of a step in the form that `steps.py` takes."""
    return argparse.Namespace(
        data="digits", backbone=backbone, size=scale.size, batch=scale.batch, bottleneck=0, head="linear", train="all"
    )


def rate(scale: Scale, device: torch.device) -> Iterator[Row]:
    """3. Images per second of whole FedAvg rounds, divided by those of forward and backward on a batch on the device.

    The targets are 0.6, and 0.9 for ResNet-50. `one order` is the rate of forward and backward with the deterministic
    algorithms that a run uses on a GPU, divided by that without. `largest` are the three operations that took most of
    the round's time.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = experiment_for(scale.backbones[0], folder, 1, 1)
        for backbone, precision in itertools.product(scale.backbones, scale.precisions):
            alone, in_order = resident_rates(scale, backbone, precision, device)
            experiment = whole_experiment(scale, base.replace(model={"backbone": backbone}), device, precision)
            whole, largest = whole_rate(experiment, scale, folder / backbone / precision)
            row = {"backbone": backbone, "precision": precision, "whole images/s": whole, "alone": alone}
            yield row | {"ratio": whole / alone, "one order": in_order / alone, "largest": largest}


def whole_experiment(scale: Scale, experiment: Experiment, device: torch.device, precision: str) -> Experiment:
    """FedAvg with the scale's image size (not for digits), batches and steps."""
    size = {} if experiment.model.backbone.startswith("digits") else {"data": {"image_size": scale.size}}
    train = {"precision": precision, "batch_size": scale.batch, "iterations": scale.iterations}
    return experiment.replace(train=train, run={"device": device.type}, **size)


def resident_rates(scale: Scale, backbone: str, precision: str, device: torch.device) -> tuple[float, float]:
    """Images per second of forward and backward on one random batch that is on the device.

    The first is with PyTorch's usual algorithms, the second with deterministic ones.
    """
    experiment = experiment_of("fedavg", options(scale, backbone)).replace(train={"precision": precision})
    _, net = build(experiment, device)
    batch = RandomData(experiment, device).batch()

    def take(in_order: bool) -> None:
        torch.use_deterministic_algorithms(in_order, warn_only=True)
        for _ in range(PASSES):
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                loss = F.cross_entropy(net(batch.images).float(), batch.labels)
            loss.backward()
            net.zero_grad(set_to_none=True)
        torch.use_deterministic_algorithms(False)

    rows = {f"{backbone} {precision}, one order: {in_order}": partial(take, in_order) for in_order in (False, True)}
    medians, _ = compare(rows, scale.repeats, device)
    usual, in_order = (1e3 * PASSES * scale.batch / medians[name] for name in rows)
    return usual, in_order


def whole_rate(experiment: Experiment, scale: Scale, folder: Path) -> tuple[float, str]:
    """(images per second of a round after the first, the operations that took most of the time)."""
    close_workspaces()
    run = experiment.replace(train={"rounds": 1 + scale.rounds}, run={"output": str(folder / "run")})
    images, seconds = later_rounds(launch(run))
    activities = [torch.profiler.ProfilerActivity.CPU]
    if experiment.run.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    short = {"rounds": 1, "iterations": min(scale.iterations, 5)}
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        launch(experiment.replace(train=short, run={"output": str(folder / "profile")}))
    key = "self_device_time_total" if experiment.run.device == "cuda" else "self_cpu_time_total"
    items = sorted(profile.key_averages(), key=lambda item: -getattr(item, key))[:3]
    return images / seconds, ", ".join(item.key[:40] for item in items)


def later_rounds(folder: Path) -> tuple[float, float]:
    """Medians of the training images and of the seconds of all rounds after the first, which has the initial work."""
    found = pd.read_csv(folder / "rounds.csv").query("round > 1")
    return found["images"].median(), found["round_seconds"].median()


def small_nets(scale: Scale, device: torch.device) -> Iterator[Row]:
    """5. Clients per second of the digits CNN with every way to train them, and the ratio to a plain PyTorch loop."""
    settings: dict[str, dict] = {
        "sequential": {},
        "side by side": {"side_by_side": max(scale.clients) + 1},
        "compiled": {"compile": "default"},
        "CUDA graphs": {"compile": "reduce-overhead"},
    }
    for count in scale.clients:
        per_domain = max(count // 3, 1)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            base = experiment_for("digits-cnn-bn", folder, 1, 1)
            data = {"domains": ["rot0", "rot15", "rot30", "rot45"], "clients_per_domain": per_domain}
            run = {"device": device.type, "target": "rot45"}
            base = base.replace(data=data, run=run, train={"iterations": 4, "batch_size": 16})
            clients = 3 * per_domain
            bare = clients / bare_seconds(base, scale, device)
            yield {"clients": clients, "way": "bare loop", "clients/s": bare, "ratio": 1.0}
            for mode in scale.modes:
                train = settings[mode] | {"rounds": 1 + 2 * scale.rounds}
                close_workspaces()
                found = launch(base.replace(train=train, run={"output": str(folder / mode)}))
                rate = clients / later_rounds(found)[1]
                yield {"clients": clients, "way": mode, "clients/s": rate, "ratio": rate / bare}


def bare_seconds(base: Experiment, scale: Scale, device: torch.device) -> float:
    """Seconds of one round of the bare loop: from those of several rounds, those of one round are subtracted."""
    seconds = []
    for rounds in (1, 1, 1 + 2 * scale.rounds):  # the first warms the device up
        started = time.perf_counter()
        bare_loop(base.replace(train={"rounds": rounds}), device)
        seconds.append(time.perf_counter() - started)
    return max(seconds[2] - seconds[1], 1e-9) / (2 * scale.rounds)


def training(scale: Scale, device: torch.device) -> Iterator[Row]:
    """7. Commands for real training and for two runs on one device; each command resumes its unfinished runs."""
    yield from ({"command": f"`{command} --set run.device={device.type}`"} for command in TRAINING)


CHECKS: dict[str, Callable[[Scale, torch.device], Iterator[Row]]] = {
    "verbs": verbs, "runs": runs, "steps": steps, "rate": rate, "synchronisation": synchronisation,
    "small-nets": small_nets, "training": training, "launches": launches,
}  # fmt: skip


def arguments(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", default=",".join(CHECKS))
    parser.add_argument("--methods", default="", help="these rows only; the first is the reference")
    parser.add_argument("--backbones", default="", help="these backbones only")
    parser.add_argument("--modes", default="", help="these ways to train small networks only")
    parser.add_argument("--clients", default="", help="these numbers of clients of small networks only")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--small", action="store_true", help="two methods, the digits CNN, a few steps")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "GPU.md")
    return parser.parse_args(words)


def scale_of(args: argparse.Namespace) -> Scale:
    """What is measured: the whole or the small list, with the rows, networks, modes and clients that were named."""
    scale = SMALL if args.small else FULL
    for name in ("methods", "backbones", "modes"):
        named = getattr(args, name)
        if named:
            scale = replace(scale, **{name: tuple(named.split(","))})
    if args.clients:
        scale = replace(scale, clients=tuple(int(number) for number in args.clients.split(",")))
    return scale


def main(words: list[str] | None = None) -> None:
    """Run the checks that are asked for, and append a section with a table for each to the output."""
    args = arguments(words)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; --small --device cpu tries the same code on a CPU")
    device, scale = torch.device(args.device), scale_of(args)
    if args.device == "cuda":
        sum_in_one_order()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is measured is written, also after a time limit
    with args.output.open("a", encoding="utf-8") as file:
        file.write(f"\n## {machine(device)}\n")
        for name in args.checks.split(","):
            said = " ".join((CHECKS[name].__doc__ or "").split())
            file.write(f"\n`python benchmarks/gpu.py --checks {name}`: {said}\n\n")
            table: list[Row] = []
            try:
                for row in CHECKS[name](scale, device):
                    print(f"{name}: {row}", flush=True)
                    table.append(row)
            finally:
                file.write(markdown(table) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
