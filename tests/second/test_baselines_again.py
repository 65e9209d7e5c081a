"""The baselines without official code of their own here, computed a second time; see test_rounds_again.py.

A client's loss is a function of its batch, and the server's rule one of the clients' weights. Domains of a mixed client
lie side by side in a batch (`equal_domains`), a third of its rows each.
"""

import math
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from raw_sites import images_of_target, training_images, validation_images
from tape import LR, MOMENTUM, average, batch_norm, channel_norm, classified, copied, features, learned, recorded, sgd

DOMAINS = 3  # of a mixed client
MIXED = ("data.mix=0.9", "method.equal_domains.per_domain=8")  # several steps in a round


def equal(evidence, model, atol=2e-5):
    """The run's last model is this one; counters of batches are left out."""
    for name, value in evidence.last.items():
        if "num_batches" not in name:
            wanted = model[name].detach()
            where = lambda text, name=name: f"{name}: {text}"  # noqa: E731
            torch.testing.assert_close(torch.tensor(value), wanted, rtol=2e-4, atol=atol, msg=where)


def training_features(weights, images):
    return features(weights, images, lambda layer, x: batch_norm(weights, f"backbone.norm{layer}", x))


def evaluation_features(weights, images):
    """The features in eval mode, with the running statistics."""

    def norm(layer, x):
        prefix = f"backbone.norm{layer}"
        moments = lambda c: (weights[f"{prefix}.running_mean"][c], weights[f"{prefix}.running_var"][c])  # noqa: E731
        return channel_norm(x, moments, weights[f"{prefix}.weight"], weights[f"{prefix}.bias"])

    return features(weights, images, norm)


def evaluated(weights, images):
    """The logits in eval mode."""
    return classified(weights, evaluation_features(weights, images))


def descend(loss_of, segment, model):
    """One client's round of SGD; loss_of(weights, images, labels)."""
    weights, moments = copied(model), {}
    for images, labels in segment.batches:
        sgd(weights, moments, loss_of(weights, images, labels), learned(weights))
    return weights


def plain_loss(weights, images, labels):
    return F.cross_entropy(classified(weights, training_features(weights, images)), labels)


def sizes(segments):
    return [segment.examples for segment in segments]


# --- terms of the loss of one image or batch ------------------------------------------------------------------------


def decorrelated(z):
    """||K / N||_F^2 / d^2 of standardized features, one pair of dimensions after the other, by their products."""
    count, width = z.shape
    columns = [(z[:, j] - z[:, j].mean()) / torch.sqrt(1e-8 + z[:, j].var()) for j in range(width)]
    products = torch.stack([torch.stack(columns) @ column for column in columns])
    return (products / count).pow(2).sum() / width**2


def not_true(logits, received, labels):
    """The mean over images of KL(q || p) over the classes that are not the label."""
    total = 0
    for own, theirs, label in zip(logits, received, labels.tolist(), strict=True):
        others = [c for c in range(len(own)) if c != label]
        p, q = torch.softmax(own[others], 0), torch.softmax(theirs[others].detach(), 0)
        total = total + sum(q[c] * (q[c].log() - p[c].log()) for c in range(len(others)))
    return total / len(labels)


def test_feddecorr(tmp_path):
    evidence, tape, model = recorded("feddecorr", tmp_path)

    def loss(weights, images, labels):
        z = training_features(weights, images)
        return F.cross_entropy(classified(weights, z), labels) + 0.1 * decorrelated(z)

    for segments in tape:
        model = average([descend(loss, segment, model) for segment in segments], sizes(segments))
    equal(evidence, model)


def test_fedntd(tmp_path):
    evidence, tape, model = recorded("fedntd", tmp_path)
    for segments in tape:
        received = model

        def loss(weights, images, labels, received=received):
            logits = classified(weights, training_features(weights, images))
            return F.cross_entropy(logits, labels) + not_true(logits, evaluated(received, images), labels)

        model = average([descend(loss, segment, model) for segment in segments], sizes(segments))
    equal(evidence, model)


def unit_rows(values):
    return torch.stack([row / (row.norm() + 1e-8) for row in values])


def moved_predictions(weights, z, reference, draw):
    """The predictions after the head's weight W went .01 along the rows of the gradient of KL(reference || head) at
    W + .1 D, which is (q - p)^T z / B times a number."""
    weight, bias = weights["head.weight"].detach(), weights["head.bias"].detach()
    at = lambda change: (z.detach() @ (weight + change).T + bias).softmax(1)  # noqa: E731
    gradient = (at(0.1 * unit_rows(draw)) - reference.detach().softmax(1)).T @ z.detach()
    return at(0.01 * unit_rows(gradient))


def away_from(q, logits):
    """The mean over images of KL(q || softmax(logits))."""
    return (q * (q.log() - logits.log_softmax(1))).sum() / len(q)


def test_fedlgf(tmp_path):
    """.1 KL(q || p) + .1 KL(q_g || p): q by the client's own head and features, q_g by those of the received model."""
    evidence, tape, model = recorded("fedlgf", tmp_path)
    for segments in tape:
        received, states = model, []
        for segment in segments:
            head = model["head.weight"].shape

            def loss(weights, images, labels, segment=segment, received=received, head=head):
                z = training_features(weights, images)
                logits = classified(weights, z)
                own = moved_predictions(weights, z, logits, segment.drawn(*head))
                theirs = evaluation_features(received, images)
                fixed = moved_predictions(received, theirs, logits, segment.drawn(*head))
                flatness = away_from(own, logits) + away_from(fixed, logits)
                return F.cross_entropy(logits, labels) + 0.1 * flatness

            states.append(descend(loss, segment, model))
        model = average(states, [1] * len(states))
    equal(evidence, model)


def test_fedproto(tmp_path):
    """In round 2 features are drawn to the plain mean over clients of the means of the features seen in round 1."""
    evidence, tape, model = recorded("fedproto", tmp_path)
    protos = {}
    for segments in tape:
        means, states = {}, []
        for segment in segments:
            seen = {}

            def loss(weights, images, labels, seen=seen, protos=protos):
                z = training_features(weights, images)
                away = 0
                for vector, label in zip(z, labels.tolist(), strict=True):
                    seen.setdefault(label, []).append(vector.detach())
                    if label in protos:
                        away = away + ((vector - protos[label]) ** 2).sum()
                return F.cross_entropy(classified(weights, z), labels) + away / z.numel()

            states.append(descend(loss, segment, model))
            for label, vectors in seen.items():
                means.setdefault(label, []).append(sum(vectors) / len(vectors))
        protos = {label: sum(each) / len(each) for label, each in means.items()}
        model = average(states, sizes(segments))
    equal(evidence, model)


def test_fedasam(tmp_path):
    """e = rho T^2 g / ||T g||, T = |w| + eta for weights and 1 for biases; the second pass leaves the statistics."""
    evidence, tape, model = recorded("fedasam", tmp_path)

    def train(segment, model):
        weights, moments = copied(model), {}
        names = learned(weights)
        for images, labels in segment.batches:
            gradients = torch.autograd.grad(plain_loss(weights, images, labels), [weights[name] for name in names])
            scale = {name: weights[name].detach().abs() + 0.2 if "weight" in name else 1.0 for name in names}
            pairs = list(zip(names, gradients, strict=True))
            length = math.sqrt(sum(((scale[name] * g) ** 2).sum().item() for name, g in pairs))
            moved = {name: value.detach().clone() for name, value in weights.items()}
            for name, g in pairs:
                ascent = 0.7 * scale[name] ** 2 * g / length
                moved[name] = (weights[name].detach() + ascent).requires_grad_(True)
            second = torch.autograd.grad(plain_loss(moved, images, labels), [moved[name] for name in names])
            for name, g in zip(names, second, strict=True):
                moments[name] = g + (MOMENTUM * moments[name] if name in moments else 0)
                weights[name] = (weights[name].detach() - LR * moments[name]).requires_grad_(True)
        return weights

    for segments in tape:
        model = average([train(segment, model) for segment in segments], sizes(segments))
    equal(evidence, model)


# --- statistics of clients ------------------------------------------------------------------------------------------


def brightness(images):
    """(the mean over the images of the mean of their pixels, that of their deviation): grey images in [0, 1]."""
    pixels = images.double().reshape(len(images), -1)
    means = [row.sum() / len(row) for row in pixels]
    deviations = [((row - mean) ** 2).sum() / (len(row) - 1) for row, mean in zip(pixels, means, strict=True)]
    return sum(means).item() / len(means), sum(value.sqrt() for value in deviations).item() / len(means)


def measured(weights, images, labels, mean, deviation):
    """(accuracy, loss) on images that are normalized so."""
    logits = evaluated(weights, (images - mean) / deviation)
    return (logits.argmax(1) == labels).float().mean().item(), F.cross_entropy(logits, labels).item()


def test_fedrdn(tmp_path):
    """Images in [0, 1] are normalized by the mean of a client and the deviation of a client; a client validates by its
    own two, and the unseen domain is measured by the means over clients."""
    evidence, tape, model = recorded("fedrdn", tmp_path)
    sites = {segment.client: brightness(training_images(evidence.plan, segment.client)) for segment in tape[0]}
    pairs = [(mean, deviation) for mean, _ in sites.values() for _, deviation in sites.values()]
    drawn = set()
    for segments in tape:
        for segment in segments:
            for number, (images, labels) in enumerate(segment.batches):
                versions = [(segment.augmented[number] - mean) / deviation for mean, deviation in pairs]
                (found,) = [k for k, version in enumerate(versions) if torch.allclose(version, images, atol=1e-4)]
                segment.batches[number] = versions[found], labels
                drawn.add(found)
        model = average([descend(plain_loss, segment, model) for segment in segments], sizes(segments))
    assert len(drawn) == len(pairs) == 9
    equal(evidence, model)
    rows = evidence.clients[evidence.clients["round"] == 2].set_index("client")
    for client, moments in sites.items():
        accuracy, loss = measured(model, *validation_images(evidence.plan, client), *moments)
        assert rows.loc[client, "validation_accuracy"] == pytest.approx(accuracy)
        assert rows.loc[client, "validation_loss"] == pytest.approx(loss, rel=1e-3)
    accuracy, loss = measured(model, *images_of_target(evidence.plan), *torch.tensor(list(sites.values())).mean(0))
    last = evidence.rounds.iloc[-1]
    assert last["target_loss"] == pytest.approx(loss, rel=1e-3)
    assert last["target_accuracy"] == pytest.approx(accuracy)


# --- the server's rules ---------------------------------------------------------------------------------------------


def distance(a, b):
    """The norm of the difference of two models' parameters, of all tensors together."""
    return math.sqrt(sum(((a[name].detach().double() - b[name].detach()) ** 2).sum().item() for name in learned(b)))


def geometric_median(states, sizes, model, memory):
    """Four steps of Weiszfeld from the weighted mean, or fewer where the sum of distances stays."""
    shares = [size / sum(sizes) for size in sizes]
    weights, before = shares, None
    for _ in range(5):
        center = average(states, weights)
        away = [distance(center, state) for state in states]
        total = sum(share * each for share, each in zip(shares, away, strict=True))
        if before is not None and abs(before - total) < 1e-6 * before:
            break
        best, before = center, total
        weights = [share / max(1e-5, each) for share, each in zip(shares, away, strict=True)]
    return best if before != total else center


def clipped(states, sizes, model, memory):
    """v <- v + mean (delta - v) min(1, r / |delta - v|), r the median |delta|; other tensors take the median."""
    deltas = [{name: state[name].detach().double() - model[name] for name in learned(model)} for state in states]
    v = memory.setdefault("v", {name: torch.zeros_like(model[name]).double() for name in learned(model)})
    length = lambda move: math.sqrt(sum((value**2).sum().item() for value in move.values()))  # noqa: E731
    radius = sorted(map(length, deltas))[1]
    away = [{name: delta[name] - v[name] for name in v} for delta in deltas]
    factors = [min(1.0, radius / length(each)) for each in away]
    memory["v"] = {
        name: v[name] + sum(f * each[name] for f, each in zip(factors, away, strict=True)) / len(deltas) for name in v
    }
    fused = {name: torch.stack([state[name].detach() for state in states]).median(0).values for name in model}
    return {**fused, **{name: (model[name] + memory["v"][name]).float() for name in v}}


@pytest.mark.parametrize(("method", "rule"), [("rfa", geometric_median), ("centered-clipping", clipped)])
def test_robust_rules(method, rule, tmp_path):
    evidence, tape, model = recorded(method, tmp_path)
    memory = {}
    for segments in tape:
        states = [descend(plain_loss, segment, model) for segment in segments]
        model = rule(states, sizes(segments), model, memory)
    equal(evidence, model)


def test_term(tmp_path):
    """w_k = p_k e^(F_k) / sum, F_k the received model's loss on the client's training images in eval mode."""
    evidence, tape, model = recorded("term", tmp_path)
    for segments in tape:
        masses = []
        for segment in segments:
            images, labels = (torch.cat(each) for each in zip(*segment.batches, strict=True))
            assert len(labels) == segment.examples
            loss = F.cross_entropy(evaluated(model, images), labels).item()
            masses.append(segment.examples * math.exp(loss))
        model = average([descend(plain_loss, segment, model) for segment in segments], masses)
    equal(evidence, model)


def test_fedheal(tmp_path):
    """Coordinates that turn round stay; clients that move far count more; a mean of those that moved."""
    evidence, tape, model = recorded("fedheal", tmp_path)
    history, weight, change = {}, {}, {}
    names = [name for name, value in model.items() if value.is_floating_point()]
    for number, segments in enumerate(tape):
        moves, lengths = [], []
        for segment in segments:
            state = descend(plain_loss, segment, model)
            move = {name: state[name].detach() - model[name] for name in names}
            for name in names:
                falls = (-move[name] >= 0).float()
                past = history.get((segment.client, name))
                if past is not None:
                    agrees = torch.where(falls > 0, past, 1 - past)
                    move[name] = move[name] * (agrees > 0.3)
                    falls = (past * number + falls) / (number + 1)
                history[segment.client, name] = falls
            moves.append(move)
            lengths.append(sum(move[name].norm().item() for name in learned(model)))
        for segment, length in zip(segments, lengths, strict=True):
            client = segment.client
            change[client] = 0.6 * change.get(client, 0.0) + 0.4 * length / sum(lengths)
            weight[client] = weight.get(client, 1 / len(segments)) + change[client]
        fused = dict(model)
        for name in names:
            total, mass = torch.zeros_like(model[name]), torch.zeros_like(model[name])
            for segment, move in zip(segments, moves, strict=True):
                total += weight[segment.client] * move[name]
                mass += weight[segment.client] * (move[name] != 0)
            fused[name] = model[name] + torch.where(mass > 0, total / mass.clamp_min(1e-12), 0.0)
        model = fused
    equal(evidence, model)


# --- the domains of a mixed client ----------------------------------------------------------------------------------


def by_domain(rows):
    return rows.chunk(DOMAINS)


def risks(logits, labels):
    return [F.cross_entropy(*pair) for pair in zip(by_domain(logits), by_domain(labels), strict=True)]


def invariant_risk(z, logits, labels):
    """The mean of the products of d/ds CE(s logits) at 1 over the even and the odd rows of a domain."""
    products = []
    for rows, truth in zip(by_domain(logits), by_domain(labels), strict=True):
        slopes = []
        for start in (0, 1):
            s = torch.ones((), requires_grad=True)
            loss = F.cross_entropy(s * rows[start::2], truth[start::2])
            slopes.append(torch.autograd.grad(loss, s, create_graph=True)[0])
        products.append(slopes[0] * slopes[1])
    return sum(products) / DOMAINS


def variance_of_risks(z, logits, labels):
    each = risks(logits, labels)
    mean = sum(each) / DOMAINS
    return sum((risk - mean) ** 2 for risk in each) / DOMAINS


def covariances(z, logits, labels):
    """The mean over pairs of the mean squares between their means and between their covariances."""
    distances = []
    for a, b in combinations(by_domain(z), 2):
        c_a, c_b = ((rows - rows.mean(0)).T @ (rows - rows.mean(0)) / (len(rows) - 1) for rows in (a, b))
        distances.append(((a.mean(0) - b.mean(0)) ** 2).mean() + ((c_a - c_b) ** 2).mean())
    return sum(distances) / len(distances)


def discrepancy(z, logits, labels):
    """The mean over pairs of K_aa + K_bb - 2 K_ab."""

    def kernel(a, b):
        squares = ((a[:, None, :] - b[None, :, :]) ** 2).sum(2)
        return sum(torch.exp(-(10.0**power) * squares).mean() for power in range(-3, 4))

    distances = [kernel(a, a) + kernel(b, b) - 2 * kernel(a, b) for a, b in combinations(by_domain(z), 2)]
    return sum(distances) / len(distances)


# method: (its penalty, its weight before and after the first step, the part with which the switch is set)
PENALTIES = {
    "irm": (invariant_risk, 1.0, 5.0, "invariant_risk"),
    "vrex": (variance_of_risks, 1.0, 5.0, "risk_extrapolation"),
    "coral": (covariances, 1.0, 1.0, ""),
    "mmd": (discrepancy, 1.0, 1.0, ""),
}


@pytest.mark.parametrize("method", PENALTIES)
def test_penalties_between_domains(method, tmp_path):
    """IRM and V-REx: the weight is 1 in a client's first step and 5 from then on, and moments begin anew."""
    penalty, first, later, part = PENALTIES[method]
    switch = [f"method.{part}.lam={later}", f"method.{part}.anneal_steps=1"] if part else []
    evidence, tape, model = recorded(method, tmp_path, *MIXED, *switch)
    steps = {}
    for segments in tape:
        states = []
        for segment in segments:
            weights, moments = copied(model), {}
            for images, labels in segment.batches:
                done = steps.get(segment.client, 0)
                if part and done == 1:
                    moments.clear()
                z = training_features(weights, images)
                logits = classified(weights, z)
                loss = F.cross_entropy(logits, labels) + (later if done else first) * penalty(z, logits, labels)
                sgd(weights, moments, loss, learned(weights))
                steps[segment.client] = done + 1
            states.append(weights)
        model = average(states, sizes(segments))
    assert min(steps.values()) > 2
    # A kernel of MMD multiplies squared distances by 1000, and so their rounding: 3e-4 with another library.
    equal(evidence, model, atol=1e-3 if method == "mmd" else 2e-5)


def test_groupdro(tmp_path):
    """q_e <- q_e exp(.5 R_e), divided by the sum, before each step and over the rounds; the loss is sum q_e R_e."""
    evidence, tape, model = recorded("groupdro", tmp_path, *MIXED, "method.group_robust.eta=0.5")
    shares = {}
    for segments in tape:
        states = []
        for segment in segments:

            def loss(weights, images, labels, client=segment.client):
                each = risks(classified(weights, training_features(weights, images)), labels)
                q = shares.get(client, [1 / DOMAINS] * DOMAINS)
                raised = [share * math.exp(0.5 * risk.item()) for share, risk in zip(q, each, strict=True)]
                shares[client] = [share / sum(raised) for share in raised]
                return sum(share * risk for share, risk in zip(shares[client], each, strict=True))

            states.append(descend(loss, segment, model))
        model = average(states, sizes(segments))
    equal(evidence, model)


def test_fish(tmp_path):
    """A step on each domain in turn from theta, then half of the way back, of the running statistics too."""
    evidence, tape, model = recorded("fish", tmp_path, *MIXED, 'method.inter_domain.order="fixed"')
    for segments in tape:
        states = []
        for segment in segments:
            weights, moments = copied(model), {}
            for images, labels in segment.batches:
                before = {name: value.detach().clone() for name, value in weights.items()}
                for rows, truth in zip(by_domain(images), by_domain(labels), strict=True):
                    sgd(weights, moments, plain_loss(weights, rows, truth), learned(weights))
                for name, value in before.items():
                    if value.is_floating_point():
                        weights[name] = value + 0.5 * (weights[name].detach() - value)
                weights = copied(weights)
            states.append(weights)
        model = average(states, sizes(segments))
    equal(evidence, model)
