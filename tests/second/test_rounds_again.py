"""Methods without official code, computed a second time from the papers' equations, two whole rounds each.
Nothing of the parts is imported. Loops stand in place of tensor algebra wherever that is not too slow."""

import pytest
import torch
import torch.nn.functional as F
from tape import average, batch_norm, channel_norm, classified, copied, features, learned, local_rounds, recorded, sgd

ADAPTER = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")


def equal(evidence, model):
    """The run's last model is this one; counters of batches are left out."""
    for name, value in evidence.last.items():
        if "num_batches" not in name:
            torch.testing.assert_close(torch.tensor(value), model[name].detach(), rtol=2e-4, atol=2e-5)


def plain(weights):
    """Batch norm in both layers."""
    return lambda layer, x: batch_norm(weights, f"backbone.norm{layer}", x)


def descent(loss_of, names=learned):
    """A client's training: SGD on loss_of(weights, images, labels, segment, global model)."""

    def train(weights, segment, model):
        moments = {}
        for images, labels in segment.batches:
            sgd(weights, moments, loss_of(weights, images, labels, segment, model), names(weights))
        return weights

    return train


def cross_entropy(weights, images, labels, segment, model):
    return F.cross_entropy(classified(weights, features(weights, images, plain(weights))), labels)


def test_silobn(tmp_path):
    """Statistics stay at home from round to round; the unseen domain gets their average."""
    evidence, tape, start = recorded("silobn", tmp_path)
    model, own = local_rounds(tape, start, descent(cross_entropy), keeps=("running_",))
    equal(evidence, model)
    for config, _, record in evidence.training():
        if config["round"] == 2:  # the average of clients with equally many steps would hide where they began
            name, wanted = "backbone.norm1.running_mean", own[config["client"]]
            sent = torch.tensor(record["arrays"][name].numpy())
            torch.testing.assert_close(sent, wanted[name], atol=1e-5, rtol=1e-4)


def test_feddrop(tmp_path):
    """Each client trains half of the 50 hidden units, twice as strong; the server fills in w^t and averages."""
    evidence, tape, start = recorded("feddrop", tmp_path)
    rows = {
        (config["round"], config["client"]): torch.tensor(sent["arrays"]["backbone.fc.weight"].numpy())
        for config, sent, _ in evidence.training()
    }
    model = start
    for number, segments in enumerate(tape, start=1):
        states = []
        for segment in segments:
            sent = rows[number, segment.client]
            kept = [unit for unit in range(50) if (model["backbone.fc.weight"][unit] - sent).abs().amax(1).min() < 1e-5]
            assert len(kept) == len(sent)
            mask = torch.zeros(50)
            mask[kept] = 2.0

            def loss(weights, images, labels, segment, model, mask=mask):
                return F.cross_entropy(classified(weights, features(weights, images, plain(weights)) * mask), labels)

            states.append(descent(loss)(copied(model), segment, model))
        model = average(states, [segment.examples for segment in segments])
    equal(evidence, model)


def test_dson(tmp_path):
    """Moments are mixed, not outputs: w = softmax(theta)_1 of the instance's, 1 - w of the batch's."""

    def loss(weights, images, labels, segment, model):
        def norm(layer, x):
            prefix = f"backbone.norm{layer}"
            batch_norm(weights, prefix, x.detach())  # for the running statistics
            powers = [torch.exp(weights[f"{prefix}.theta_{kind}"]) for kind in ("mean", "var")]
            w_mean, w_var = (power[0] / power.sum() for power in powers)

            def mixed(channel):
                own = x[:, channel].flatten(1)
                mean = w_mean * own.mean(1) + (1 - w_mean) * own.mean()
                return mean, w_var * own.var(1, unbiased=False) + (1 - w_var) * own.var(unbiased=False)

            return channel_norm(x, mixed, weights[f"{prefix}.weight"], weights[f"{prefix}.bias"])

        return F.cross_entropy(classified(weights, features(weights, images, norm)), labels)

    evidence, tape, start = recorded("fedavg", tmp_path, 'method.norm="dson"')
    equal(evidence, local_rounds(tape, start, descent(loss))[0])


@pytest.mark.parametrize("variant", ["s", "a"])
def test_sfa(variant, tmp_path):
    """CE(h(a z + b), y) is added, a ~ N(1, 1/4). s: b ~ N(0, 1/4). a: none in round 1, then N(0, Sigma_y) of round 1.

    Sigma_y is the covariance of a class's features on this client, with 1e-4 of its mean variance on the diagonal.
    """
    seen = {}

    def shift(segment, z, labels, number):
        if variant == "s":
            return segment.drawn(*z.shape)
        own = seen.setdefault((segment.client, number), [])
        own += list(zip(labels.tolist(), z.detach().double(), strict=True))
        if number == 1:
            return 0
        draws, b = segment.drawn(*z.shape), torch.zeros(z.shape)
        for row, label in enumerate(labels.tolist()):
            rows = [vector for other, vector in seen[segment.client, 1] if other == label]
            if len(rows) > 1:
                mean = sum(rows) / len(rows)
                covariance = sum(torch.outer(vector - mean, vector - mean) for vector in rows) / len(rows)
                covariance += 1e-4 * covariance.diagonal().mean() * torch.eye(50)
                b[row] = torch.linalg.cholesky(covariance).float() @ draws[row]
        return b

    evidence, tape, start = recorded(f"sfa-{variant}", tmp_path)
    numbers = {id(segment): number for number, segments in enumerate(tape, start=1) for segment in segments}

    def loss(weights, images, labels, segment, model):
        z = features(weights, images, plain(weights))
        a = segment.drawn(*z.shape)
        noisy = a * z + shift(segment, z, labels, numbers[id(segment)])
        return F.cross_entropy(classified(weights, z), labels) + F.cross_entropy(classified(weights, noisy), labels)

    equal(evidence, local_rounds(tape, start, descent(loss))[0])


def test_copa(tmp_path):
    """CE by the own head and by the frozen heads of all others; heads stay apart, the extractor (I-BN) is averaged."""
    evidence, tape, start = recorded("copa", tmp_path)
    clients = [segment.client for segment in tape[0]]
    heads = dict.fromkeys(clients, (start["head.weight"], start["head.bias"]))
    model = start

    def norm(weights):
        def both(layer, x):
            if layer == 2:
                return batch_norm(weights, "backbone.norm2", x)
            first, prefix = x[:, :5], "backbone.norm1.inorm"
            own = lambda c: (first[:, c].flatten(1).mean(1), first[:, c].flatten(1).var(1, unbiased=False))  # noqa: E731
            y = channel_norm(first, own, weights[f"{prefix}.weight"], weights[f"{prefix}.bias"])
            return torch.cat([y, batch_norm(weights, "backbone.norm1.bn", x[:, 5:])], dim=1)

        return both

    def loss(weights, images, labels, segment, model):
        z = features(weights, images, norm(weights))
        total = F.cross_entropy(classified(weights, z), labels)
        for other in clients:
            if other != segment.client:
                weight, bias = heads[other]
                total = total + F.cross_entropy(z @ weight.T + bias, labels)
        return total

    for segments in tape:
        states = []
        for segment in segments:
            weight, bias = heads[segment.client]
            begun = copied({**model, "head.weight": weight, "head.bias": bias})
            states.append(descent(loss)(begun, segment, model))
        heads = {c: (state["head.weight"].detach(), state["head.bias"].detach()) for c, state in zip(clients, states)}
        model = average(states, [segment.examples for segment in segments])
    equal(evidence, model)


def mixed_norm(weights, model, share_of, affine):
    """Normalization by mixtures of a sample's moments and the global ones; share_of(layer, distances): their weight.

    Where there are no global moments yet (mean 0 in every channel), those of the batch stand in their place.
    """

    def norm(layer, x):
        prefix, mus, sigmas, own = f"backbone.norm{layer}.bn", [], [], []
        known = bool((model[f"{prefix}.running_mean"] != 0).any())
        for c in range(x.shape[1]):
            maps = x[:, c].flatten(1)
            own.append((maps.mean(1), torch.sqrt(maps.var(1, unbiased=False) + 1e-5)))
            mus.append(model[f"{prefix}.running_mean"][c] if known else maps.mean())
            variance = model[f"{prefix}.running_var"][c] if known else maps.var(unbiased=False)
            sigmas.append(torch.sqrt(variance + 1e-5))
        away = [m - mu for (m, _), mu in zip(own, mus)] + [s - sigma for (_, s), sigma in zip(own, sigmas)]
        share = share_of(layer, torch.stack(away, dim=1))  # [1, C], or [B, 1]
        gamma, beta = affine(weights[f"{prefix}.weight"]), affine(weights[f"{prefix}.bias"])
        maps = []
        for c, (mean, std) in enumerate(own):
            w = share[:, c] if share.shape[1] > 1 else share[:, 0]
            mu, sigma = w * mean + (1 - w) * mus[c], w * std + (1 - w) * sigmas[c]
            maps.append(gamma[c] * (x[:, c] - mu[:, None, None]) / sigma[:, None, None] + beta[c])
        return torch.stack(maps, dim=1)

    return norm


def client_agnostic(weights, images, labels, segment, model):
    """CE(C(f)) + 0.1 CE(C(stopgrad f_D)) + 4 mean (f - f_D)^2, where f_D has the moments mixed by u."""
    f = features(weights, images, lambda layer, x: batch_norm(weights, f"backbone.norm{layer}.bn", x))
    u = segment.drawn(30)
    shares = {1: u[None, :10], 2: u[None, 10:]}
    f_d = features(weights, images, mixed_norm(weights, model, lambda layer, _: shares[layer], lambda value: value))
    loss = F.cross_entropy(classified(weights, f), labels)
    loss = loss + 0.1 * F.cross_entropy(classified(weights, f_d.detach()), labels)
    return loss + 4 * sum(((a - b) ** 2).sum() for a, b in zip(f, f_d)) / f.numel()


def adapter_loss(weights, images, labels, segment, model):
    """The cross-entropy with alpha = clamp(delta z + eps, 0, 1) of each sample in place of u."""
    z = segment.drawn(2, len(labels))

    def alpha(layer, away):
        fc1, b1, fc2, b2 = (weights[f"backbone.norm{layer}.adapter.{name}"] for name in ADAPTER)
        delta, eps = (torch.relu(away @ fc1.T + b1) @ fc2.T + b2).unbind(1)
        return (delta * z[layer - 1] + eps).clamp(0, 1)[:, None]

    norm = mixed_norm(weights, model, alpha, lambda value: value.detach())
    return F.cross_entropy(classified(weights, features(weights, images, norm)), labels)


@pytest.mark.parametrize("adapters", [False, True], ids=["fedig", "fedig-a"])
def test_fedig(adapters, tmp_path):
    """Batch norm stays at home and is averaged for the second view; each step is followed by the adapters' own."""

    def train(weights, segment, model):
        moments, own = {}, {}
        for images, labels in segment.batches:
            loss = client_agnostic(weights, images, labels, segment, model)
            sgd(weights, moments, loss, learned(weights, without="adapter"))
            if adapters:
                loss = adapter_loss(weights, images, labels, segment, model)
                sgd(weights, own, loss, learned(weights, without="adapter", only=True))
        return weights

    evidence, tape, start = recorded("fedig-a" if adapters else "fedig", tmp_path)
    equal(evidence, local_rounds(tape, start, train, keeps=(".bn.",))[0])
