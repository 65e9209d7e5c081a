"""Wall time of an inline run in one process, divided by that of a plain PyTorch loop that does the same work.

    python benchmarks/overhead.py --model digits-cnn-bn --repeats 5
    python benchmarks/overhead.py --model resnet18 --repeats 3

Both sides take turns in one process. They load the data, build the model, take the same number of local steps on
batches of the same size with the same augmentation, average the clients' models by examples, validate on every client
and test on the unseen domain in each round. The plain ("bare") loop is simple code: one model, state_dict copies,
torch.optim.SGD, and no records, checkpoints or checks. Targets: at most 1.10 for the digits CNN, and 1.03 for ResNet-18
at 64 pixels.
"""

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from turns import Turn, clocked, medians, paired_ratio, say, take_turns

from fedsim.data import ClientData, client_names, load_client, load_target
from fedsim.data.augment import make_transforms, to_float
from fedsim.methods.assembly import build_net, build_recipe
from fedsim.runs.plan import complete
from fedsim.runs.workspace import close_workspaces
from fedsim.runtime.launch import launch
from fedsim.settings.experiment import Experiment, from_table


def bare_loop(experiment: Experiment, device: torch.device | None = None) -> float:
    """The same federation as a plain loop; returns the accuracy on the unseen domain.

    All images are on the device (by default the CPU).
    """
    data, train, device = experiment.data, experiment.train, device or torch.device("cpu")
    net = build_net(experiment, build_recipe(experiment)).to(device)
    clients = [load_client(data, name) for name in client_names(data, experiment.run.target)]
    transforms = make_transforms(data, clients[0].images.shape[1])
    tensors = on_device(clients, device)
    target = target_on(device, experiment)
    everything = torch.arange(len(target[1]))
    counts = np.array([client.examples for client in clients])
    weights = counts / counts.sum()
    state = copied(net)
    accuracy = evaluate(net, *target, everything, transforms)
    for _ in range(train.rounds):
        states = []
        for client, (x, y) in zip(clients, tensors):
            net.load_state_dict(state)
            train_locally(net, x, y, torch.from_numpy(client.train), transforms, train)
            states.append(copied(net))
        state = average_state(states, weights)
        net.load_state_dict(state)
        validate(net, clients, tensors, transforms)
        accuracy = evaluate(net, *target, everything, transforms)
    return accuracy


def validate(
    net: torch.nn.Module,
    clients: list[ClientData],
    tensors: list[tuple[torch.Tensor, torch.Tensor]],
    transforms: object,
) -> None:
    """The accuracy on the validation images of each client."""
    for client, (x, y) in zip(clients, tensors):
        evaluate(net, x, y, torch.from_numpy(client.validation), transforms)


def on_device(clients: list[ClientData], device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(images, labels) of each client; clients that share an array share its copy on the device."""
    images = {id(client.images): torch.from_numpy(np.array(client.images)).to(device) for client in clients}
    return [(images[id(client.images)], torch.from_numpy(client.labels).to(device)) for client in clients]


def target_on(device: torch.device, experiment: Experiment) -> tuple[torch.Tensor, torch.Tensor]:
    """(images, labels) of the unseen domain."""
    images, labels, indices = load_target(experiment.data, experiment.run.target)
    tested = torch.from_numpy(np.array(images[indices]))
    return tested.to(device), torch.from_numpy(labels[indices]).to(device)


def copied(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the network's state."""
    return {name: value.clone() for name, value in net.state_dict().items()}


def average_state(states: list[dict[str, torch.Tensor]], weights: np.ndarray) -> dict[str, torch.Tensor]:
    """The weighted mean of the clients' states, tensor by tensor."""
    return {name: average([state[name] for state in states], weights) for name in states[0]}


def average(values: list[torch.Tensor], weights: np.ndarray) -> torch.Tensor:
    """Weighted mean; counters are taken from the first client."""
    if not values[0].is_floating_point():
        return values[0]
    return sum(weight * value for weight, value in zip(weights.tolist(), values))


def train_locally(
    net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, indices: torch.Tensor, transforms: object, train: object
) -> None:
    """Train one client for its local epochs, or for its steps if the settings count steps."""
    optimizer = torch.optim.SGD(net.parameters(), train.lr, momentum=train.momentum)
    net.train()
    for batch in batches(indices, train):
        images = transforms.normalize(transforms.augment(to_float(x[batch])))
        loss = F.cross_entropy(net(images), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def batches(indices: torch.Tensor, train: object) -> Iterator[torch.Tensor]:
    """Shuffled batches for the epochs of a round, or for its steps."""
    whole = itertools.count() if train.iterations else range(train.epochs)
    endless = (batch for _ in whole for batch in indices[torch.randperm(len(indices))].split(train.batch_size))
    yield from itertools.islice((batch for batch in endless if len(batch) > 1), train.iterations or None)


@torch.inference_mode()
def evaluate(
    net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, indices: torch.Tensor, transforms: object
) -> float:
    """The accuracy, computed in batches of 256."""
    net.eval()
    correct = 0
    for batch in indices.split(256):
        correct += (net(transforms.normalize(to_float(x[batch]))).argmax(1) == y[batch]).sum().item()
    return correct / len(indices)


def make_folder(root: Path, size: int, images: int, domains: str = "abcd") -> None:
    """Write a folder tree of domains (one letter each) with seven classes of random pictures."""
    rng = np.random.default_rng(0)
    for domain in domains:
        for label in range(7):
            folder = root / domain / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(images // 7):
                Image.fromarray(rng.integers(0, 255, (size, size, 3), dtype=np.uint8)).save(folder / f"{number}.png")


def experiment_for(model: str, folder: Path, rounds: int, threads: int) -> Experiment:
    """The experiment: the digits CNN on the digits, or ResNet-18 at 64 pixels on random pictures."""
    table = {
        "name": "overhead",
        "train": {"rounds": rounds, "batch_size": 64, "lr": 0.01, "momentum": 0.5},
        "model": {"backbone": model},
        "run": {"threads": threads, "device": "cpu", "processes": 1},
        "method": {"name": "fedavg"},
    }
    if model.startswith("digits"):
        table["data"] = {"dataset": "digits", "split": "stratified"}
    else:
        make_folder(folder / "images", 64, 560)
        table["data"] = {
            "dataset": "folder",
            "root": str(folder / "images"),
            "image_size": 64,
            "augment": "domainbed",
            "normalize": "imagenet",
            "cache": str(folder / "cache"),
        }
        table["train"]["batch_size"] = 32
    return complete(from_table(table))


def main() -> None:
    """Run both sides in turn and print the ratio of the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="digits-cnn-bn")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    rounds = options.rounds or (5 if options.model.startswith("digits") else 2)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        experiment = experiment_for(options.model, folder, rounds, options.threads)
        bare_loop(experiment.replace(train={"rounds": 1}))  # imports, fills the image cache and the allocator's memory
        launch(experiment.replace(train={"rounds": 1}, run={"output": str(folder / "warm")}))
        numbers = itertools.count()

        def ours() -> Turn:
            close_workspaces()
            run = experiment.replace(run={"output": str(folder / f"run{next(numbers)}")})
            return clocked(lambda: launch(run))()

        sides = {"bare": clocked(lambda: bare_loop(experiment)), "fedsim": ours}
        turns = take_turns(sides, options.repeats, show=say)
    bare, fedsim = medians(turns["bare"])[0], medians(turns["fedsim"])[0]
    print(
        f"{options.model}, {rounds} rounds, {options.threads} thread(s): bare {bare:.2f} s, fedsim {fedsim:.2f} s, "
        f"ratio of medians {fedsim / bare:.3f}, "
        f"median of paired ratios {paired_ratio(turns['fedsim'], turns['bare']):.3f}"
    )


if __name__ == "__main__":
    main()
