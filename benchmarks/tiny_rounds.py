"""Where the time of a round goes when the network hardly computes, next to a bare PyTorch loop of the same arithmetic.

    python benchmarks/tiny_rounds.py                                  (all cases)
    python benchmarks/tiny_rounds.py --cases linear,mlp --repeats 5
    python benchmarks/tiny_rounds.py --cases linear --list 60         (the functions that take most of the time)

The cases: three hospitals with logistic regression (`linear`) and with a network of one hidden layer (`mlp`), the small
CNN on five domains of ten digits each, whose clients train a step (`digits`), and a thousand clients that all take part
(`thousand`). Both sides take turns in one process with one thread. The bare loop has its tensors ready, standardized:
it takes the same number of steps on batches of the same size, averages the clients' models by examples, validates on
every client and tests on the unseen domain in each round. It writes and checks nothing.

Times are those of the processor, so that other programs disturb them little. A round's "own" time is what fedsim takes
in addition to the bare loop, for each client and round. The list is a sample of the call stack every few milliseconds
of processor time, and says what a function takes with all that it calls, in microseconds for each client and round.
"""

import argparse
import collections
import itertools
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import torch
import torch.nn.functional as F
from overhead import average, batches
from rich.console import Console
from rich.table import Table
from thirty_clients import THOUSAND
from torch import Tensor, nn
from turns import Measured, Turn, clocked, paired_ratio, take_turns

from fedsim.runs.plan import Plan, complete, resolve
from fedsim.runs.target import TargetEvaluator
from fedsim.runs.workspace import Workspace, close_workspaces, set_threads, workspace
from fedsim.runtime.launch import carry_out
from fedsim.settings.experiment import Experiment, from_table, read_experiment
from strategies.base import FedDG

GOAL_MICROSECONDS = 600  # own time for each client and round
TICK_SECONDS = 0.001  # the system may round it up
ROOT = Path(__file__).resolve().parent.parent
ROUNDS = {"linear": 300, "mlp": 300, "digits": 100, "thousand": 2}


def experiment_of(case: str, output: str) -> Experiment:
    """The experiment of a case, in one process with one thread."""
    run = {"output": output, "threads": 1, "processes": 1, "device": "cpu"}
    train = {"rounds": ROUNDS[case]}
    if case == "thousand":
        return complete(from_table(THOUSAND).replace(run=run, train=train))
    if case == "digits":
        settings = ["data.fraction=0.02", "train.iterations=1", "train.batch_size=8", "run.target=rot75"]
        return complete(read_experiment("digits", settings).replace(run=run, train=train))
    hidden = [] if case == "linear" else ["model.backbone=mlp"]
    return complete(read_experiment("hospitals", ["run.target=hungary", *hidden]).replace(run=run, train=train))


# --- the bare loop --------------------------------------------------------------------------------------------------


class BareLoop:
    """The same federation as a plain loop, of tensors that are ready."""

    def __init__(self, experiment: Experiment) -> None:
        self.train, plan = experiment.train, resolve(experiment)
        space = scaled_workspace(plan)
        clients = [space.local_data(name) for name in plan.clients]
        self.net: nn.Module = plan.build_net()
        self.data = [(data.raw(np.arange(len(data.labels))), data.labels) for data in clients]
        self.indices = [(torch.arange(data.examples), torch.from_numpy(data.validation)) for data in clients]
        self.weights = np.array([data.examples for data in clients]) / sum(data.examples for data in clients)
        target = list(TargetEvaluator(space).batches())
        self.target = torch.cat([images for images, _ in target]), torch.cat([labels for _, labels in target])
        self.normalize = space.transforms.normalize

    def __call__(self) -> float:
        """Plays all rounds; returns the accuracy on the unseen domain."""
        state = {name: value.clone() for name, value in self.net.state_dict().items()}
        everything = torch.arange(len(self.target[1]))
        accuracy = 0.0
        for _ in range(self.train.rounds):
            states = []
            for (x, y), (own, _) in zip(self.data, self.indices):
                self.net.load_state_dict(state)
                self.take_steps(x, y, own)
                states.append({name: value.clone() for name, value in self.net.state_dict().items()})
            state = {name: average([other[name] for other in states], self.weights) for name in state}
            self.net.load_state_dict(state)
            for (x, y), (_, held) in zip(self.data, self.indices):
                self.accuracy(self.normalize(x[held]), y[held], torch.arange(len(held)))
            accuracy = self.accuracy(*self.target, everything)
        return accuracy

    def take_steps(self, x: Tensor, y: Tensor, indices: Tensor) -> None:
        """The steps of one client in one round."""
        train = self.train
        optimizer = torch.optim.SGD(self.net.parameters(), train.lr, momentum=train.momentum)
        self.net.train()
        for batch in batches(indices, train):
            loss = F.cross_entropy(self.net(self.normalize(x[batch])), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.inference_mode()
    def accuracy(self, x: Tensor, y: Tensor, indices: Tensor) -> float:
        """The accuracy on some examples, in batches of 256."""
        self.net.eval()
        correct = 0
        for batch in indices.split(256):
            correct += (self.net(x[batch]).argmax(1) == y[batch]).sum().item()
        return correct / max(len(indices), 1)


def scaled_workspace(plan: Plan) -> Workspace:
    """The workspace of a plan, whose features are standardized by the sums of all clients, as the handshake does."""
    from fedsim.data.scaling import scale_of

    space = workspace(plan.experiment.toml())
    features, targets = space.summed
    if features or targets:
        space.use_scale(scale_of([space.moments(name, "") for name in plan.clients]))
    return space


# --- what is measured -----------------------------------------------------------------------------------------------


class Samples:
    """Call stacks that were seen while the rounds were played."""

    def __init__(self) -> None:
        self.stacks = 0
        self.functions: collections.Counter[str] = collections.Counter()

    def take(self, _: int, frame: FrameType | None) -> None:
        """Notes the functions of the stack, each once."""
        self.stacks += 1
        seen = set()
        while frame is not None:
            code = frame.f_code
            file = Path(code.co_filename)
            if file.is_relative_to(ROOT) and ".venv" not in file.parts:
                seen.add(f"{file.relative_to(ROOT)}: {code.co_qualname}")
            frame = frame.f_back
        self.functions.update(seen)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Within this block stacks are sampled."""
        signal.signal(signal.SIGPROF, self.take)
        signal.setitimer(signal.ITIMER_PROF, TICK_SECONDS, TICK_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def seconds_of_rounds(experiment: Experiment, samples: Samples | None) -> float:
    """Seconds of the processor that a run takes from its first round to the end of its last one."""
    start, seconds = FedDG.start, []

    def timed(strategy: FedDG, *arguments: object, **settings: object) -> object:
        started = time.process_time()
        if samples is None:
            result = start(strategy, *arguments, **settings)
        else:
            with samples.taken():
                result = start(strategy, *arguments, **settings)
        seconds.append(time.process_time() - started)
        return result

    FedDG.start = timed
    try:
        close_workspaces()
        carry_out(resolve(experiment))
    finally:
        FedDG.start = start
    return seconds[0]


def measure(case: str, repeats: int) -> tuple[Measured, Samples, int]:
    """(processor seconds of the turns of both sides, samples of fedsim, clients times rounds) of a case."""
    samples, numbers = Samples(), itertools.count()
    with tempfile.TemporaryDirectory() as output:
        bare = BareLoop(experiment_of(case, output))

        def plain() -> Turn:
            set_threads(1)
            _, processor = clocked(bare)()
            return (processor,)

        def ours() -> Turn:
            return (seconds_of_rounds(experiment_of(case, f"{output}/{next(numbers)}"), None),)

        turns = take_turns({"bare": plain, "fedsim": ours}, repeats)
        seconds_of_rounds(experiment_of(case, f"{output}/sampled"), samples)
    return turns, samples, len(bare.data) * ROUNDS[case]


def show(case: str, turns: Measured, samples: Samples, visits: int, most: int) -> None:
    """Prints the ratio, the own time of each client and round, and the list of functions."""
    bare, ours = turns["bare"], turns["fedsim"]
    ratio = paired_ratio(ours, bare)
    one, other = min(bare)[0] / visits * 1e6, min(ours)[0] / visits * 1e6
    console = Console(width=120)
    console.print(
        f"{case}: {ratio:.2f} x the bare loop (median of {len(bare)} pairs); for each client and round "
        f"{one:.0f} us there, {other:.0f} us here, {other - one:.0f} us own (goal: {GOAL_MICROSECONDS})"
    )
    table = Table("microseconds", "function, with what it calls")
    for name, count in samples.functions.most_common(most):
        table.add_row(f"{other * count / max(samples.stacks, 1):.0f}", name)
    if most:
        console.print(table)


def main() -> None:
    """Measures the cases one after the other and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(ROUNDS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--list", type=int, default=40)
    options = parser.parse_args()
    for case in options.cases.split(","):
        show(case, *measure(case, options.repeats), options.list)


if __name__ == "__main__":
    main()
