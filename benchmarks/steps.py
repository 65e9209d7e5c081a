"""Milliseconds of one local step, or of inference, for any rows of METHODS, which take turns in one process.

    python benchmarks/steps.py --methods fedavg,fedig,fedig-a --threads 1
    python benchmarks/steps.py --methods fedig,fedig-a --inference --rules eval_mode,zero_shot_adapter
    python benchmarks/steps.py --methods all --write fedsim/methods/step_costs.csv        (what `fedsim methods` shows)
    python benchmarks/steps.py --methods fedavg,elcfs --data digit-masks --backbone unet-small --size 48 --bottleneck 0
    python benchmarks/steps.py --methods fedclip,promptfl,fedapt,plan --backbone tiny-clip --head text --bottleneck 0 \
        --train head                                          (rows that learn texts, next to FedCLIP on the same CLIP)
    python benchmarks/steps.py --table csac-table-3 --record      (the times that `fedsim sweep TABLE --dry-run` uses)

Ratios are to the first row. Each repetition measures every row once, so that other programs slow all rows equally; the
printed ratio is the median over the repetitions of the ratio within one repetition. The last column is the ratio of
processor time, on which other processes have the least influence (with one thread). Images are random, and belong to
four domains in turn, which rows compare that need several domains of a client. What other clients would send (styles,
amplitudes, heads, prototypes) is computed from random images of two other clients, or from the network itself. A
prelude (CSAC's acquisition) and a first round are done before the measurement. Work outside the steps (reports,
FedIIR's pass for its gradients) is not measured. Rows that learn texts run on no ResNet, so that --write leaves them
out. They are compared with FedCLIP, because FedAvg trains nothing where CLIP's encoders stay.

Many rows are measured in groups of --group, each together with the first row. With --write the ratios (of processor
time on a CPU, of wall time on a GPU) are written after every group. Rows that the file already has for this setting are
not measured again unless --again is given, so that the same command continues where it was stopped.

With --table every row of a paper's table is measured in its own settings (backbone, image size, batch). --record writes
the medians to fedsim/studies/step_times.csv with the machine's name: of processor time with one thread on a CPU,
otherwise of wall time. `--methods fedavg` is enough for a table: the hours of other rows then follow from their ratios
in step_costs.csv.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from step_data import RandomData, collected_records, made_up_records
from step_tables import record, table_experiments, write_costs, written_costs
from turns import PROCESSOR, WALL, Turn, clocked, medians, paired_ratio, take_turns

from clients.optimizers import make_optimizer
from clients.parts import LocalRound, StepFunction
from clients.store import ClientStore
from clients.tools.networks import after_step_functions, freeze
from fedsim.common.errors import UserError
from fedsim.data import benchmark
from fedsim.methods.assembly import build_recipe
from fedsim.methods.recipe import Recipe
from fedsim.methods.table import METHODS
from fedsim.models import Net
from fedsim.runs.plan import build_net
from fedsim.settings.experiment import Experiment
from fedsim.studies.estimate import step_key


def experiment_of(method: str, args: argparse.Namespace) -> Experiment:
    """The settings of one row of METHODS with the options of the command line."""
    return Experiment(
        data={"dataset": args.data, "image_size": args.size},
        model={"backbone": args.backbone, "bottleneck": args.bottleneck, "head": args.head, "train": args.train},
        train={"lr": 0.01, "momentum": 0.5, "rounds": 40, "batch_size": args.batch},
        method={"name": method},
    )


def build(experiment: Experiment, device: torch.device) -> tuple[Recipe, Net]:
    """Recipe and network of one row, with random weights."""
    recipe = build_recipe(experiment)
    net = build_net(experiment.replace(model={"weights": "none"}), recipe).to(device)
    return recipe, net.to(memory_format=torch.channels_last) if device.type == "cuda" else net


def local_round(
    recipe: Recipe, experiment: Experiment, net: Net, data: RandomData, phase: str, number: int, store: ClientStore
) -> LocalRound:
    """A round of a client, with invented records for all parts that read some."""
    classes = len(benchmark(experiment.data).classes)
    found = LocalRound(
        client="bench",
        net=net,
        train=experiment.train,
        classes=classes,
        round=number,
        rounds=40,
        phase=phase,
        seed=0,
        device=data.images.device,
        store=store,
        data=data,
        clients=("bench",),
        records=made_up_records(net, classes),
        task=data.task,
        steps=1,
        build_net=lambda: build(experiment, torch.device("cpu"))[1],
    )
    found.records |= collected_records(recipe, found)
    found.lr, found.optimizer = experiment.train.lr, make_optimizer(net, experiment.train, experiment.train.lr)
    return found


def timed_step(experiment: Experiment, device: torch.device) -> Callable[[], None]:
    """A function that takes one local step of the row in the client's second round, with what the first has stored."""
    recipe, net = build(experiment, device)
    data, store = RandomData(experiment, device), ClientStore(None)
    still = freeze(net, dict.fromkeys(net.state_dict(), "shared") | dict.fromkeys(net.frozen, "frozen"))
    hooks = after_step_functions(net)
    net.train()
    for module in still:
        module.eval()
    with torch.no_grad():
        net(data.images)  # so that the running statistics are not the initial 0 and 1
    for number, phase in enumerate([recipe.step.prelude, "train", "train"]):
        if not phase:
            continue
        store.open_round(number)
        round = local_round(recipe, experiment, net, data, phase, number, store)
        take = opened_step(recipe, round, data, hooks)
        if number < 2:
            take()
            for part in recipe.client_parts():
                part.end(round)
            store.commit()
    return take


def opened_step(
    recipe: Recipe, round: LocalRound, data: RandomData, hooks: list[Callable[[], object]]
) -> Callable[[], None]:
    """A function that takes one step of an opened round, with all that follows an update."""
    round.terms = [function for term in recipe.terms if (function := term.begin(round)) is not None]
    round.objective, round.update = recipe.objective.begin(round), recipe.update.begin(round)
    step: StepFunction = recipe.step.begin(round)
    round.after_step += [part.begin(round) for part in recipe.companions if part.acts(round.phase)]
    data.augment = recipe.augment.begin(round) if recipe.augment else None

    def take() -> None:
        batch = data.batch()
        step(batch)
        for function in round.after_step:
            function(batch)
        for hook in hooks:
            hook()

    return take


def timed_inference(method: str, rule: str, args: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """A function that predicts one batch by a row's own inference rule, or by another one."""
    experiment = experiment_of(method, args)
    recipe, net = build(experiment, device)
    if rule:
        recipe = build_recipe(experiment.replace(method={"infer": rule}))
    images = RandomData(experiment, device).images * 2 - 1
    with torch.no_grad():
        net.train()(images)
        predict = recipe.infer.begin(net, lambda: [images], [])

    @torch.inference_mode()
    def take() -> None:
        predict(images)

    return take


def compare(
    rows: dict[str, Callable[[], None]], repeats: int, device: torch.device
) -> tuple[dict[str, float], dict[str, float]]:
    """Print one line per row: best and median milliseconds, and ratios to the first row (wall and processor time).

    Returns the medians and the ratios of the kind of time on which other processes have the least influence.
    """
    sides = {name: clocked(partial(finished, take, device)) for name, take in rows.items()}
    turns = take_turns(sides, repeats, uncounted=2)
    first = next(iter(turns.values()))
    print(f"{'row':32} {'best ms':>9} {'median ms':>10} {'ratio':>7} {'best/best':>10} {'cpu ratio':>10}")
    for name, times in turns.items():
        print(f"{name:32} {in_numbers(times, first)}")
    fair = PROCESSOR if device.type == "cpu" else WALL
    alone = PROCESSOR if device.type == "cpu" and torch.get_num_threads() == 1 else WALL
    middle = {name: 1e3 * medians(times)[alone] for name, times in turns.items()}
    return middle, {name: paired_ratio(times, first, fair) for name, times in turns.items()}


def in_numbers(times: Sequence[Turn], first: Sequence[Turn]) -> str:
    """The times of a row, and their ratios to those of the first row."""
    best = min(wall for wall, _ in times)
    best_of_first = min(wall for wall, _ in first)
    median = medians(times)[WALL]
    wall, processor = (paired_ratio(times, first, place) for place in (WALL, PROCESSOR))
    return f"{1e3 * best:9.1f} {1e3 * median:10.1f} {wall:7.3f} {best / best_of_first:10.3f} {processor:10.3f}"


def finished(take: Callable[[], None], device: torch.device) -> None:
    """Take a step, and wait until a GPU has done it."""
    take()
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_table(args: argparse.Namespace, device: torch.device) -> None:
    """Measure the rows of a table, block by block, and write the times if --record is given."""
    for block, experiments in table_experiments(args.table, [name for name in args.methods.split(",") if name]).items():
        if not experiments or (args.block and block != args.block):
            continue
        first = experiments[0]
        print(
            f"{block}: {first.model.backbone}, bottleneck {first.model.bottleneck}, {first.data.image_size} px, batch "
            f"{first.train.batch_size}, {args.threads} thread(s), {args.device}, torch {torch.__version__}"
        )
        keys = {step_key(experiment)[-1]: experiment for experiment in experiments}
        rows = {label: timed_step(experiment, device) for label, experiment in keys.items()}
        medians, _ = compare(rows, args.repeats, device)
        if args.record:
            record({step_key(keys[label]): value for label, value in medians.items()}, args)


def measurable(methods: list[str], args: argparse.Namespace, device: torch.device) -> dict[str, Callable[[], None]]:
    """The steps of the rows that can be measured here; prints a line for each row that cannot."""
    rows = {}
    for method in methods:
        try:
            rows[method] = timed_step(experiment_of(method, args), device)
        except UserError as error:
            print(f"{method}: not measured: {error}")
    return rows


def compare_groups(methods: list[str], args: argparse.Namespace, device: torch.device) -> None:
    """Compare rows in groups, each together with the first row; with --write write the ratios after every group."""
    setting = (
        f"{args.backbone}, bottleneck {args.bottleneck}, {args.size} px, batch {args.batch}, "
        f"{args.threads} thread(s), {args.device}, torch {torch.__version__}"
    )
    print(setting if args.data == "pacs" else f"{args.data}: {setting}")
    done = written_costs(args.write, setting) if args.write and not args.again else {}
    left = [method for method in methods[1:] if method not in done]
    for start in range(0, max(len(left), 1), args.group):
        rows = measurable([methods[0], *left[start : start + args.group]], args, device)
        _, ratios = compare(rows, args.repeats, device)
        if args.write:
            write_costs(args.write, ratios, setting)


def arguments() -> argparse.Namespace:
    """The command line; without a table `methods` names the rows afterwards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--methods", default="", help="rows of METHODS, the first is the reference (fedavg,fedig,fedig-a); all"
    )
    parser.add_argument("--table", default="", help="time the rows of a paper's table in their own settings")
    parser.add_argument("--block", default="", help="with --table: one block of it")
    parser.add_argument("--record", action="store_true", help="with --table: write fedsim/studies/step_times.csv")
    parser.add_argument("--write", type=Path, help="write the ratios to this table")
    parser.add_argument("--again", action="store_true", help="with --write: measure what the table has, too")
    parser.add_argument("--group", type=int, default=8, help="rows that are measured in turn, besides the first one")
    parser.add_argument("--data", default="pacs", help="data set whose classes, channels and task are taken")
    parser.add_argument("--inference", action="store_true", help="time prediction instead of a training step")
    parser.add_argument("--rules", default="", help="with --inference: other infer parts, on the last row")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--bottleneck", type=int, default=256)
    parser.add_argument("--head", default="linear", choices=["linear", "text"])
    parser.add_argument("--train", default="all", help="model.train: what is trained (head: the encoders stay)")
    parser.add_argument("--size", type=int, default=64, help="side of the images in pixels")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    if not args.table:
        names = list(METHODS) if args.methods == "all" else (args.methods or "fedavg,fedig,fedig-a").split(",")
        if args.write and names[0] != "fedavg":
            parser.error("--write takes ratios to FedAvg's step: name fedavg first in --methods")
        args.methods = ",".join(names)
    return args


def main() -> None:
    """Measure a table's rows, inference rules, or the steps of rows."""
    args = arguments()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    if args.table:
        time_table(args, device)
        return
    methods = args.methods.split(",")
    if args.inference:
        rows = {method: timed_inference(method, "", args, device) for method in methods}
        rows |= {
            f"{methods[-1]} {rule}": timed_inference(methods[-1], rule, args, device)
            for rule in args.rules.split(",")
            if rule
        }
        compare(rows, args.repeats, device)
    else:
        compare_groups(methods, args, device)


if __name__ == "__main__":
    main()
