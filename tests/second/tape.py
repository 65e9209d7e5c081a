"""What a run drew and trained on, batch by batch, so that its rounds can be computed again by code that shares nothing
with the parts."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
import torch.nn.functional as F

from clients.base import DomainClient
from clients.local_data import LocalData
from fedsim.testing.contract import run_watched, small_plan

DRAWS = ("rand", "randn", "normal", "randperm", "randint")
LR, MOMENTUM = 0.05, 0.5  # of the small federation


@dataclass
class Segment:
    """One client in one round."""

    client: str
    examples: int
    batches: list = field(default_factory=list)  # (images, labels)
    augmented: list = field(default_factory=list)  # images of the same batches, before they are normalized
    draws: list = field(default_factory=list)  # tensors, in order

    def drawn(self, *shape):
        value = self.draws.pop(0)
        assert tuple(value.shape) == shape, (tuple(value.shape), shape)
        return value


class Tape:
    """Spies on the clients of a run: what they trained on, and what was drawn meanwhile."""

    def __init__(self):
        self.rounds, self.open = [], None

    def train(self, own, client, tensors, config):
        if config["phase"] != "train":
            return own(client, tensors, config)
        while len(self.rounds) < config["round"]:
            self.rounds.append([])
        self.rounds[-1].append(Segment(config["client"], client.data.examples))
        self.open = self.rounds[-1][-1]
        try:
            return own(client, tensors, config)
        finally:
            self.open = None

    def batch(self, own, *words):
        segment, self.open = self.open, None  # the draws of its augmentation are seen in the images
        found, self.open = own(*words), segment
        if segment:
            segment.batches.append((found.images.clone(), found.labels.clone()))
            segment.augmented.append(found.augmented.clone())
        return found

    def draw(self, own, *words, **named):
        value = own(*words, **named)
        if self.open:
            self.open.draws.append(value.clone())
        return value


def recorded(method, folder, *settings):
    """(evidence of a run of two rounds, [segments of a round], initial state) of a method on the small federation."""
    plan, tape = small_plan(method, folder, ["train.rounds=2", *settings]), Tape()
    spies = [(DomainClient, "train", tape.train), (LocalData, "batch", tape.batch)]
    spies += [(torch, name, tape.draw) for name in DRAWS]
    with ExitStack() as stack:
        for place, name, spy in spies:
            own = getattr(place, name)
            stack.enter_context(patch.object(place, name, lambda *a, own=own, spy=spy, **k: spy(own, *a, **k)))
        evidence = run_watched(plan)
    assert [len(each) for each in tape.rounds] == [3, 3]
    return evidence, tape.rounds, {name: value.clone() for name, value in plan.build_net().state_dict().items()}


def sgd(weights, moments, loss, names):
    """One step of SGD with momentum on the named weights, written out; `moments` begins empty in every round."""
    gradients = torch.autograd.grad(loss, [weights[name] for name in names])
    for name, gradient in zip(names, gradients, strict=True):
        moments[name] = gradient + (MOMENTUM * moments[name] if name in moments else 0)
        weights[name] = (weights[name].detach() - LR * moments[name]).requires_grad_(True)


def learned(weights, without="?", only=False):
    """The names of what gradients change, without those that have a word in them, or only these."""
    kinds = ("weight", "bias", "theta_mean", "theta_var")
    return [name for name in weights if name.endswith(kinds) and (without in name) == only]


def copied(state):
    """A client's own copy, whose floating tensors can take gradients."""
    names = set(learned(state))
    return {name: value.detach().clone().requires_grad_(name in names) for name, value in state.items()}


def average(states, sizes):
    """sum_k n_k w_k / sum_k n_k, entry by entry."""
    total = sum(sizes)
    return {
        name: sum(
            size / total * state[name].detach().double() for size, state in zip(sizes, states, strict=True)
        ).float()
        for name in states[0]
    }


def features(weights, images, norm):
    """The digits network; `norm(number of the layer, x)` normalizes."""
    x = images
    for layer in (1, 2):
        x = F.conv2d(x, weights[f"backbone.conv{layer}.weight"], weights[f"backbone.conv{layer}.bias"])
        x = F.max_pool2d(torch.relu(norm(layer, x)), 2)
    x = F.adaptive_avg_pool2d(x, 4).flatten(1)
    return torch.relu(x @ weights["backbone.fc.weight"].T + weights["backbone.fc.bias"])


def classified(weights, z):
    return z @ weights["head.weight"].T + weights["head.bias"]


def channel_norm(x, moments, gamma, beta, eps=1e-5):
    """y_c = gamma_c (x_c - mu_c) / sqrt(var_c + eps) + beta_c, one channel after the other.

    moments: channel -> (mean, variance), numbers or one of each sample
    """
    maps = []
    for channel in range(x.shape[1]):
        mean, variance = (value.reshape(-1, 1, 1) for value in moments(channel))
        maps.append(gamma[channel] * (x[:, channel] - mean) / torch.sqrt(variance + eps) + beta[channel])
    return torch.stack(maps, dim=1)


def batch_norm(weights, prefix, x):
    """Batch norm in training, one channel after the other; the running statistics in `weights` follow."""

    def moments(channel):
        own = x[:, channel]
        mean, variance = own.mean(), ((own - own.mean()) ** 2).mean()
        with torch.no_grad():
            unbiased = variance * own.numel() / (own.numel() - 1)
            for name, value in (("running_mean", mean), ("running_var", unbiased)):
                running = weights[f"{prefix}.{name}"]
                running[channel] = 0.9 * running[channel] + 0.1 * value
        return mean, variance

    return channel_norm(x, moments, weights[f"{prefix}.weight"], weights[f"{prefix}.bias"])


def local_rounds(tape, start, train, keeps=()):
    """Two rounds of federated averaging: (global model, what each client holds).

    train(weights, segment, global model): one client's training, which returns its weights. keeps: words in the
    names of tensors that a client goes on with from its own last round.
    """
    model, own = dict(start), {}
    for segments in tape:
        states = []
        for segment in segments:
            home = own.get(segment.client, start)
            begun = {name: (home if any(word in name for word in keeps) else model)[name] for name in model}
            states.append(train(copied(begun), segment, model))
        own = {segment.client: state for segment, state in zip(segments, states, strict=True)}
        model = average(states, [segment.examples for segment in segments])
    return model, own
