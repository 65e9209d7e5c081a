"""Inference rules and FADA, computed a second time from their equations; see test_rounds_again.py."""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from tape import average, batch_norm, channel_norm, classified, copied, features, learned, recorded, sgd

from clients.step.disentangling_adversary import DisentanglingAdversary
from fedsim.run.target import TargetEvaluator
from fedsim.run.workspace import open_workspace


def score(evidence, predict):
    """(accuracy, mean cross-entropy) on the unseen domain, by predict(weights, images)."""
    weights = {name: torch.tensor(value) for name, value in evidence.last.items()}
    batches = list(TargetEvaluator(open_workspace(evidence.plan)).batches())
    images, labels = (torch.cat(each) for each in zip(*batches))
    logits = predict(weights, images)
    return (logits.argmax(1) == labels).double().mean().item(), F.cross_entropy(logits, labels).item()


def recorded_score(evidence):
    row = evidence.rounds.iloc[-1]
    return pytest.approx((row["target_accuracy"], row["target_loss"]), rel=1e-4)


def test_tsmobn(tmp_path):
    """mu <- 0.9 mu + 0.1 mu_batch over the test batches of 64, from the first batch's own; var as well, biased."""
    evidence, _, _ = recorded("fedavg", tmp_path, 'method.infer="tsmo_bn"', "data.fraction=0.5")

    def predict(weights, images):
        kept, logits = {}, []
        for start in range(0, len(images), 64):

            def norm(layer, x):
                def tracked(channel):
                    new = (x[:, channel].mean(), x[:, channel].var(unbiased=False))
                    old = kept.get((layer, channel), new)
                    kept[layer, channel] = tuple(0.9 * a + 0.1 * b for a, b in zip(old, new))
                    return kept[layer, channel]

                prefix = f"backbone.norm{layer}"
                return channel_norm(x, tracked, weights[f"{prefix}.weight"], weights[f"{prefix}.bias"])

            logits.append(classified(weights, features(weights, images[start : start + 64], norm)))
        assert len(logits) > 1
        return torch.cat(logits)

    assert score(evidence, predict) == recorded_score(evidence)


def test_mixnorm(tmp_path):
    """Five views of each image; mu = 0.05 mu_views + 0.95 mu_G, var as well; the original view is the prediction."""
    shown, own = [], torch.nn.Conv2d._conv_forward

    def seen(layer, x, *words):
        if x.shape[1] == 1 and not torch.is_grad_enabled():
            shown.append(x.clone())
        return own(layer, x, *words)

    with patch.object(torch.nn.Conv2d, "_conv_forward", seen):
        evidence, _, _ = recorded("fedavg", tmp_path, 'method.infer="mix_norm"')

    def predict(weights, images):
        views = next(x for x in reversed(shown) if len(x) == 5 * len(images)).view(5, *images.shape)
        assert torch.equal(views[0], images)
        logits = []
        for number in range(len(images)):

            def norm(layer, x):
                prefix = f"backbone.norm{layer}"
                kept = [weights[f"{prefix}.running_{kind}"] for kind in ("mean", "var")]

                def mixed(channel):
                    mean, variance = x[:, channel].mean(), x[:, channel].var(unbiased=False)
                    return 0.05 * mean + 0.95 * kept[0][channel], 0.05 * variance + 0.95 * kept[1][channel]

                return channel_norm(x, mixed, weights[f"{prefix}.weight"], weights[f"{prefix}.bias"])

            logits.append(classified(weights, features(weights, views[:, number], norm))[:1])
        return torch.cat(logits)

    assert score(evidence, predict) == recorded_score(evidence)


ADAM_LR, DECAY = 2e-4, 5e-4
# Dropout is off, because its masks are not seen.
SETTINGS = ("method.disentangler.dropout=0.0", "method.disentangling_adversary.lambda_mi=0.01")  # 1e-4 shows nothing


class Adam:
    """Kingma and Ba, 2015, with the decay in the gradient; each tensor counts its own steps."""

    def __init__(self):
        self.m, self.v, self.t = {}, {}, {}

    def step(self, weights, gradients):
        for name, gradient in gradients.items():
            g = gradient + DECAY * weights[name].detach()
            self.t[name] = self.t.get(name, 0) + 1
            self.m[name] = 0.9 * self.m.get(name, 0) + 0.1 * g
            self.v[name] = 0.999 * self.v.get(name, 0) + 0.001 * g * g
            mean, square = self.m[name] / (1 - 0.9 ** self.t[name]), self.v[name] / (1 - 0.999 ** self.t[name])
            weights[name] = (weights[name].detach() - ADAM_LR * mean / (square.sqrt() + 1e-8)).requires_grad_(True)


def log_sigmoid(x):
    return -torch.log1p(torch.exp(-x))


def branch(weights, prefix, f, track=False):
    """Two linear layers, each with the batch's own normalization and ReLU; the running statistics follow on demand."""
    for linear, norm in ((0, 1), (3, 4)):
        f = f @ weights[f"{prefix}.{linear}.weight"].T + weights[f"{prefix}.{linear}.bias"]
        for name, value in (("running_mean", f.mean(0)), ("running_var", f.var(0))) if track else ():
            weights[f"{prefix}.{norm}.{name}"] = 0.9 * weights[f"{prefix}.{norm}.{name}"] + 0.1 * value.detach()
        f = (f - f.mean(0)) / torch.sqrt(((f - f.mean(0)) ** 2).mean(0) + 1e-5)
        f = torch.relu(f * weights[f"{prefix}.{norm}.weight"] + weights[f"{prefix}.{norm}.bias"])
    return f


def generator(weights, images, track=True):
    """G(x) by the batch's statistics; the running ones follow where `track` is true."""
    own = weights if track else {name: value.clone() if "running" in name else value for name, value in weights.items()}
    return features(own, images, lambda layer, x: batch_norm(own, f"backbone.norm{layer}", x))


def evaluated(weights, images):

    def norm(layer, x):
        mean, var, gamma, beta = (
            weights[f"backbone.norm{layer}.{name}"][None, :, None, None]
            for name in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / torch.sqrt(var + 1e-5) * gamma + beta

    with torch.no_grad():
        return features(weights, images, norm)


def judged(aux, f, prefix="domain"):
    """The logit of "source"."""
    hidden = F.leaky_relu(f @ aux[f"{prefix}.0.weight"].T + aux[f"{prefix}.0.bias"], 0.2)
    return (hidden @ aux[f"{prefix}.2.weight"].T + aux[f"{prefix}.2.bias"])[:, 0]


def statistic(aux, p, q):
    sides = [
        x @ aux[f"statistic.{side}.weight"].T + aux[f"statistic.{side}.bias"] for side, x in (("left", p), ("right", q))
    ]
    return (F.leaky_relu(sides[0] + sides[1], 0.2) @ aux["statistic.out.weight"].T + aux["statistic.out.bias"])[:, 0]


def step(loss, weights, moments, aux, adam, shared=(), own=()):
    """One step on a loss for the tensors whose names begin so: shared ones by SGD, the client's own by Adam."""
    names = [name for name in learned(weights) if name.startswith(tuple(shared))] if shared else []
    mine = [name for name in learned(aux) if name.startswith(tuple(own))] if own else []
    gradients = torch.autograd.grad(loss, [*(aux[name] for name in mine)], retain_graph=bool(names)) if mine else ()
    if names:
        sgd(weights, moments, loss, names)
    adam.step(aux, dict(zip(mine, gradients, strict=True)))


def trained(weights, segment, aux, adam, target):
    """A source client's round: the six steps for every batch."""
    moments, segment.draws = {}, [draw for draw in segment.draws if draw.dim()]  # without seeds
    for images, labels in segment.batches:
        f = generator(weights, images)
        guess = branch(aux, "specific", f) @ aux["classes.weight"].T + aux["classes.bias"]
        found = classified(weights, branch(weights, "bottleneck", f, track=True))
        loss = F.cross_entropy(found, labels) + F.cross_entropy(guess, labels)
        step(loss, weights, moments, aux, adam, ("backbone", "bottleneck", "head"), ("specific", "classes"))
        if target is not None:
            f, theirs = generator(weights, images, track=False), target[segment.drawn(len(labels))]
            loss = -log_sigmoid(judged(aux, f.detach())).mean() - log_sigmoid(-judged(aux, theirs)).mean()
            step(loss, weights, moments, aux, adam, own=("domain",))
            loss = -0.01 * log_sigmoid(judged(aux, f)).mean()
            step(loss, weights, moments, aux, adam, shared=("backbone",))
        f = generator(weights, images, track=False).detach()
        logits = branch(aux, "specific", f) @ aux["classes.weight"].T + aux["classes.bias"]
        powers = torch.exp(logits - logits.amax(1, keepdim=True).detach())
        loss = -torch.log(powers / powers.sum(1, keepdim=True)).sum() / logits.numel()
        step(loss, weights, moments, aux, adam, own=("specific",))
        order = segment.drawn(len(labels))

        def bound(f=f, order=order):
            p, q = branch(weights, "bottleneck", f), branch(aux, "specific", f)
            return statistic(aux, p, q).mean() - torch.log(torch.exp(statistic(aux, p, q[order])).mean())

        step(-bound(), weights, moments, aux, adam, own=("statistic",))
        step(0.01 * bound(), weights, moments, aux, adam, ("bottleneck",), ("specific",))
        both = torch.cat([branch(weights, "bottleneck", f), branch(aux, "specific", f)], dim=1)
        loss = 0.01 * ((both @ aux["rebuild.weight"].T + aux["rebuild.bias"] - f) ** 2).sum() / f.numel()
        step(loss, weights, moments, aux, adam, ("bottleneck",), ("specific", "rebuild"))
    return weights


def spread(points, clusters):
    """sum_r 1/(2 n_r) sum_{i,j in r} ||f_i - f_j||, pair by pair."""
    groups = [[point for point, own in zip(points.double(), clusters) if own == r] for r in set(clusters)]
    return sum(sum(float((a - b).norm()) for a in own for b in own) / (2 * len(own)) for own in groups)


@pytest.mark.slow  # two codes part for good where rounding decides a ReLU, which another processor may do
def test_fada(tmp_path):
    visits, made, clusters, fit = [], {}, [], KMeans.fit
    networks = DisentanglingAdversary._networks

    def noted(self, round):  # the random values with which a client's own networks begin
        found = networks(self, round)
        made.setdefault(round.client, {name: value.detach().clone() for name, value in found.state_dict().items()})
        return found

    def fitted(self, points):  # k-means finds one of many optima
        clusters.append(fit(self, points).labels_.tolist())
        return self

    with patch.object(DisentanglingAdversary, "_networks", noted), patch.object(KMeans, "fit", fitted):
        evidence, tape, model = recorded("fada", tmp_path, *SETTINGS, visits=visits)
    assert [visit.client for visit in visits] == ["attention", "adapt"] * 2
    aux = {client: copied(own) for client, own in made.items()}
    adam, target = {client: Adam() for client in aux}, None
    for number, segments in enumerate(tape):
        states = [trained(copied(model), s, aux[s.client], adam[s.client], target) for s in segments]
        images = visits[2 * number].batches[0][0]
        values = [spread(evaluated(each, images), clusters.pop(0)) for each in (model, *states)]
        gains = torch.tensor([(values[0] - value) / values[0] / 0.1 for value in values[1:]], dtype=torch.float64)
        model = average(states, (torch.exp(gains) / torch.exp(gains).sum()).tolist())
        if number:  # identifiers were trained
            weights, own = copied(model), Adam()
            names = [name for name in learned(weights) if name.startswith("backbone")]
            for batch, _ in visits[2 * number + 1].batches[1:]:
                f = generator(weights, batch)
                loss = sum(-log_sigmoid(judged(aux[s.client], f)).mean() for s in segments) / len(segments)
                own.step(weights, dict(zip(names, torch.autograd.grad(loss, [weights[name] for name in names]))))
            model = {name: value.detach() for name, value in weights.items()}
        target = evaluated(model, images)
    for name, value in evidence.last.items():
        if "num_batches" not in name:
            torch.testing.assert_close(torch.tensor(value), model[name].detach(), rtol=2e-4, atol=1e-5)
