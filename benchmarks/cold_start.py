"""How long a site's client app takes from the start of its process to its first optimizer step, and why.

    python benchmarks/cold_start.py [--set key=value ...] [--config digits] [--repeats 5]
    python benchmarks/cold_start.py --run [--set key=value ...] [--config hospitals]

Every message of a deployed run starts a new process. Each repetition starts a new `python`, imports what Flower's
client process imports, loads the app, opens cached data and takes one step. The import of PyTorch is measured in the
same way. Wall seconds and processor seconds are printed; on a busy machine only processor seconds are useful.

With --run it is the command `fedsim run` on a terminal, next to an import of PyTorch alone: wall seconds to its first
line and to its end, and processor seconds.
"""

import argparse
import itertools
import json
import os
import pty
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from turns import Turn, medians, take_turns

STAGES = ("import torch", "import flwr", "import fedsim", "open data and model", "first step")


def child(settings: str, state: str) -> None:
    """Run one client app in this new process; print the (wall, processor) seconds of each stage."""
    marks = [(float(os.environ["COLD_STARTED"]), 0.0), mark()]
    import torch  # noqa: F401

    marks.append(mark())
    import flwr.supernode.cli.flwr_clientapp  # noqa: F401

    marks.append(mark())
    import fedsim.apps.client as client_app

    marks.append(mark())
    from clients.parts import LocalRound

    message, context = order(settings, state)
    stepped: list[tuple[float, float]] = []
    apply_gradients = LocalRound.apply_gradients

    def stepping(round: LocalRound, loss: object) -> None:
        """Take a step, and note when the first one has ended."""
        apply_gradients(round, loss)
        stepped.append(mark())

    LocalRound.apply_gradients = stepping
    client_app.space_of(message, context)
    client, _ = client_app.client_of(message, context)
    marks.append(mark())
    message.content["arrays"] = client_app.state_to_record({name: client.state[name] for name in client.names("train")})
    prepared = mark()
    reply = client_app.train(message, context)
    if reply.has_error():
        raise RuntimeError(reply.error.reason)
    spans = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(marks)]
    spans.append((stepped[0][0] - prepared[0], stepped[0][1] - prepared[1]))
    print(json.dumps(spans))


def mark() -> tuple[float, float]:
    """The present time as (wall, processor) seconds."""
    return time.time(), time.process_time()


def order(settings: str, state: str) -> tuple:
    """(a train message of round 1 for the first source client, the site's context)."""
    from flwr.app import ConfigRecord, Context, Message, RecordDict

    from fedsim.flower.identity import assume_identity
    from fedsim.runs.plan import resolve
    from fedsim.settings.experiment import parse_experiment

    assume_identity(1)
    name = resolve(parse_experiment(settings)).clients[0]
    config = {"experiment": settings, "token": "c01dc01dc01dc01d", "round": 1, "phase": "train", "client": name}
    config |= {"state-dir": "", "timeout": 60.0}
    node = {"site": "cold", "domain": name, "role": "source", "state-dir": state}
    root = parse_experiment(settings).data.root
    context = Context(1, 2, {**node, **({"data-dir": root} if root else {})}, RecordDict(), {})
    return Message(RecordDict({"config": ConfigRecord(config)}), 2, "train"), context


def on_a_terminal(words: list[str]) -> tuple[float, float, float]:
    """Run Python with these words: (wall seconds to its first output, to its end, processor seconds)."""
    started = time.time()
    process, terminal = pty.fork()
    if not process:
        os.execv(sys.executable, [sys.executable, *words])
    first = 0.0
    output = b""
    try:
        while part := os.read(terminal, 4096):
            first = first or time.time() - started
            output += part
    except OSError:  # the process has closed the terminal
        pass
    _, status, usage = os.wait4(process, 0)
    os.close(terminal)
    if status:
        raise RuntimeError(output.decode(errors="replace"))
    return first, time.time() - started, usage.ru_utime + usage.ru_stime


def start_of_a_run(config: str, overrides: list[str], repeats: int) -> None:
    """Print the medians of the command and of an import of PyTorch, which take turns."""
    options = []
    for override in overrides:
        options += ["--set", override]
    numbers = itertools.count()
    with tempfile.TemporaryDirectory() as folder:

        def command() -> Turn:
            words = ["-m", "fedsim", "run", config, *options, "--output", f"{folder}/{next(numbers)}"]
            return on_a_terminal(words)

        sides = {"import torch": lambda: on_a_terminal(["-c", "import torch"]), f"fedsim run {config}": command}
        turns = take_turns(sides, repeats, uncounted=1)  # the first one fills the caches
    for name, times in turns.items():
        first, end, processor = medians(times)
        line = f"first line after {first:.2f} s, " if first else ""
        print(f"{name}: {line}end after {end:.2f} s (wall), {processor:.2f} processor seconds")


def start_of_a_client(config: str, overrides: list[str], repeats: int) -> None:
    """Print the medians of the stages of a client app's start, and what they take above an import of PyTorch."""
    from fedsim.runs.plan import complete
    from fedsim.settings.experiment import read_experiment

    settings = complete(read_experiment(config, ["run.device=cpu", *overrides])).toml()
    starts = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "settings.toml").write_text(settings)
        for number in range(repeats + 1):
            starts.append(start_of_a_child(folder, number))
    print(f"{config} {' '.join(overrides)}: median of {repeats}, seconds (wall / processor)")
    stages = [medians(stage) for stage in zip(*starts[1:], strict=True)]  # the first one fills the caches
    for name, (wall, processor) in zip(("start Python", *STAGES), stages, strict=True):
        print(f"  {name:22}{wall:7.2f} /{processor:6.2f}")
    wall, processor = (sum(times) for times in zip(*stages[:1], *stages[2:], strict=True))
    print(f"  {'above import torch':22}{wall:7.2f} /{processor:6.2f}")


def start_of_a_child(folder: str, number: int) -> list[Turn]:
    """The (wall, processor) seconds of each stage of one client app in a process of its own."""
    environment = {**os.environ, "COLD_STARTED": repr(time.time())}
    command = [sys.executable, __file__, "child", f"{folder}/settings.toml", f"{folder}/state{number}"]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure a client app's start, or with --run a command's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="the command `fedsim run` in place of a client app")
    parser.add_argument("--config", default="")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--repeats", type=int, default=5)
    words = parser.parse_args()
    if words.run:
        start_of_a_run(words.config or "hospitals", words.set or ["train.rounds=1"], words.repeats)
    else:
        start_of_a_client(words.config or "digits", words.set, words.repeats)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(Path(sys.argv[2]).read_text(), sys.argv[3])
    else:
        main()
