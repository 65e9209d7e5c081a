"""FADA: numbers worked out by hand, what each step trains, and that it reads no label of the target."""

import copy
import math

import numpy as np
import pytest
import torch
from small_round import changed, ready_round, snapshot
from torch import nn

from clients.step.disentangling_adversary import NETWORKS, DisentanglingAdversary
from clients.store import ClientStore
from clients.tools.disentangling import clustered, confusion_loss, domain_loss, information, source_loss, tightness
from clients.unlabelled.adversarial_target import AdversarialTarget
from fedsim.methods.assembly import build_recipe
from fedsim.models.inserts.disentangler import Disentangler
from fedsim.models.net import Net
from fedsim.settings.experiment import Experiment
from strategies.banks.domain_identifiers import DomainIdentifiers
from strategies.server_round import ServerRound, Update
from strategies.visits.target_attention import TargetAttention, attention


def logit(probability):
    return torch.tensor([math.log(probability / (1 - probability))], dtype=torch.float64)


def test_tightness_numbers():
    """3 and 8; single points add nothing; a shift and another order change nothing."""
    points, clusters = torch.tensor([[0.0], [2], [10], [10], [13], [99]]), np.array([0, 0, 1, 1, 1, 2])
    assert tightness(points, clusters) == pytest.approx(3)
    assert tightness(points, clusters, squared=True) == pytest.approx(8)
    order = [4, 1, 5, 0, 3, 2]
    assert tightness(points[order] + 1000, clusters[order]) == pytest.approx(3)
    assert sorted(np.bincount(clustered(points, 3, 0))) == [1, 2, 3]
    assert tightness(torch.ones(5, 2), clustered(torch.ones(5, 2), 3, 0)) == 0


@pytest.mark.parametrize(("tight", "options", "alpha"), [
    ([1, 0.5, 1, 1.5], {"kind": "raw"}, [0.506480, 0.307196, 0.186324]), ([200, 100, 250], {"kind": "raw"}, [1, 0]),
    ([10, 9, 10.5], {"temperature": 1.0}, [0.537430, 0.462570]), ([10, 9, 10.5], {}, [0.817574, 0.182426]),
    ([0, 0, 0], {}, [0.5, 0.5]), ([3, 3, 3, 3], {}, [1 / 3] * 3),
])  # fmt: skip
def test_attention_numbers(tight, options, alpha):
    """Raw gains and relative gains at two temperatures; uniform when there is nothing to compare."""
    kind = (options.pop("kind"),) if "kind" in options else ()
    assert attention(np.array(tight, float), *kind, **options) == pytest.approx(alpha, abs=1e-6)


def test_adversarial_losses():
    """DI = .8 on the source, .3 on the target; both at .5; the confusion loss is at least log 4."""
    assert domain_loss(logit(0.8), logit(0.3)).item() == pytest.approx(0.579818, abs=1e-6)
    assert (source_loss(logit(0.8)) + source_loss(logit(0.3))).item() == pytest.approx(1.427116, abs=1e-6)
    assert domain_loss(logit(0.5), logit(0.5)).item() == pytest.approx(1.386294, abs=1e-6)
    rows = torch.tensor([[0.25] * 4, [0.7, 0.1, 0.1, 0.1]], dtype=torch.float64).log()
    assert confusion_loss(rows[:1]).item() == pytest.approx(1.386294, abs=1e-6)
    assert confusion_loss(rows[1:]).item() == pytest.approx(1.816108, abs=1e-6)


@pytest.mark.parametrize(("joint", "apart", "bound"), [
    ((1, 2), (0, 0), 1.5), ((7, 7), (7, 7), 0), ((0, 4), (1, 3), -0.433781), ((1, 1), (1, 1, -1, -1), 0.566219),
    ((2, 2), (2, 2, -2, -2), 0.674997), ((4, 4), (4, 4, -4, -4), 0.692812),
])  # fmt: skip
def test_information_numbers(joint, apart, bound):
    """The last three are below the mutual information log 2; the bound may be negative."""
    found = information(torch.tensor(joint).double(), torch.tensor(apart).double()).item()
    assert found == pytest.approx(bound, abs=1e-6)


@pytest.fixture
def made():
    """A round of a source with a small network, and 32 target features."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    net = Net(backbone, 16, 3)
    Disentangler(8, 6).apply(net)
    return ready_round(net, {"target_features": {"target_features": torch.randn(32, 16).numpy()}}, 12, lr=0.01)


def watch(round, part, name):
    """{module: by how much one method of the step moves its parameters} for all modules that it changes."""
    step = part.begin(round)
    aux, net = round.scratch[NETWORKS], round.net
    modules = {"G": net.backbone, "D_di": net.bottleneck, "C": net.head, "D_ds": aux["specific"], "CI": aux["classes"],
               "R": aux["rebuild"], "M": aux["statistic"], "DI": aux["domain"]}  # fmt: skip
    original, seen = getattr(DisentanglingAdversary, name), {}

    def observed(self, *words):
        before = {key: snapshot(module) for key, module in modules.items()}
        result = original(self, *words)
        for key, module in modules.items():
            if changed(module, before[key]):
                moves = [value.detach() - before[key][name] for name, value in module.named_parameters()]
                seen[key] = torch.cat([move.flatten() for move in moves])
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DisentanglingAdversary, name, observed)
        torch.manual_seed(0)
        step(round.data.batch(np.arange(6)))
    return seen


@pytest.mark.parametrize(("method", "settings", "moves"), [
    ("_task", {}, "G D_di C D_ds CI"), ("_adversary", {}, "DI G"), ("_adversary", {"lambda_adv": 0}, "DI"),
    ("_disentangle", {"lambda_mi": 0, "lambda_rec": 0}, "D_ds"),
    ("_disentangle", {"lambda_mi": 0, "lambda_rec": 0, "confuse_updates_g": True}, "D_ds G"),
    ("_disentangle", {"lambda_rec": 0}, "D_ds M D_di"), ("_disentangle", {"lambda_mi": 0}, "D_ds R D_di"),
    ("_disentangle", {"lambda_rec": 0, "mine": "joint"}, "D_ds M D_di"),
])  # fmt: skip
def test_what_each_step_moves(made, method, settings, moves):
    """Parameters and statistics: step 1, steps 2 and 3, only step 4, and steps 4 to 6."""
    if settings:  # an optimizer that moves without any gradient
        made.optimizer = torch.optim.SGD(made.net.parameters(), 0.1, weight_decay=0.1)
    assert watch(made, DisentanglingAdversary(**settings), method).keys() == set(moves.split())


@pytest.mark.parametrize(("field", "others", "method", "module"), [
    ("lambda_rec", {"lambda_mi": 0.0}, "_disentangle", "D_di"),
    ("lambda_mi", {"lambda_rec": 0.0}, "_disentangle", "D_di"), ("lambda_adv", {}, "_adversary", "G"),
])  # fmt: skip
def test_coefficients_are_those_of_the_shared_network(made, field, others, method, module):
    """A tenth changes a tenth as much; a separate Adam would cancel the coefficient."""
    start, moves = copy.deepcopy(made.net.state_dict()), []
    for value in (1.0, 0.1):
        made.net.load_state_dict(start)
        made.store, made.optimizer = ClientStore(None), torch.optim.SGD(made.net.parameters(), 0.1)
        moves.append(watch(made, DisentanglingAdversary(**{field: value}, **others), method)[module])
    assert moves[0].abs().max() > 0
    assert moves[1].numpy() == pytest.approx(0.1 * moves[0].numpy(), rel=2e-2, abs=1e-7)


def test_own_networks_are_kept_with_their_moments(made):
    """A second round continues where the first has ended."""
    part = DisentanglingAdversary()
    part.begin(made)(made.data.batch(np.arange(6)))
    part.end(made)
    kept = snapshot(made.scratch[NETWORKS])
    part.begin(made)
    assert not changed(made.scratch[NETWORKS], kept)
    assert made.outbox["domain_identifier"].keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    steps = [entry["step"] for entry in made.scratch["adversary-optimizer"].state_dict()["state"].values()]
    assert min(steps) >= 1


def identifier_of(round, **settings):
    domain = DisentanglingAdversary(**settings)._networks(round)["domain"]
    return {"identifier:a": {name: value.numpy() for name, value in domain.state_dict().items()}}


def test_target_trains_its_backbone_alone(made):
    """Step 3t, where all labels are -1; without identifiers nothing changes."""
    records = identifier_of(made)
    made.data.labels.fill_(-1)
    for given in (records, {}):
        made.records, made.phase, made.outbox = given, "adapt", {}
        before = snapshot(made.net)
        AdversarialTarget(sample=5).answer(made)
        moved = changed(made.net, before)
        assert bool(moved) == bool(given)
        assert all(name.startswith("backbone.") for name in moved)
        assert made.outbox["target_features"]["target_features"].shape == (5, 16)
        state = made.net.state_dict()
        assert all((array == state[name].numpy()).all() for name, array in made.outbox["generator"].items())


def test_the_input_of_the_identifiers_is_said_and_not_guessed(made):
    """With a bottleneck as wide as its input, both kinds of identifiers have the same width."""
    Disentangler(16, 16).apply(made.net)
    made.records, made.phase = identifier_of(made, di_input="invariant"), "adapt"
    seen = []
    made.net.bottleneck.register_forward_hook(lambda *_: seen.append(1))
    settings = {"name": "fada", "disentangling_adversary": {"di_input": "invariant"}}
    build_recipe(Experiment(method=settings)).unlabelled.answer(made)
    assert seen


def test_untrained_identifiers_are_not_kept():
    """Without features of the target no identifier was trained; later ones of clients that are not drawn stay."""
    bank, server = DomainIdentifiers(), ServerRound(1, 3, ["a", "b"], {})
    entry = {"0.bias": np.zeros(1, np.float32)}
    assert bank.merge({}, {"a": entry, "b": entry}, server) == {}
    server.banks = {"target_features": {"server": {}}}
    assert bank.merge({"b": entry}, {"a": entry}, server).keys() == {"a", "b"}


def weigh(part, names, tight=None, state=None):
    """Weights of a round, with or without an answer."""
    server = ServerRound(1, 2, names, {}, state=state if state is not None else {})
    if tight is not None:
        server.answers = {"attention": {"tightness": {"tightness": np.array(tight)}}}
    return part.weigh([Update(name, 10 * place + 1, {}) for place, name in enumerate(names)], server)


def test_weights_without_the_target():
    """The last alpha, restricted and renormalized, or uniform without one; a single source has all weight."""
    part, state = TargetAttention(), {}
    assert weigh(part, ["a", "b", "c"]) == pytest.approx({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3})
    first = weigh(part, ["a", "b", "c"], [10, 9, 10.5, 10], state)
    later, total = weigh(part, ["a", "c"], None, state), first["a"] + first["c"]
    assert later == pytest.approx({"a": first["a"] / total, "c": first["c"] / total})
    assert weigh(part, ["b"]) == {"b": 1.0}
