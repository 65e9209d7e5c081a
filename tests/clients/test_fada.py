"""FADA: numbers worked out by hand, what each step trains, and that no label is read."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from small_round import colour_images, small_data, small_round
from support import Interrupt, numbers, run_small, small_experiment
from torch import nn

import fedsim.data.loading as loading
from clients.disentangling import clustered, confusion_loss, domain_loss, information, source_loss, tightness
from clients.optimizers import make_optimizer
from clients.step.disentangling_adversary import NETWORKS, DisentanglingAdversary
from clients.store import ClientStore
from clients.unlabelled.adversarial_target import AdversarialTarget
from fedsim.arrays import record_to_arrays
from fedsim.combinations import check_recipe
from fedsim.data.digits import Digits
from fedsim.errors import UserError
from fedsim.methods import METHODS
from fedsim.models.inserts.disentangler import Disentangler
from fedsim.models.net import Net
from fedsim.run.workspace import close_workspaces
from strategies.server_round import ServerRound, Update
from strategies.visits.target_attention import TargetAttention, attention


def logit(probability):
    """One logit in float64."""
    return torch.tensor([math.log(probability / (1 - probability))], dtype=torch.float64)


def test_tightness_numbers():
    """T1: 3 and 8; single points add nothing; neither a shift nor the order changes it."""
    points = torch.tensor([[0.0], [2], [10], [10], [13], [99]])
    clusters = np.array([0, 0, 1, 1, 1, 2])
    assert tightness(points, clusters) == pytest.approx(3)
    assert tightness(points, clusters, squared=True) == pytest.approx(8)
    order = [4, 1, 5, 0, 3, 2]
    assert tightness(points[order] + 1000, clusters[order]) == pytest.approx(3)
    assert sorted(np.bincount(clustered(points, 3, 0))) == [1, 2, 3]
    assert tightness(torch.ones(5, 2), clustered(torch.ones(5, 2), 3, 0)) == 0


def test_attention_numbers():
    """T2: with I_0 = 1, raw gains; relative ones at two temperatures; uniform where there is nothing to compare."""
    alpha = attention(1 - np.array([0, 0.5, 0, -0.5]), "raw")
    assert alpha == pytest.approx([0.506480, 0.307196, 0.186324], abs=1e-6)
    assert alpha @ [1, 2, 3] == pytest.approx(1.679844, abs=1e-6)
    assert attention(np.array([200.0, 100, 250]), "raw") == pytest.approx([1, 0], abs=1e-6)
    assert attention(np.array([10, 9, 10.5]), temperature=1.0) == pytest.approx([0.5374, 0.4626], abs=1e-4)
    assert attention(np.array([10, 9, 10.5])) == pytest.approx([0.8176, 0.1824], abs=1e-4)
    assert attention(np.array([0.0, 0, 0])) == pytest.approx([0.5, 0.5])
    assert attention(np.array([3.0, 3, 3, 3])) == pytest.approx([1 / 3] * 3)


def test_adversarial_losses():
    """T3: DI = .8 on the source, .3 on the target; both at .5."""
    assert domain_loss(logit(0.8), logit(0.3)).item() == pytest.approx(0.579818, abs=1e-6)
    assert (source_loss(logit(0.8)) + source_loss(logit(0.3))).item() == pytest.approx(1.427116, abs=1e-6)
    assert domain_loss(logit(0.5), logit(0.5)).item() == pytest.approx(1.386294, abs=1e-6)


def test_information_numbers():
    """T4: the bound is below the mutual information log 2, and may be negative."""
    pair = lambda *values: torch.tensor(values, dtype=torch.float64)  # noqa: E731
    assert information(pair(1, 2), pair(0, 0)).item() == pytest.approx(1.5)
    assert information(pair(7, 7), pair(7, 7)).item() == pytest.approx(0)
    for t, bound in ((1, 0.566219), (2, 0.674997), (4, 0.692812)):
        found = information(pair(t, t), pair(t, t, -t, -t)).item()
        assert found == pytest.approx(bound, abs=1e-6)
        assert found <= math.log(2)
    assert information(pair(0, 4), pair(1, 3)).item() == pytest.approx(-0.433781, abs=1e-6)


def test_confusion_numbers():
    """T5: log 4 is the least."""
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
    """Which of the modules one method of the step moves."""
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
    """T6 by parameters and statistics: 1; 2 and 3; 4 alone; 4 to 6."""
    part = DisentanglingAdversary()
    assert watch(made, part, "_task") == {"G", "D_di", "C", "D_ds", "CI"}
    assert watch(made, part, "_adversary") == {"DI", "G"}
    assert watch(made, DisentanglingAdversary(lambda_mi=0, lambda_rec=0), "_disentangle") == {"D_ds"}
    assert watch(made, DisentanglingAdversary(lambda_mi=0, lambda_rec=0, confuse_updates_g=True), "_disentangle") == {
        "D_ds",
        "G",
    }
    assert watch(made, DisentanglingAdversary(lambda_rec=0), "_disentangle") == {"D_ds", "M", "D_di"}
    assert watch(made, DisentanglingAdversary(lambda_mi=0), "_disentangle") == {"D_ds", "R", "D_di"}


def moves_of(round, part, method, module):
    """How far one method of the step moves the parameters of one module of the shared network: their difference."""
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
    """Steps 3, 5 and 6 move G and D_di by their coefficient times the gradient: ten times less moves ten times less.

    An Adam of these steps alone would divide the coefficient out again, and leave weight decay at its full rate.
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


def test_without_target_features_there_is_no_adversary(made):
    """Round 1: the identifier stays."""
    made.records = {}
    step = DisentanglingAdversary().begin(made)
    before = snapshot(made.scratch[NETWORKS]["domain"])
    step(made.data.batch(np.arange(6)))
    assert not moved(before, made.scratch[NETWORKS]["domain"])


def test_a_batch_of_one_image(made):
    """T9: finite, and no mutual information."""
    step = DisentanglingAdversary().begin(made)
    assert torch.isfinite(step(made.data.batch(np.arange(1))))
    assert all(torch.isfinite(value).all() for value in made.net.state_dict().values())
    assert "mutual_information" not in made.sums


def test_own_networks_are_kept_with_their_moments(made):
    """A second round goes on where the first ended."""
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
    """Step 3t: labels are -1, identifiers and the rest of the model stay; without identifiers nothing moves."""
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


def weigh(part, names, tight=None, state=None):
    """Weights of a round, with or without an answer."""
    server = ServerRound(1, 2, names, {}, state=state if state is not None else {})
    if tight is not None:
        server.answers = {"attention": {"tightness": {"tightness": np.array(tight)}}}
    return part.weigh([Update(name, 10 * place + 1, {}) for place, name in enumerate(names)], server)


def test_weights_without_the_target():
    """3.2: the last alpha, restricted and renormalised; uniform where there is none; one source counts alone (T7)."""
    part, state = TargetAttention(), {}
    assert weigh(part, ["a", "b", "c"]) == pytest.approx({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3})
    first = weigh(part, ["a", "b", "c"], [10, 9, 10.5, 10], state)
    later = weigh(part, ["a", "c"], None, state)
    assert later["a"] == pytest.approx(first["a"] / (first["a"] + first["c"]))
    assert sum(later.values()) == pytest.approx(1)
    assert weigh(part, ["b"]) == {"b": 1.0}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A whole run, its folder and messages."""
    experiment = small_experiment(tmp_path_factory.mktemp("fada"), "fada")
    return *run_small(experiment), experiment


def model_of(folder):
    """The last model."""
    return load_file(folder / "last.safetensors")


def weight_of(record):
    """Bytes of a record's tensors."""
    return sum(array.nbytes for array in record_to_arrays(record).values())


def test_three_exchanges_a_round(run):
    """3.4: kinds of messages, what they hold, and their bytes in clients.csv; the target is asked for no label."""
    folder, grid, _ = run
    visits = [(message, reply) for message, reply in grid.seen if message.metadata.message_type == "query.visit"]
    assert [message.content.config_records["config"]["phase"] for message, _ in visits] == ["attention", "adapt"] * 3
    assert set(visits[0][0].content.array_records) == {"arrays", *(f"candidate:000{place}" for place in range(3))}
    assert set(visits[0][1].content.array_records) == {"tightness"}
    assert set(visits[1][0].content.array_records) == {"arrays"}  # round 1: identifiers are not trained yet
    assert set(visits[3][0].content.array_records) == {
        "arrays",
        *(f"identifier:{n}" for n in ("rot0", "rot15", "rot30")),
    }
    assert set(visits[3][1].content.array_records) == {"generator", "target_features"}
    trains = [message for message, _ in grid.seen if message.metadata.message_type == "train"]
    assert ["target_features" in message.content.array_records for message in trains] == [False] * 3 + [True] * 6
    clients = numbers(folder / "clients.csv")
    weights = clients[clients["round"] > 0].groupby("round")["weight"].sum()
    assert weights.tolist() == pytest.approx([1, 1, 1])
    size = sum(value.nbytes for value in model_of(folder).values())
    target = clients[(clients["client"] == "rot45") & (clients["round"] == 3)].iloc[0]
    sent, answered = (content.array_records for content in (visits[3][0].content, visits[3][1].content))
    assert target["bytes_down"] == 5 * size + 3 * weight_of(sent["identifier:rot0"])
    assert target["bytes_up_target_features"] == weight_of(answered["target_features"])


def test_results_are_marked(run):
    """The summary says that target images were used, and on how many it was tested."""
    folder, _, _ = run
    summary = numbers(folder / "summary.csv").iloc[0]
    assert summary["uses_target_unlabelled"]
    indices = loading.load_target(small_experiment(folder).data, "rot45")[2]
    assert 0.3 * len(indices) < summary["target_images"] < 0.7 * len(indices)


def test_tested_images_are_never_adapted_to(run):
    """The two parts of the target have nothing in common, whatever share is set apart."""
    for share in (0.2, 0.5, 0.9):
        data = run[2].data.model_copy(update={"adapt_share": share})
        apart = loading.load_unlabelled(data, "rot45")
        tested = loading.load_target(data, "rot45")[2]
        assert not set(apart.train) & set(tested)
        assert (apart.labels == -1).all()


def test_labels_of_the_target_change_nothing(run, tmp_path, monkeypatch):
    """T8: with the target's labels permuted every tensor of the run is the same, and so is all that is not tested."""
    folder, _, experiment = run
    original = Digits.images

    def permuted(self, domain, apart=False):
        images, labels = original(self, domain, apart)
        return (images, np.random.default_rng(1).permutation(labels)) if domain == "rot45" else (images, labels)

    monkeypatch.setattr(Digits, "images", permuted)
    close_workspaces()
    other, _ = run_small(experiment.replace(run={"output": str(tmp_path)}))
    close_workspaces()
    a, b = model_of(folder), model_of(other)
    assert all((a[name] == b[name]).all() for name in a)
    clients = numbers(folder / "clients.csv")
    assert clients.equals(numbers(other / "clients.csv"))
    assert not numbers(folder / "rounds.csv")["target_accuracy"].equals(
        numbers(other / "rounds.csv")["target_accuracy"]
    )


def test_resumed_run_is_the_same(run, tmp_path):
    """8.4: banks, alpha, the sources' networks and their moments come back."""
    folder, _, experiment = run
    again = experiment.replace(run={"output": str(tmp_path)})
    with pytest.raises(KeyboardInterrupt):
        run_small(again, Interrupt(after_round=2))
    close_workspaces()
    resumed, _ = run_small(again)
    assert numbers(resumed / "clients.csv").equals(numbers(folder / "clients.csv"))


def test_a_target_that_fails(tmp_path, monkeypatch):
    """The run goes on with uniform weights and without target features; by default it stops with the reason."""

    def broken(self, round):
        raise UserError("the disk is full")

    monkeypatch.setattr(AdversarialTarget, "answer", broken)
    experiment = small_experiment(tmp_path, "fada", train={"rounds": 2}, run={"on_client_failure": "continue"})
    folder, _ = run_small(experiment)
    clients = numbers(folder / "clients.csv").query("round == 2").set_index("client")
    assert clients.loc["rot0", "weight"] == pytest.approx(1 / 3)
    assert "the disk is full" in clients.loc["rot45", "status"]
    stopping = experiment.replace(run={"on_client_failure": "stop", "output": str(tmp_path / "b")})
    with pytest.raises(UserError, match=r"rot45.*the disk is full"):
        run_small(stopping)


def test_parts_that_miss_each_other():
    """Visits without a client that answers, and the other way round, are refused in one line."""
    row = METHODS["fada"]
    with pytest.raises(UserError, match=r"method\.unlabelled"):
        check_recipe(dataclasses.replace(row, unlabelled=None), "x")
    with pytest.raises(UserError, match="never visited"):
        check_recipe(dataclasses.replace(METHODS["fedavg"], unlabelled=AdversarialTarget()), "x")
