"""FADA: numbers by hand, what each step trains, its exchanges, and that it reads no label of the target."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from small_round import changed, ready_round, snapshot
from support import numbers, run_small, small_experiment, tiny_experiment
from torch import nn
from torch.optim import SGD

import clients.step.disentangling_adversary as adversary
import fedsim.data.loading as loading
from clients.step.disentangling_adversary import NETWORKS, DisentanglingAdversary
from clients.tools.disentangling import clustered, confusion_loss, domain_loss, information, source_loss, tightness
from clients.tools.networks import statistics_frozen
from clients.unlabelled.adversarial_target import AdversarialTarget
from fedsim.common.errors import UserError
from fedsim.data.digits import Digits
from fedsim.methods.assembly import build_recipe
from fedsim.methods.compatibility import check_recipe
from fedsim.methods.table import METHODS
from fedsim.models.inserts.disentangler import Disentangler
from fedsim.models.net import Net
from fedsim.runs.workspace import close_workspaces
from fedsim.settings.experiment import read_experiment
from fedsim.tensors.arrays import record_to_arrays
from strategies.banks.domain_identifiers import DomainIdentifiers
from strategies.server_round import ServerRound, Update
from strategies.visits.target_attention import TargetAttention, attention


def logit(probability):
    return torch.tensor([math.log(probability / (1 - probability))], dtype=torch.float64)


def test_tightness_and_adversarial_losses():
    """3 and 8, whatever the shift and order; DI = .8 on the source, .3 on the target; confusion is at least log 4."""
    points, clusters = torch.tensor([[0.0], [2], [10], [10], [13], [99]]), np.array([0, 0, 1, 1, 1, 2])
    assert tightness(points, clusters) == pytest.approx(3)
    assert tightness(points, clusters, squared=True) == pytest.approx(8)
    order = [4, 1, 5, 0, 3, 2]
    assert tightness(points[order] + 1000, clusters[order]) == pytest.approx(3)
    assert sorted(np.bincount(clustered(points, 3, 0))) == [1, 2, 3]
    assert tightness(torch.ones(5, 2), clustered(torch.ones(5, 2), 3, 0)) == 0
    assert domain_loss(logit(0.8), logit(0.3)).item() == pytest.approx(0.579818, abs=1e-6)
    assert (source_loss(logit(0.8)) + source_loss(logit(0.3))).item() == pytest.approx(1.427116, abs=1e-6)
    assert domain_loss(logit(0.5), logit(0.5)).item() == pytest.approx(1.386294, abs=1e-6)
    rows = torch.tensor([[0.25] * 4, [0.7, 0.1, 0.1, 0.1]], dtype=torch.float64).log()
    assert confusion_loss(rows[:1]).item() == pytest.approx(1.386294, abs=1e-6)
    assert confusion_loss(rows[1:]).item() == pytest.approx(1.816108, abs=1e-6)


@pytest.mark.parametrize(("tight", "options", "alpha"), [
    ([1, 0.5, 1, 1.5], {"kind": "raw"}, [0.506480, 0.307196, 0.186324]), ([200, 100, 250], {"kind": "raw"}, [1, 0]),
    ([10, 9, 10.5], {"temperature": 1.0}, [0.537430, 0.462570]), ([10, 9, 10.5], {}, [0.817574, 0.182426]),
    ([0, 0, 0], {}, [0.5, 0.5]), ([3, 3, 3, 3], {}, [1 / 3] * 3),
])  # fmt: skip
def test_attention_numbers(tight, options, alpha):
    """Raw gains and relative gains at two temperatures; uniform when there is nothing to compare."""
    kind = (options.pop("kind"),) if "kind" in options else ()
    assert attention(np.array(tight, float), *kind, **options) == pytest.approx(alpha, abs=1e-6)


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
    """The modules that one method of the step changes."""
    step = part.begin(round)
    aux, net = round.scratch[NETWORKS], round.net
    modules = {"G": net.backbone, "D_di": net.bottleneck, "C": net.head, "D_ds": aux["specific"], "CI": aux["classes"],
               "R": aux["rebuild"], "M": aux["statistic"], "DI": aux["domain"]}  # fmt: skip
    original, seen = getattr(DisentanglingAdversary, name), set()

    def observed(self, *words):
        before = {key: snapshot(module) for key, module in modules.items()}
        result = original(self, *words)
        seen.update(key for key, module in modules.items() if changed(module, before[key]))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DisentanglingAdversary, name, observed)
        torch.manual_seed(0)
        step(round.data.batch(np.arange(6)))
    return seen


def test_a_backbone_without_weights_is_refused_before_the_first_round(tmp_path):
    experiment = read_experiment("hospitals", ["run.target=hungary", f"run.output={tmp_path}", "method.name=fada"])
    with pytest.raises(UserError, match="insert Disentangler: the backbone has no weights"):
        run_small(experiment)
    assert not list(tmp_path.rglob("rounds.csv"))


@pytest.mark.parametrize(("method", "settings", "moves"), [
    ("_task", {}, "G D_di C D_ds CI"), ("_adversary", {}, "DI G"), ("_adversary", {"lambda_adv": 0}, "DI"),
    ("_disentangle", {"lambda_mi": 0, "lambda_rec": 0}, "D_ds"),
    ("_disentangle", {"lambda_mi": 0, "lambda_rec": 0, "confuse_updates_g": True}, "D_ds G"),
    ("_disentangle", {"lambda_rec": 0}, "D_ds M D_di"), ("_disentangle", {"lambda_mi": 0}, "D_ds R D_di"),
    ("_disentangle", {"lambda_rec": 0, "mine": "joint"}, "D_ds M D_di"), ("_classify", {"task_steps": "two"}, "G C"),
])  # fmt: skip
def test_what_each_step_moves(made, method, settings, moves):
    """Parameters and statistics: step 1, steps 2 and 3, only step 4, and steps 4 to 6."""
    if settings:  # an optimizer that moves without any gradient
        made.optimizer = SGD(made.net.parameters(), 0.1, weight_decay=0.1)
    assert watch(made, DisentanglingAdversary(**settings), method) == set(moves.split())


@pytest.mark.parametrize("task_steps", ["one", "two"])
def test_six_steps_again(made, monkeypatch, task_steps):
    """One batch by the equations, all by gradient descent with a rate of 0.1; also with Algorithm 1's first step."""
    monkeypatch.setattr(adversary, "make_adam", lambda aux, lr, decay: SGD(aux.parameters(), 500 * lr))
    made.optimizer, made.net.bottleneck[6].p = SGD(made.net.parameters(), 0.1), 0.0
    step = DisentanglingAdversary(lambda_adv=0.5, lambda_mi=0.3, lambda_rec=0.2, task_steps=task_steps).begin(made)
    (net, aux), batch = copy.deepcopy((made.net, made.scratch[NETWORKS])), made.data.batch(np.arange(6))
    x, y, G, D, C = batch.images, batch.labels, net.backbone, net.bottleneck, net.head
    S, CI, R, M, DI = (aux[name] for name in ("specific", "classes", "rebuild", "statistic", "domain"))
    torch.manual_seed(0)
    step(batch)
    torch.manual_seed(0)
    chosen, order = torch.randint(32, (6,), generator=made.generator("target-features")), torch.randperm(6)

    def descend(loss, *modules):
        tensors = [tensor for module in modules for tensor in module.parameters()]
        for tensor, gradient in zip(tensors, torch.autograd.grad(loss, tensors, allow_unused=True), strict=True):
            tensor.data -= 0.1 * gradient

    def bound():
        p, q = D(f), S(f)
        return M(p, q).mean() - M(p, q[order]).exp().mean().log()

    def task():
        descend(F.cross_entropy(C(D(G(x))), y) + F.cross_entropy(CI(S(G(x))), y), G, D, C, S, CI)

    if task_steps == "one":
        task()
    else:
        descend(F.cross_entropy(C(D(G(x))), y), G, C)
    theirs = made.tensors("target_features", "")["target_features"][chosen]
    descend(-DI(G(x).detach()).sigmoid().log().mean() - (1 - DI(theirs).sigmoid()).log().mean(), DI)
    descend(-0.5 * DI(G(x)).sigmoid().log().mean(), G)
    if task_steps == "two":
        task()
    f = G(x).detach()
    descend(-CI(S(f)).softmax(1).log().sum() / 18, S)
    descend(-bound(), M)
    descend(0.3 * bound(), D, S)
    descend(0.2 * (R(torch.cat([D(f), S(f)], 1)) - f).square().sum() / f.numel(), D, S, R)
    for ours, wanted in ((made.net, net), (made.scratch[NETWORKS], aux)):
        for name, value in wanted.named_parameters():
            torch.testing.assert_close(ours.get_parameter(name), value, rtol=1e-4, atol=1e-6, msg=name)


def identifier_of(round, **settings):
    domain = DisentanglingAdversary(**settings)._networks(round)["domain"]
    return {"identifier:a": {name: value.numpy() for name, value in domain.state_dict().items()}}


def test_target_trains_its_backbone_alone(made):
    """Step 3t, where all labels are -1: features look more like those of a source; without identifiers no change."""
    records, judge = identifier_of(made), adversary.auxiliary_networks(made.net.bottleneck, 8, 3, 16)["domain"]
    judge.load_state_dict({name: torch.tensor(value) for name, value in records["identifier:a"].items()})
    made.data.labels.fill_(-1)
    for given in (records, {}):
        made.records, made.phase, made.outbox = given, "adapt", {}
        before, images = snapshot(made.net), made.data.batch(np.arange(12)).images
        with statistics_frozen(made.net):
            loss = source_loss(judge(made.net.pooled(images)))
        AdversarialTarget(sample=5).answer(made)
        with statistics_frozen(made.net):
            assert bool(given) == (source_loss(judge(made.net.pooled(images))) < loss)
        moved = changed(made.net, before)
        assert bool(moved) == bool(given)
        assert all(name.startswith("backbone.") for name in moved)
        assert made.outbox["target_features"]["target_features"].shape == (5, 16)
        state = made.net.state_dict()
        assert all((array == state[name].numpy()).all() for name, array in made.outbox["generator"].items())


def test_servers_without_the_target():
    """Untrained identifiers are not kept; weights are the last alpha, restricted, or uniform; one source has all."""
    bank, server = DomainIdentifiers(), ServerRound(1, 3, ["a", "b"], {})
    entry = {"0.bias": np.zeros(1, np.float32)}
    assert bank.merge({}, {"a": entry, "b": entry}, server) == {}
    server.banks = {"target_features": {"server": {}}}
    assert bank.merge({"b": entry}, {"a": entry}, server).keys() == {"a", "b"}
    part, state = TargetAttention(), {}
    assert weigh(part, ["a", "b", "c"]) == pytest.approx({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3})
    first = weigh(part, ["a", "b", "c"], [10, 9, 10.5, 10], state)
    later, total = weigh(part, ["a", "c"], None, state), first["a"] + first["c"]
    assert later == pytest.approx({"a": first["a"] / total, "c": first["c"] / total})
    assert weigh(part, ["b"]) == {"b": 1.0}


def weigh(part, names, tight=None, state=None):
    server = ServerRound(1, 2, names, {}, state=state if state is not None else {})
    if tight is not None:
        server.answers = {"attention": {"tightness": {"tightness": np.array(tight)}}}
    return part.weigh([Update(name, 10 * place + 1, {}) for place, name in enumerate(names)], server)


SOURCES = ("rot0", "rot15", "rot30")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    experiment = tiny_experiment(tmp_path_factory.mktemp("fada"), "fada", 3)
    return *run_small(experiment), experiment


def test_three_exchanges_a_round(run):
    folder, grid, _ = run
    visits = [pair for pair in grid.seen if pair[0].metadata.message_type == "query.visit"]
    assert [message.content.config_records["config"]["phase"] for message, _ in visits] == ["attention", "adapt"] * 3
    held = [tuple(set(each.content.array_records) for each in pair) for pair in visits]
    assert held[0] == ({"arrays", *(f"candidate:000{place}" for place in range(3))}, {"tightness"})
    assert held[1][0] == {"arrays"}  # round 1: identifiers are not trained yet
    assert held[3] == ({"arrays", *(f"identifier:{n}" for n in SOURCES)}, {"generator", "target_features"})
    trains = [message for message, _ in grid.seen if message.metadata.message_type == "train"]
    assert ["target_features" in message.content.array_records for message in trains] == [False] * 3 + [True] * 6
    clients = numbers(folder / "clients.csv")
    assert clients.query("round > 0").groupby("round")["weight"].sum().tolist() == pytest.approx([1, 1, 1])
    target = clients.query("client == 'rot45' and round == 3").iloc[0]

    size = sum(value.nbytes for value in load_file(folder / "last.safetensors").values())
    down, up = (record_to_arrays(visits[3][place].content.array_records[name]).values() for place, name in (
        (0, "identifier:rot0"), (1, "target_features")
    ))  # fmt: skip
    assert target["bytes_down"] == 5 * size + 3 * sum(array.nbytes for array in down)
    assert target["bytes_up_target_features"] == sum(array.nbytes for array in up)
    summary = numbers(folder / "summary.csv").iloc[0]
    assert summary["uses_target_unlabelled"]
    whole = loading.load_target(tiny_experiment(folder).data, "rot45")[2]
    assert 0.3 * len(whole) < summary["target_images"] < 0.7 * len(whole)


def test_tested_images_are_never_adapted_to(run):
    """The two parts of the target have no image in common; the target is asked for no label."""
    for share in (0.2, 0.5, 0.9):
        data = run[2].data.model_copy(update={"adapt_share": share})
        apart = loading.load_unlabelled(data, "rot45")
        assert not set(apart.train) & set(loading.load_target(data, "rot45")[2])
        assert (apart.labels == -1).all()


def test_labels_of_the_target_change_nothing(run, tmp_path, monkeypatch):
    """With permuted labels of the target, every tensor and all numbers but those of the test stay the same."""
    folder, _, experiment = run
    original = Digits.images

    def permuted(self, domain, apart=False):
        images, labels = original(self, domain, apart)
        return (images, np.random.default_rng(1).permutation(labels)) if domain == "rot45" else (images, labels)

    monkeypatch.setattr(Digits, "images", permuted)
    close_workspaces()
    other, _ = run_small(experiment.replace(run={"output": str(tmp_path)}))
    close_workspaces()
    assert (folder / "last.safetensors").read_bytes() == (other / "last.safetensors").read_bytes()
    assert numbers(folder / "clients.csv").equals(numbers(other / "clients.csv"))
    losses = [numbers(each / "rounds.csv")["target_loss"] for each in (folder, other)]
    assert not losses[0].equals(losses[1])


def test_a_target_that_fails(tmp_path, monkeypatch):
    """The run goes on with uniform weights and without target features; by default it stops with the reason."""

    def broken(self, round):
        raise UserError("the disk is full")

    monkeypatch.setattr(AdversarialTarget, "answer", broken)
    experiment = tiny_experiment(tmp_path, "fada", run={"on_client_failure": "continue"})
    clients = numbers(run_small(experiment)[0] / "clients.csv").query("round == 2").set_index("client")
    assert clients.loc["rot0", "weight"] == pytest.approx(1 / 3)
    assert "the disk is full" in clients.loc["rot45", "status"]
    with pytest.raises(UserError, match=r"rot45.*the disk is full"):
        run_small(experiment.replace(run={"on_client_failure": "stop", "output": str(tmp_path / "b")}))


def test_what_does_not_fit_is_refused(tmp_path):
    """Visits without a client that answers them, and the reverse; parts that need one pass; a frozen extractor."""
    with pytest.raises(UserError, match=r"method\.unlabelled"):
        check_recipe(dataclasses.replace(METHODS["fada"], unlabelled=None), "x")
    with pytest.raises(UserError, match="never visited"):
        check_recipe(dataclasses.replace(METHODS["fedavg"], unlabelled=AdversarialTarget()), "x")
    with pytest.raises(UserError, match=r"disentangling_adversary .* feature_highlighter reads the map"):
        build_recipe(small_experiment("unused", {"name": "fada", "add": ["feature_highlighter"]}))
    with pytest.raises(UserError, match=r"disentangling_adversary\.di_input alone, which sets both"):
        build_recipe(small_experiment("unused", "fada", parts={"adversarial_target": {"di_input": "invariant"}}))
    for train, words in (("head", "adversarial_target trains the backbone"), ("head.*", "FADA has nothing to train")):
        with pytest.raises(UserError, match=words):
            run_small(tiny_experiment(tmp_path, "fada", model={"train": train}))
