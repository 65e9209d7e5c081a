"""FADA's whole rounds, written a second time as one plain loop without clients, messages and parts.

Two sources and a target play two rounds: the attention, the six steps, the identifiers and the target's training. The
loop shares with the run the images, the initial network, the names of the random streams, and k-means of scikit-learn.
It uses PyTorch's losses in the order of the equations, so that all tensors of the run are its tensors bit for bit. Only
I and alpha, which NumPy computes here, are compared within 1e-9. (With a log of a sigmoid for a softplus the second
round differs by .03 already, because Adam turns a rounding error in a gradient of 0 into a whole step.)
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from sklearn.cluster import KMeans
from support import numbers, run_small, tiny_experiment
from torch import nn

from fedsim.common.seeding import numpy_rng, stream_seed, torch_generator
from fedsim.data import load_client, load_unlabelled
from fedsim.runs.plan import resolve
from fedsim.tensors.arrays import record_to_arrays

SEED, TARGET, SOURCES = 0, "rot45", ("rot0", "rot30")
BATCH, RATE, MOMENTUM, SAMPLE, TEMPERATURE = 16, 0.05, 0.5, 12, 1.0
ADVERSARIAL, INFORMATION, REBUILD = 0.5, 0.3, 0.2
SETTINGS = {
    "disentangling_adversary": {"lambda_adv": ADVERSARIAL, "lambda_mi": INFORMATION, "lambda_rec": REBUILD, "lr": 2e-3},
    "target_attention": {"att_temp": TEMPERATURE},
    "adversarial_target": {"sample": SAMPLE, "epochs": 2, "lr": 1e-3},
}


class Pair(nn.Module):
    """The statistic network of MINE."""

    def __init__(self, width):
        super().__init__()
        self.p, self.q, self.out = nn.Linear(width, 512), nn.Linear(width, 512), nn.Linear(512, 1)

    def forward(self, p, q):
        return self.out(F.leaky_relu(self.p(p) + self.q(q), 0.2))


class Source:
    """A source client: its images, its five networks (made in this order), and their one Adam."""

    def __init__(self, data, name, features):
        client = load_client(data, name, TARGET)
        self.name, self.count = name, client.examples
        self.x = torch.from_numpy(client.images[client.train]).float() / 255
        self.y = torch.from_numpy(client.labels[client.train])
        with torch.random.fork_rng():
            drawn = torch.randint(2**62, (), generator=torch_generator(SEED, "networks", name, "train", 1))
            torch.manual_seed(int(drawn))
            self.specific = nn.Sequential(
                nn.Linear(features, 64), nn.BatchNorm1d(64), nn.ReLU(),
                nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5),
            )  # fmt: skip
            self.classes, self.rebuild, self.pair = nn.Linear(64, 10), nn.Linear(128, features), Pair(64)
            self.domain = nn.Sequential(nn.Linear(features, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
        modules = (self.specific, self.classes, self.rebuild, self.pair, self.domain)
        self.adam = torch.optim.Adam(
            [value for each in modules for value in each.parameters()], 2e-3, weight_decay=5e-4
        )


def descend(loss, *pairs):
    """One step on the loss of each optimizer, for the parameters of its modules alone."""
    tensors = [value for _, modules in pairs for module in modules for value in module.parameters()]
    for optimizer, _ in pairs:
        optimizer.zero_grad()
    for tensor, gradient in zip(tensors, torch.autograd.grad(loss, tensors, allow_unused=True), strict=True):
        tensor.grad = gradient
    for optimizer, _ in pairs:
        optimizer.step()


def keep_statistics(*modules):
    """Batch norm with the batch's statistics, which leaves the running ones alone."""
    for layer in (layer for module in modules for layer in module.modules()):
        if hasattr(layer, "track_running_stats"):
            layer.track_running_stats = False


def count_statistics(*modules):
    for layer in (layer for module in modules for layer in module.modules()):
        if hasattr(layer, "track_running_stats"):
            layer.track_running_stats = True


def bound_of(pair, p, q, order):
    joint, apart = pair(p, q).squeeze(1), pair(p, q[order]).squeeze(1)
    return joint.mean() - (torch.logsumexp(apart, 0) - np.log(len(apart)))


def train_source(source, net, number, target_features):
    """The six steps of every batch of one pass; the network is changed, and DI is that of the source."""
    G, D, C, S, CI = net.backbone, net.bottleneck, net.head, source.specific, source.classes
    sgd, adam = torch.optim.SGD(net.parameters(), RATE, momentum=MOMENTUM, fused=True), source.adam
    net.train()
    order = numpy_rng(SEED, "batches", source.name, "train", number).permutation(source.count)
    draws = torch_generator(SEED, "target-features", source.name, "train", number)
    torch.manual_seed(stream_seed(SEED, "library", source.name, "train", number))
    for start in range(0, source.count, BATCH):
        x, y = source.x[order[start : start + BATCH]], source.y[order[start : start + BATCH]]
        assert len(x) > 1
        count_statistics(G, D, S)
        f = G(x)
        loss = F.cross_entropy(C(D(f)), y)
        descend(loss + F.cross_entropy(CI(S(f)), y), (sgd, [G, D, C]), (adam, [S, CI]))
        keep_statistics(G, D, S)
        if target_features is not None:
            chosen = torch.randint(len(target_features), (len(x),), generator=draws)
            f = G(x)
            on_source, on_target = source.domain(f.detach()), source.domain(target_features[chosen])
            loss = F.softplus(-on_source).mean() + F.softplus(on_target).mean()  # -log DI(f) - log(1 - DI(f_t))
            descend(loss, (adam, [source.domain]))
            descend(ADVERSARIAL * F.softplus(-source.domain(f)).mean(), (sgd, [G]))
        f = G(x).detach()
        descend(-CI(S(f)).log_softmax(1).mean(), (adam, [S]))
        pairs = torch.randperm(len(x))
        with torch.no_grad():
            p, q = D(f), S(f)
        descend(-bound_of(source.pair, p, q, pairs), (adam, [source.pair]))
        p, q = D(f), S(f)
        descend(INFORMATION * bound_of(source.pair, p, q, pairs), (adam, [S]), (sgd, [D]))
        rebuilt = source.rebuild(torch.cat([D(f), S(f)], 1))
        descend(REBUILD * F.mse_loss(rebuilt, f), (adam, [S, source.rebuild]), (sgd, [D]))
    count_statistics(G, D, S)


def features_of(net, images):
    """G(x) of the target's sample, in the order of the images, with running statistics."""
    sample = np.sort(numpy_rng(SEED, "adaptation-sample").permutation(len(images))[:SAMPLE])
    net.eval()
    with torch.no_grad():
        return net.backbone(images[sample])


def tightness_of(features):
    """I: for each cluster of k-means the sum of all distances between its points, over twice their number."""
    points = features.double().numpy()
    labels = KMeans(10, n_init=10, random_state=stream_seed(SEED, "clusters") % 2**32).fit(points).labels_
    total = 0.0
    for cluster in range(10):
        members = points[labels == cluster]
        for left in members:
            total += np.linalg.norm(members - left, axis=1).sum() / (2 * len(members))
    return total


def mean_of(states, weights):
    """sum_i alpha_i theta_i of all float tensors, and the largest counter."""
    mean = {}
    for name, first in states[0].items():
        tensors = [state[name] for state in states]
        if first.is_floating_point():
            mean[name] = sum(w * tensor.double() for w, tensor in zip(weights, tensors, strict=True)).float()
        else:
            mean[name] = torch.stack(tensors).amax(0)
    return mean


def adapt(net, identifiers, images, number):
    """The target's passes, which train G against the identifiers; in the first round there are none."""
    net.train()
    adam = torch.optim.Adam(net.backbone.parameters(), 1e-3, weight_decay=5e-4)
    for epoch in range(2 if identifiers else 0):
        order = numpy_rng(SEED, f"adapt-{epoch}", TARGET, "adapt", number).permutation(len(images))
        for start in range(0, len(images), BATCH):
            f = net.backbone(images[order[start : start + BATCH]])
            losses = [F.softplus(-DI(f)).mean() for DI in identifiers]
            descend(torch.stack(losses).mean(), (adam, [net.backbone]))


def copies(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


def play(experiment):
    """Plays the rounds; returns the last state, and of each round I, alpha and the target's features."""
    plan = resolve(experiment)
    data, net = plan.experiment.data, plan.build_net()
    sources = [Source(data, name, net.bottleneck[0].in_features) for name in SOURCES]
    adapting = load_unlabelled(data, TARGET)
    images = torch.from_numpy(adapting.images[adapting.train]).float() / 255
    theta, target_features, rows = copies(net), None, []
    for number in range(1, experiment.train.rounds + 1):
        states = []
        for source in sources:
            net.load_state_dict(theta)
            train_source(source, net, number, target_features)
            states.append(copies(net))
        tight = []
        for state in (theta, *states):
            net.load_state_dict(state)
            tight.append(tightness_of(features_of(net, images)))
        powers = np.exp([(tight[0] - each) / (TEMPERATURE * tight[0]) for each in tight[1:]])
        alpha = powers / powers.sum()
        net.load_state_dict(mean_of(states, alpha))
        adapt(net, [source.domain for source in sources] if target_features is not None else [], images, number)
        target_features, theta = features_of(net, images), copies(net)
        rows.append((tight, alpha, target_features))
    return theta, rows, sources


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(the run's folder, its messages, what the loop gives)."""
    experiment = tiny_experiment(
        tmp_path_factory.mktemp("fada"), "fada", 2, parts=SETTINGS, data={"domains": [*SOURCES, TARGET]},
        train={"iterations": 0, "epochs": 1, "batch_size": BATCH},
    )  # fmt: skip
    return *run_small(experiment), play(experiment)


def bits(tensors):
    """The bytes of tensors or arrays by name."""
    return {name: np.asarray(value).tobytes() for name, value in tensors.items()}


def test_two_rounds_again(both):
    """All tensors of the last model, bit for bit: G that the target trained, D and C, and all statistics."""
    folder, _, (theta, _, _) = both
    assert bits(load_file(folder / "last.safetensors")) == bits(theta)


def test_exchanges_again(both):
    """I and alpha of both rounds; the target's features in each, and the identifiers that it gets in the second."""
    folder, grid, (_, rows, sources) = both
    clients = numbers(folder / "clients.csv")
    visits = [pair for pair in grid.seen if pair[0].metadata.message_type == "query.visit"]
    for number, (tight, alpha, target_features) in enumerate(rows, 1):
        measured, adapted = (reply.content.array_records for _, reply in visits[2 * number - 2 : 2 * number])
        assert record_to_arrays(measured["tightness"])["tightness"] == pytest.approx(tight, rel=1e-9)
        weights = clients[clients["round"] == number].set_index("client")["weight"]
        assert [weights[name] for name in SOURCES] == pytest.approx(list(alpha), rel=1e-9)
        assert 0.05 < min(alpha) < 0.5  # both sources count, and they do not count the same
        assert bits(record_to_arrays(adapted["target_features"])) == bits({"target_features": target_features})
    asked = visits[3][0].content.array_records
    for source in sources:
        assert bits(record_to_arrays(asked[f"identifier:{source.name}"])) == bits(source.domain.state_dict())
