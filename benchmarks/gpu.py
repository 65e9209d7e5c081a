"""All measurements that need a GPU, in order; prints tables and appends them to benchmarks/GPU.md.

    python benchmarks/gpu.py                                 (everything, on the GPU)
    python benchmarks/gpu.py --checks rate,small-nets
    python benchmarks/gpu.py --small --device cpu --output /tmp/GPU.md     (the same code, small enough for a CPU)

Every measurement takes turns with its reference in one process. Compare the ratios; times are of this device only. Real
training (PACS, four targets, several seeds) takes hours, so its commands are only printed; `fedsim sweep` can resume
it.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from gpu_scale import FULL, SMALL, Scale
from gpu_tables import Table, machine, markdown
from overhead import bare_loop, experiment_for
from steps import RandomData, build, compare, experiment_of, measurable

from fedsim.commands.contract import small_plan
from fedsim.common.errors import UserError
from fedsim.run.serve import serve
from fedsim.run.workspace import close_workspaces
from fedsim.runtime.launch import launch, make_grid
from fedsim.settings.experiment import Experiment

TRAINING = (
    "fedsim sweep pacs --methods fedavg,gperxan,feddg-ga,csac,fedig-a,deepall --targets all --seeds 0,1,2",
    "fedsim sweep digits --methods fedavg,gperxan --targets rot75 --seeds 0 --jobs 2 --gpus-per-cell 0.5",
)


def runs(scale: Scale, device: torch.device) -> Table:
    """1. Every row of METHODS runs with finite numbers, agrees with the CPU, and with equal seeds gives equal records.

    The validation of round 1 is compared with the CPU's. `same` compares two fp32 runs with deterministic algorithms;
    `cost` is their time divided by that of the first run.
    """
    table: Table = []
    for method in scale.methods:
        row: dict[str, object] = {"method": method}
        try:
            for precision in scale.precisions:
                found, seconds = small_run(method, scale, device, precision)
                row[f"{precision} finite"] = bool(found["train_loss"].iloc[1:].notna().all())
                if precision == "fp32":
                    reference, _ = small_run(method, scale, torch.device("cpu"), precision)
                    column = next(name for name in found if name.startswith("mean_validation"))
                    row["from the CPU"] = abs(found[column][1] - reference[column][1])
                    first = seconds
            with deterministic():
                (one, seconds), (other, _) = (small_run(method, scale, device, "fp32") for _ in range(2))
            row |= {"same": one.equals(other), "cost": seconds / first}
        except UserError as error:
            row["not run"] = str(error)[:60]
        table.append(row)
    return table


def small_run(method: str, scale: Scale, device: torch.device, precision: str) -> tuple[pd.DataFrame, float]:
    """(rounds.csv of a short run on digits, without times; the seconds of the run)."""
    close_workspaces()
    changes = [f"run.device={device.type}", f"train.precision={precision}", f"train.rounds={scale.rounds}"]
    if scale is SMALL:
        changes += ["train.iterations=1", "data.fraction=0.04"]
    with tempfile.TemporaryDirectory() as folder:
        plan = small_plan(method, folder, changes)
        started = time.perf_counter()
        found = pd.read_csv(serve(make_grid(plan), plan) / "rounds.csv")
        return found[[c for c in found if "seconds" not in c]], time.perf_counter() - started


@contextmanager
def deterministic() -> Iterator[None]:
    """Use PyTorch's deterministic algorithms inside the `with` block.

    The process needs CUBLAS_WORKSPACE_CONFIG=:4096:8.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def steps(scale: Scale, device: torch.device) -> Table:
    """2. Milliseconds of one local step of every method, and the ratio to FedAvg's.

    FedIG-A's Table 4, on an A5000: FedAvg 1.43, FedIG 2.25, FedIG-A 3.50 ms, which is 1.57 and 2.45 times FedAvg's.
    """
    table: Table = []
    for backbone in scale.backbones:
        rows = measurable(list(scale.methods), options(scale, backbone), device)
        medians, ratios = compare(rows, scale.repeats, device)
        table += [{"backbone": backbone, "method": m, "ms": medians[m], "ratio": ratios[m]} for m in rows]
    return table


def options(scale: Scale, backbone: str) -> argparse.Namespace:
    """The settings of a step in the form that `steps.py` takes."""
    return argparse.Namespace(data="digits", backbone=backbone, size=scale.size, batch=scale.batch, bottleneck=0)


def rate(scale: Scale, device: torch.device) -> Table:
    """3. Images per second of whole FedAvg rounds, divided by those of forward and backward on a batch on the device.

    The targets are 0.6, and 0.9 for ResNet-50. `largest` are the three operations that took most of the round's time.
    """
    table: Table = []
    for backbone in scale.backbones:
        for precision in scale.precisions:
            alone = resident_rate(scale, backbone, precision, device)
            with tempfile.TemporaryDirectory() as folder:
                experiment = whole_experiment(scale, backbone, Path(folder), device, precision)
                whole, largest = whole_rate(experiment, scale, Path(folder))
            ratio = whole / alone
            table.append({"backbone": backbone, "precision": precision, "whole images/s": whole, "alone": alone,
                          "ratio": ratio, "largest": largest})  # fmt: skip
    return table


def whole_experiment(scale: Scale, backbone: str, folder: Path, device: torch.device, precision: str) -> Experiment:
    """FedAvg on random pictures (on digits for the digits CNN) with this backbone."""
    experiment = experiment_for(backbone, folder, 1, 1)
    size = {} if backbone.startswith("digits") else {"data": {"image_size": scale.size}}
    train = {"precision": precision, "batch_size": scale.batch, "iterations": 2 if scale is SMALL else 50}
    return experiment.replace(train=train, run={"device": device.type}, **size)


def resident_rate(scale: Scale, backbone: str, precision: str, device: torch.device) -> float:
    """Images per second of forward and backward on one random batch that is on the device."""
    experiment = experiment_of("fedavg", options(scale, backbone)).replace(train={"precision": precision})
    _, net = build(experiment, device)
    batch = RandomData(experiment, device).batch()

    def take() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(net(batch.images).float(), batch.labels)
        loss.backward()
        net.zero_grad(set_to_none=True)

    medians, _ = compare({f"{backbone} {precision} alone": take}, max(scale.repeats, 3), device)
    return 1e3 * scale.batch / medians[f"{backbone} {precision} alone"]


def whole_rate(experiment: Experiment, scale: Scale, folder: Path) -> tuple[float, str]:
    """(images per second of all rounds after the first, the operations that took most of the time)."""
    seconds = []
    activities = [torch.profiler.ProfilerActivity.CPU]
    if experiment.run.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for number, rounds in enumerate((1, 1 + scale.rounds)):
        run = experiment.replace(train={"rounds": rounds}, run={"output": str(folder / f"run{number}")})
        close_workspaces()
        started = time.perf_counter()
        found = pd.read_csv(launch(run) / "clients.csv")
        seconds.append(time.perf_counter() - started)
    with torch.profiler.profile(activities=activities) as profile:
        launch(experiment.replace(train={"rounds": 1}, run={"output": str(folder / "profile")}))
    key = "self_device_time_total" if experiment.run.device == "cuda" else "self_cpu_time_total"
    items = sorted(profile.key_averages(), key=lambda item: -getattr(item, key))[:3]
    images = found.query("round > 1")["images"].sum()
    return images / max(seconds[1] - seconds[0], 1e-9), ", ".join(item.key[:40] for item in items)


def synchronisation(scale: Scale, device: torch.device) -> Table:
    """4. Does the host wait for the device inside a local step? PyTorch raises where it does."""
    table: Table = []
    for method, take in measurable(list(scale.methods), options(scale, scale.backbones[0]), device).items():
        take()
        table.append({"method": method, "waits": first_wait(take, device)})
    return table


def first_wait(take: Callable[[], None], device: torch.device) -> str:
    """The first operation that waits for the device; "none" without any, and on a CPU "not a GPU"."""
    if device.type != "cuda":
        take()
        return "not a GPU"
    torch.cuda.set_sync_debug_mode("error")
    try:
        take()
    except RuntimeError as error:
        return str(error).splitlines()[0][:100]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


def small_nets(scale: Scale, device: torch.device) -> Table:
    """5. Clients per second of the digits CNN with every way to train them, and the ratio to a plain PyTorch loop."""
    settings: dict[str, dict] = {
        "sequential": {},
        "side by side": {"side_by_side": max(scale.clients) + 1},
        "compiled": {"compile": "default"},
        "CUDA graphs": {"compile": "reduce-overhead"},
    }
    table: Table = []
    for count in scale.clients:
        per_domain = max(count // 3, 1)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            base = experiment_for("digits-cnn-bn", folder, 1, 1)
            data = {"domains": ["rot0", "rot15", "rot30", "rot45"], "clients_per_domain": per_domain}
            run = {"device": device.type, "target": "rot45"}
            base = base.replace(data=data, run=run, train={"iterations": 4, "batch_size": 16})
            clients = 3 * per_domain
            ways = {"bare loop": lambda run: bare_loop(run, device)}
            for mode in scale.modes:
                ways[mode] = lambda run, changes=settings[mode]: launch(run.replace(train=changes))
            rates = {mode: clients / round_seconds(way, base, scale, folder / mode) for mode, way in ways.items()}
        table += [{"clients": clients, "way": mode, "clients/s": value, "ratio": value / rates["bare loop"]}
                  for mode, value in rates.items()]  # fmt: skip
    return table


def round_seconds(way: Callable[[Experiment], object], base: Experiment, scale: Scale, folder: Path) -> float:
    """Seconds of one round: from the time of several rounds, that of one round with all initial work is subtracted."""
    seconds = []
    for number, rounds in enumerate((1, 1 + 2 * scale.rounds)):
        close_workspaces()
        run = base.replace(train={"rounds": rounds}, run={"output": str(folder / str(number))})
        started = time.perf_counter()
        way(run)
        seconds.append(time.perf_counter() - started)
    return max(seconds[1] - seconds[0], 1e-9) / (2 * scale.rounds)


def memory(scale: Scale, device: torch.device) -> Table:
    """6. Peak device memory of one step of every method, in MiB, and the ratio to FedAvg's."""
    table: Table = []
    for method in scale.methods:
        rows = measurable([method], options(scale, scale.backbones[-1]), device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for take in rows.values():
            take()
            peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else float("nan")
            table.append({"method": method, "MiB": peak, "ratio": peak / table[0]["MiB"] if table else 1.0})
    return table


def training(scale: Scale, device: torch.device) -> Table:
    """7. Commands for real training and for two runs on one device; each command resumes its unfinished runs."""
    return [{"command": f"`{command} --set run.device={device.type}`"} for command in TRAINING]


CHECKS: dict[str, Callable[[Scale, torch.device], Table]] = {
    "runs": runs, "steps": steps, "rate": rate, "synchronisation": synchronisation, "small-nets": small_nets,
    "memory": memory, "training": training,
}  # fmt: skip


def main(words: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", default=",".join(CHECKS))
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--small", action="store_true", help="two methods, the digits CNN, a few steps")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "GPU.md")
    args = parser.parse_args(words)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; --small --device cpu tries the same code on a CPU")
    device, scale = torch.device(args.device), SMALL if args.small else FULL
    with args.output.open("a", encoding="utf-8") as file:
        file.write(f"\n## {machine(device)}\n")
        for name in args.checks.split(","):
            print(f"{name} ...", flush=True)
            text = markdown(CHECKS[name](scale, device))
            said = " ".join(CHECKS[name].__doc__.split())
            file.write(f"\n`python benchmarks/gpu.py --checks {name}`: {said}\n\n{text}\n")
            file.flush()
            print(text, flush=True)


if __name__ == "__main__":
    main()
