"""FADA: numbers worked out by hand, what each step trains, and that it reads no label of the target."""

import copy
import math

import numpy as np
import pytest
import torch
from small_round import colour_images, small_data, small_round
from torch import nn

from clients.optimizers import make_optimizer
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
    """One logit in float64."""
    return torch.tensor([math.log(probability / (1 - probability))], dtype=torch.float64)


def test_tightness_numbers():
    """3 and 8; single points add nothing; a shift and another order change nothing."""
    points = torch.tensor([[0.0], [2], [10], [10], [13], [99]])
    clusters = np.array([0, 0, 1, 1, 1, 2])
    assert tightness(points, clusters) == pytest.approx(3)
    assert tightness(points, clusters, squared=True) == pytest.approx(8)
    order = [4, 1, 5, 0, 3, 2]
    assert tightness(points[order] + 1000, clusters[order]) == pytest.approx(3)
    assert sorted(np.bincount(clustered(points, 3, 0))) == [1, 2, 3]
    assert tightness(torch.ones(5, 2), clustered(torch.ones(5, 2), 3, 0)) == 0


def test_attention_numbers():
    """With I_0 = 1, raw gains and relative gains at two temperatures; uniform when there is nothing to compare."""
    alpha = attention(1 - np.array([0, 0.5, 0, -0.5]), "raw")
    assert alpha == pytest.approx([0.506480, 0.307196, 0.186324], abs=1e-6)
    assert alpha @ [1, 2, 3] == pytest.approx(1.679844, abs=1e-6)
    assert attention(np.array([200.0, 100, 250]), "raw") == pytest.approx([1, 0], abs=1e-6)
    assert attention(np.array([10, 9, 10.5]), temperature=1.0) == pytest.approx([0.5374, 0.4626], abs=1e-4)
    assert attention(np.array([10, 9, 10.5])) == pytest.approx([0.8176, 0.1824], abs=1e-4)
    assert attention(np.array([0.0, 0, 0])) == pytest.approx([0.5, 0.5])
    assert attention(np.array([3.0, 3, 3, 3])) == pytest.approx([1 / 3] * 3)


def test_adversarial_losses():
    """DI = .8 on the source, .3 on the target; both at .5."""
    assert domain_loss(logit(0.8), logit(0.3)).item() == pytest.approx(0.579818, abs=1e-6)
    assert (source_loss(logit(0.8)) + source_loss(logit(0.3))).item() == pytest.approx(1.427116, abs=1e-6)
    assert domain_loss(logit(0.5), logit(0.5)).item() == pytest.approx(1.386294, abs=1e-6)


def test_information_numbers():
    """The bound is below the mutual information log 2, and may be negative."""
    pair = lambda *values: torch.tensor(values, dtype=torch.float64)  # noqa: E731
    assert information(pair(1, 2), pair(0, 0)).item() == pytest.approx(1.5)
    assert information(pair(7, 7), pair(7, 7)).item() == pytest.approx(0)
    for t, bound in ((1, 0.566219), (2, 0.674997), (4, 0.692812)):
        found = information(pair(t, t), pair(t, t, -t, -t)).item()
        assert found == pytest.approx(bound, abs=1e-6)
        assert found <= math.log(2)
    assert information(pair(0, 4), pair(1, 3)).item() == pytest.approx(-0.433781, abs=1e-6)


def test_confusion_numbers():
    """The smallest value is log 4."""
    rows = torch.tensor([[0.25] * 4, [0.7, 0.1, 0.1, 0.1]], dtype=torch.float64).log()
    assert confusion_loss(rows[:1]).item() == pytest.approx(1.386294, abs=1e-6)
    assert confusion_loss(rows[1:]).item() == pytest.approx(1.816108, abs=1e-6)


@pytest.fixture
def made():
    """A round of a source with a small network, and 32 target features."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    net = Net(backbone, 16, 3)
    Disentangler(8, 6).apply(net)
    data = small_data(colour_images(12))
    features = torch.randn(32, 16).numpy()
    round = small_round(data, {"target_features": {"target_features": features}}, net, steps=1)
    round.optimizer, round.lr = make_optimizer(net, round.train, 0.01), 0.01
    net.train()
    return round


def snapshot(module):
    """Parameters and buffers."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def moved(before, module):
    """Whether a parameter or buffer has changed."""
    return any(not torch.equal(value, before[name]) for name, value in module.state_dict().items())


def watch(round, part, name):
    """The names of the modules that one method of the step changes."""
    step = part.begin(round)
    aux, net = round.scratch[NETWORKS], round.net
    modules = {"G": net.backbone, "D_di": net.bottleneck, "C": net.head, "D_ds": aux["specific"], "CI": aux["classes"],
               "R": aux["rebuild"], "M": aux["statistic"], "DI": aux["domain"]}  # fmt: skip
    original, seen = getattr(DisentanglingAdversary, name), []

    def observed(self, *words):
        before = {key: snapshot(module) for key, module in modules.items()}
        result = original(self, *words)
        seen.append({key for key, module in modules.items() if moved(before[key], module)})
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DisentanglingAdversary, name, observed)
        step(round.data.batch(np.arange(6)))
    return seen[0]


def test_what_each_step_moves(made):
    """Parameters and statistics: step 1, steps 2 and 3, only step 4, and steps 4 to 6."""
    part = DisentanglingAdversary()
    assert watch(made, part, "_task") == {"G", "D_di", "C", "D_ds", "CI"}
    assert watch(made, part, "_adversary") == {"DI", "G"}
    made.optimizer = torch.optim.SGD(made.net.parameters(), 0.1, weight_decay=0.1)  # moves without any gradient
    assert watch(made, DisentanglingAdversary(lambda_adv=0), "_adversary") == {"DI"}
    assert watch(made, DisentanglingAdversary(lambda_mi=0, lambda_rec=0), "_disentangle") == {"D_ds"}
    assert watch(made, DisentanglingAdversary(lambda_mi=0, lambda_rec=0, confuse_updates_g=True), "_disentangle") == {
        "D_ds",
        "G",
    }
    assert watch(made, DisentanglingAdversary(lambda_rec=0), "_disentangle") == {"D_ds", "M", "D_di"}
    assert watch(made, DisentanglingAdversary(lambda_mi=0), "_disentangle") == {"D_ds", "R", "D_di"}


def moves_of(round, part, method, module):
    """The differences by which one method of the step changes the parameters of one module of the shared network."""
    round.optimizer = torch.optim.SGD(round.net.parameters(), 0.1)
    step = part.begin(round)
    original, found = getattr(DisentanglingAdversary, method), []

    def observed(self, *words):
        before = [value.detach().clone() for value in module.parameters()]
        original(self, *words)
        found.extend(value.detach() - old for value, old in zip(module.parameters(), before))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DisentanglingAdversary, method, observed)
        torch.manual_seed(0)
        step(round.data.batch(np.arange(6)))
    return torch.cat([move.flatten() for move in found])


@pytest.mark.parametrize(
    ("field", "others", "method", "module"),
    [
        ("lambda_rec", {"lambda_mi": 0.0}, "_disentangle", "bottleneck"),
        ("lambda_mi", {"lambda_rec": 0.0}, "_disentangle", "bottleneck"),
        ("lambda_adv", {}, "_adversary", "backbone"),
    ],
)
def test_coefficients_are_those_of_the_shared_network(made, field, others, method, module):
    """Steps 3, 5 and 6 change G and D_di by their coefficient times the gradient: a tenth changes a tenth as much.

    A separate Adam for these steps would cancel the coefficient, and would apply weight decay at its full rate.
    """
    start = copy.deepcopy(made.net.state_dict())
    moves = []
    for value in (1.0, 0.1):
        made.net.load_state_dict(start)
        made.store = ClientStore(None)
        part = DisentanglingAdversary(**{field: value}, **others)
        moves.append(moves_of(made, part, method, getattr(made.net, module)))
    assert moves[0].abs().max() > 0
    assert moves[1].numpy() == pytest.approx(0.1 * moves[0].numpy(), rel=2e-2, abs=1e-7)


def test_the_statistic_descends_with_the_branches_where_its_step_is_joint(made):
    """Its first step of Adam is the opposite of the one by which it ascends the same bound (DAL's code)."""
    start, moves = copy.deepcopy(made.net.state_dict()), {}
    for mine in ("alternate", "joint"):
        made.net.load_state_dict(start)
        made.store = ClientStore(None)
        part = DisentanglingAdversary(mine=mine, lambda_mi=1.0, lambda_rec=0.0, weight_decay=0.0)
        step = part.begin(made)
        statistic = nn.utils.parameters_to_vector(made.scratch[NETWORKS]["statistic"].parameters())
        torch.manual_seed(0)
        step(made.data.batch(np.arange(6)))
        moves[mine] = nn.utils.parameters_to_vector(made.scratch[NETWORKS]["statistic"].parameters()) - statistic
        assert made.sums.pop("mutual_information") != 0
    assert moves["joint"].abs().max() > 0
    assert moves["joint"].detach().numpy() == pytest.approx(-moves["alternate"].detach().numpy(), abs=2e-5)
    assert watch(made, DisentanglingAdversary(mine="joint", lambda_rec=0), "_disentangle") == {"D_ds", "M", "D_di"}


def test_without_target_features_there_is_no_adversary(made):
    """In round 1 the identifier does not change."""
    made.records = {}
    step = DisentanglingAdversary().begin(made)
    before = snapshot(made.scratch[NETWORKS]["domain"])
    step(made.data.batch(np.arange(6)))
    assert not moved(before, made.scratch[NETWORKS]["domain"])


def test_a_batch_of_one_image(made):
    """All numbers are finite, and there is no mutual information."""
    step = DisentanglingAdversary().begin(made)
    assert torch.isfinite(step(made.data.batch(np.arange(1))))
    assert all(torch.isfinite(value).all() for value in made.net.state_dict().values())
    assert "mutual_information" not in made.sums


def test_own_networks_are_kept_with_their_moments(made):
    """A second round continues where the first has ended."""
    part = DisentanglingAdversary()
    step = part.begin(made)
    step(made.data.batch(np.arange(6)))
    part.end(made)
    kept = snapshot(made.scratch[NETWORKS])
    part.begin(made)
    assert not moved(kept, made.scratch[NETWORKS])
    assert made.outbox["domain_identifier"].keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    steps = [entry["step"] for entry in made.scratch["adversary-optimizer"].state_dict()["state"].values()]
    assert steps
    assert min(steps) >= 1


def test_target_trains_its_backbone_alone(made):
    """Step 3t: labels are -1; identifiers and the rest of the model do not change; without identifiers nothing does."""
    identifier = {name: value.numpy() for name, value in
                  DisentanglingAdversary()._networks(made)["domain"].state_dict().items()}  # fmt: skip
    made.data.labels.fill_(-1)
    for records, trains in (({"identifier:a": identifier}, True), ({}, False)):
        made.records, made.phase, made.outbox = records, "adapt", {}
        before = snapshot(made.net)
        AdversarialTarget(sample=5).answer(made)
        changed = {name for name, value in made.net.state_dict().items() if not torch.equal(value, before[name])}
        assert bool(changed) == trains
        assert all(name.startswith("backbone.") for name in changed)
        assert made.outbox["target_features"]["target_features"].shape == (5, 16)
        assert all((made.outbox["generator"][name] == made.net.state_dict()[name].numpy()).all()
                   for name in made.outbox["generator"])  # fmt: skip


def test_the_input_of_the_identifiers_is_said_and_not_guessed(made):
    """With a bottleneck as wide as its input, both kinds of identifiers have the same width."""
    Disentangler(16, 16).apply(made.net)
    part = DisentanglingAdversary(di_input="invariant")
    identifier = {name: value.numpy() for name, value in part._networks(made)["domain"].state_dict().items()}
    made.records, made.phase = {"identifier:a": identifier}, "adapt"
    seen = []
    made.net.bottleneck.register_forward_hook(lambda *_: seen.append(1))
    recipe = build_recipe(Experiment(method={"name": "fada", "disentangling_adversary": {"di_input": "invariant"}}))
    target = recipe.unlabelled
    assert target.di_input == "invariant"
    target.answer(made)
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
    later = weigh(part, ["a", "c"], None, state)
    assert later["a"] == pytest.approx(first["a"] / (first["a"] + first["c"]))
    assert sum(later.values()) == pytest.approx(1)
    assert weigh(part, ["b"]) == {"b": 1.0}
