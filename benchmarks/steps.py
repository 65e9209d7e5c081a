"""Milliseconds of one local step, or of inference, for any rows of METHODS, interleaved in one process.

    python benchmarks/steps.py --methods fedavg,fedig,fedig-a --threads 1
    python benchmarks/steps.py --methods fedig,fedig-a --inference --rules eval_mode,zero_shot_adapter

The first row is the reference of the ratios. Each repetition takes every row once, in turn, so that a busy machine
slows all of them alike; the ratio is the median over repetitions of the ratio within one repetition. The last column
is the same of processor time, which other processes disturb least (with one thread). Images are random.
Only steps that need no bank of other clients run here; a prelude (CSAC's acquisition) is done once, untimed.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from clients.base import freeze
from clients.networks import after_step_functions
from clients.optimizers import make_optimizer
from clients.parts import Batch, LocalRound
from clients.store import ClientStore
from fedsim.assembly import build_recipe
from fedsim.experiment import Experiment
from fedsim.models import Net, build_model
from fedsim.recipe import Recipe
from strategies.banks.global_batch_norm import GlobalBatchNorm

CLASSES = 7


class RandomData:
    """As much of a client's data as steps look at: one batch of random images."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(args.batch, 3, args.size, args.size, generator=generator).to(device)
        self.labels = torch.randint(CLASSES, (args.batch,), generator=generator).to(device)
        self.examples = args.batch
        self.augment: Callable | None = None

    def batch(self) -> Batch:
        """The batch, as prepared for a step."""
        images, positions = self.transfer(self.images), self.training_positions()
        return Batch(
            self.normalize(images), self.labels, self.images, positions, self.normalize, images, self.normalize
        )

    def transfer(self, images: torch.Tensor) -> torch.Tensor:
        """What the recipe's augmentation makes of the images."""
        return self.augment(images, self.training_positions()) if self.augment else images

    @staticmethod
    def normalize(images: torch.Tensor) -> torch.Tensor:
        """The normalisation of the batch."""
        return images * 2 - 1

    def evaluation(self, positions, size: int):
        """Pairs of images and labels."""
        yield self.images[: len(positions)] * 2 - 1, self.labels[: len(positions)]

    def training_positions(self):
        """Positions of all images."""
        return torch.arange(self.examples).numpy()


def build(method: str, args: argparse.Namespace, device: torch.device) -> tuple[Recipe, Experiment, Net]:
    """Recipe, settings and network of one row; settings of absent parts are left out."""
    model = {"backbone": args.backbone, "bottleneck": args.bottleneck}
    train = {"lr": 0.01, "momentum": 0.5, "rounds": 40}
    experiment = Experiment(method={"name": method}, model=model, train=train)
    recipe = build_recipe(experiment)
    net = build_model(experiment.model, CLASSES, 3, args.size, recipe.norm, 0)
    for part in recipe.inserts:
        part.apply(net)
    net = net.to(device)
    return recipe, experiment, net.to(memory_format=torch.channels_last) if device.type == "cuda" else net


def local_round(recipe: Recipe, experiment: Experiment, net: Net, data: RandomData, phase: str) -> LocalRound:
    """Round 2 of a client that has everything but the banks of others."""
    state = {name: value.detach().cpu().numpy() for name, value in net.state_dict().items()}
    device = data.images.device
    found = LocalRound(
        client="bench",
        net=net,
        train=experiment.train,
        classes=CLASSES,
        round=2,
        rounds=40,
        phase=phase,
        seed=0,
        device=device,
        store=ClientStore(None),
        data=data,
        records={GlobalBatchNorm.name: state},
    )
    found.lr, found.optimizer = experiment.train.lr, make_optimizer(net, experiment.train, experiment.train.lr)
    return found


def timed_step(method: str, args: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """Function that takes one local step of the row."""
    recipe, experiment, net = build(method, args, device)
    data = RandomData(args, device)
    still = freeze(net, dict.fromkeys(net.state_dict(), "shared") | dict.fromkeys(net.frozen, "frozen"))
    net.train()
    for module in still:
        module.eval()
    with torch.no_grad():
        net(data.images)  # running statistics as after a round, not the untouched 0 and 1
    round = local_round(recipe, experiment, net, data, recipe.client.prelude or "train")
    if recipe.client.prelude:
        recipe.client.begin(round)
        recipe.client.end(round)
        round.store.commit()
        round.store.open_round(3)
        round.phase = "train"
    round.terms = [function for term in recipe.terms if (function := term.begin(round)) is not None]
    step = recipe.client.begin(round)
    data.augment = recipe.augment.begin(round) if recipe.augment and recipe.augment.late else None
    hooks = after_step_functions(net)

    def take() -> None:
        step(data.batch())
        for hook in hooks:
            hook()

    return take


def timed_inference(method: str, rule: str, args: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """Function that predicts one batch by a row's own rule, or by another one."""
    recipe, experiment, net = build(method, args, device)
    if rule:
        recipe = build_recipe(experiment.replace(method={"infer": rule}))
    images = RandomData(args, device).images * 2 - 1
    with torch.no_grad():
        net.train()(images)
        predict = recipe.infer.begin(net, lambda: [images], [])

    @torch.inference_mode()
    def take() -> None:
        predict(images)

    return take


def compare(rows: dict[str, Callable[[], None]], repeats: int, device: torch.device) -> None:
    """Print one line a row: best and median milliseconds, ratios to the first row of wall time and processor time."""
    times: dict[str, list[float]] = {name: [] for name in rows}
    processor: dict[str, list[float]] = {name: [] for name in rows}
    for repetition in range(repeats + 2):  # two to warm up
        for name, take in rows.items():
            started, busy = time.perf_counter(), time.process_time()
            take()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repetition >= 2:
                times[name].append(time.perf_counter() - started)
                processor[name].append(time.process_time() - busy)
    first = next(iter(times))
    print(f"{'row':32} {'best ms':>9} {'median ms':>10} {'ratio':>7} {'best/best':>10} {'cpu ratio':>10}")
    for name, values in times.items():
        print(
            f"{name:32} {1e3 * min(values):9.1f} {1e3 * statistics.median(values):10.1f} "
            f"{paired(values, times[first]):7.3f} {min(values) / min(times[first]):10.3f} "
            f"{paired(processor[name], processor[first]):10.3f}"
        )


def paired(values: list[float], reference: list[float]) -> float:
    """Median over repetitions of the ratio within one repetition."""
    return statistics.median(value / base for value, base in zip(values, reference, strict=True))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="fedavg,fedig,fedig-a", help="rows of METHODS, the first is the reference")
    parser.add_argument("--inference", action="store_true", help="time prediction instead of a training step")
    parser.add_argument("--rules", default="", help="with --inference: other infer parts, on the last row")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--bottleneck", type=int, default=256)
    parser.add_argument("--size", type=int, default=64, help="side of the images in pixels")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    methods = args.methods.split(",")
    if args.inference:
        rows = {method: timed_inference(method, "", args, device) for method in methods}
        rows |= {
            f"{methods[-1]} {rule}": timed_inference(methods[-1], rule, args, device)
            for rule in args.rules.split(",")
            if rule
        }
    else:
        rows = {method: timed_step(method, args, device) for method in methods}
    print(
        f"{args.backbone}, bottleneck {args.bottleneck}, {args.size} px, batch {args.batch}, "
        f"{args.threads} thread(s), {args.device}, torch {torch.__version__}"
    )
    compare(rows, args.repeats, device)


if __name__ == "__main__":
    main()
