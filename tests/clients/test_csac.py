"""CSAC: projections, attention, alignment, the client's step and ablations; the gap of FedDG-GA."""

import numpy as np
import pytest
import torch
from small_round import changed, snapshot
from support import numbers, run_small, small_experiment, tiny_experiment
from test_losses import naive_mmd

from clients.optimizers import make_optimizer
from clients.parts import Batch
from clients.reports.generalization_gap import GeneralizationGap
from clients.step.alignment import Projections, alignment_loss, attention
from clients.step.calibration import ACQUIRED
from clients.terms.moon import PREVIOUS
from fedsim.runs.plan import resolve
from fedsim.runs.workspace import Workspace

RESNET18 = [(128, 28, 28), (256, 14, 14), (512, 7, 7)]
ALEXNET = [(384, 13, 13), (256, 13, 13), (256, 6, 6)]


def features(levels=3, batch=6, shape=(4, 2, 3), seed=0, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, *shape, generator=generator, dtype=torch.float64) + shift for _ in range(levels)]


def explicit_scores(A, B, channel):
    """avg(A^T B) or avg(A B^T) through the whole map."""
    rows = []
    for a in A:
        a = a.flatten(2)
        maps = [a @ b.flatten(2).mT if channel else a.mT @ b.flatten(2) for b in B]
        rows.append(torch.stack([m.mean() for m in maps]))
    return torch.stack(rows)


@pytest.mark.parametrize(("shapes", "size", "kernels", "sizes"), [
    (RESNET18, (7, 7), [(22, 22), (3, 3), (1, 1)], [1_982_496, 73_760, 16_416]),
    (ALEXNET, (4, 4), [(10, 10), (10, 10), (3, 3)], [1_228_832, 819_232, 73_760]),
    ([(8, 5, 5), (8, 5, 5)], (5, 5), [(1, 1)] * 2, [288] * 2),
    ([(8, 9, 12), (8, 3, 6)], (3, 6), [(7, 7), (1, 1)], [12_576, 288]),
])  # fmt: skip
def test_projections(shapes, size, kernels, sizes):
    """Every level gets one shape; 4,145,344 published parameters of both sides for ResNet-18, 4,243,648 for AlexNet."""
    projections = [Projections(shapes, size, proj) for proj in ("conv", "pool1x1")]
    for project in projections:
        outputs = project([torch.randn(2, *shape) for shape in shapes])
        assert [tuple(output.shape) for output in outputs] == [(2, 32, *size)] * len(shapes)
    assert [level.kernel_size for level in projections[0].levels] == kernels
    assert [sum(p.numel() for p in level.parameters()) for level in projections[0].levels] == sizes


def test_attention_by_hand():
    """By hand, and by explicit maps without gradient; queries and keys scale a level's position scores alone."""
    A = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(1, 2, 2, 1)]
    B = [torch.tensor(b).view(1, 2, 2, 1) for b in ([[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [-1.0, -1.0]])]
    torch.testing.assert_close(explicit_scores(A, B, channel=False), torch.tensor([[2.5, -2.0]]))
    torch.testing.assert_close(explicit_scores(A, B, channel=True), torch.tensor([[2.5, 0.0]]))
    close = {"atol": 1e-6, "rtol": 0}
    torch.testing.assert_close(attention(A, B, channel=False), torch.tensor([[0.989013, 0.010987]]), **close)
    torch.testing.assert_close(attention(A, B, position=False), torch.tensor([[0.924142, 0.075858]]), **close)
    torch.testing.assert_close(attention(A, B), torch.tensor([[0.956577, 0.043423]]), **close)
    assert torch.equal(attention(A, B, position=False, channel=False), torch.tensor([[0.5, 0.5]]))
    A, B = [a.requires_grad_() for a in features(seed=1, shift=0.3)], features(seed=2, shift=0.2)
    position, channel = (explicit_scores(A, B, channel=kind).softmax(1) for kind in (False, True))
    torch.testing.assert_close(attention(A, B, channel=False), position.detach())
    torch.testing.assert_close(attention(A, B, position=False), channel.detach())
    torch.testing.assert_close(attention(A, B), ((position + channel) / 2).detach())
    assert not attention(A, B).requires_grad
    factors, channel_alone = (1.0, 2.0, 3.0), attention(A, B, position=False)
    for qk, a, b in (
        ([(lambda x, f=f: f * x, lambda x: x) for f in factors], [f * x for f, x in zip(factors, A)], B),
        ([(lambda x: x, lambda x, f=f: f * x) for f in factors], A, [f * x for f, x in zip(factors, B)]),
    ):
        expected = explicit_scores(a, b, channel=False).softmax(1).detach()
        torch.testing.assert_close(attention(A, B, qk, channel=False), expected)
        assert torch.equal(attention(A, B, qk, position=False), channel_alone)


@pytest.mark.parametrize("batch", [2, 6])
def test_alignment_equals_the_double_loop_with_gradients(batch):
    M = [a.requires_grad_() for a in features(batch=batch, seed=1)]
    L = [3 * b.requires_grad_() for b in features(batch=batch, seed=2, shift=0.5)]
    alpha = attention(M, L)
    fast = alignment_loss(M, L, alpha)
    slow = sum(alpha[i, j] * naive_mmd(m.flatten(1), b.flatten(1)) for i, m in enumerate(M) for j, b in enumerate(L))
    torch.testing.assert_close(fast, slow)
    fast_gradients = torch.autograd.grad(fast, [*M, *L], retain_graph=True)
    for a, b in zip(fast_gradients, torch.autograd.grad(slow, [*M, *L])):
        torch.testing.assert_close(a, b)


def test_alignment_of_other_kinds():
    """Both statistics, the same layer alone, the mean squared error, and less precision."""
    M, L = features(seed=1), features(seed=2, shift=0.5)
    alpha = torch.rand(3, 3, dtype=torch.float64)
    pairs = torch.stack([torch.stack([naive_mmd(m.flatten(1), b.flatten(1), statistic="v") for b in L]) for m in M])
    torch.testing.assert_close(alignment_loss(M, L, alpha, statistic="v"), (alpha * pairs).sum())
    diagonal = sum(naive_mmd(m.flatten(1), b.flatten(1)) for m, b in zip(M, L))
    torch.testing.assert_close(alignment_loss(M, L, None, pairs="same_layer"), diagonal)
    squares = torch.stack([torch.stack([(m - b).square().mean() for b in L]) for m in M])
    torch.testing.assert_close(alignment_loss(M, L, alpha, "mse"), (alpha * squares).sum())
    torch.testing.assert_close(alignment_loss(M, L, alpha, "mse", "same_layer"), squares.trace())
    M, L = ([level + shift for level in levels] for levels, shift in ((M, 5.0), (L, 4.0)))
    single, half = (
        alignment_loss([m.to(t) for m in M], [b.to(t) for b in L], alpha) for t in (torch.float32, torch.bfloat16)
    )
    assert single.dtype == half.dtype == torch.float32
    assert single.item() == pytest.approx(alignment_loss(M, L, alpha).item(), abs=1e-4)


@pytest.mark.parametrize("batch", [1, 4])
def test_degenerate_alignment_is_zero_and_keeps_the_graph(batch):
    M = [torch.full((batch, 2, 2, 2), 0.1, requires_grad=True) for _ in range(2)]
    L = [torch.full((batch, 2, 2, 2), 0.1) for _ in range(2)]
    loss = alignment_loss(M, L, attention(M, L))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(M[0].grad, torch.zeros_like(M[0]))


ROUND = {"round": 1, "phase": "train", "client": "rot0"}


def client_after_stage_a(tmp_path, add=(), **fields):
    table = {"name": "csac", "add": list(add), "semantic_calibration": fields}
    client = Workspace(resolve(small_experiment(tmp_path, table, model={"bottleneck": 8}))).client("rot0", "")
    client.store.open_round(0)
    client._take_steps(client._open({"round": 0, "phase": "acquire", "client": "rot0"}))
    client.store.commit()
    client.store.open_round(1)
    return client


def test_what_alignment_trains_and_terms_that_wait_for_the_rounds(tmp_path):
    """L_AL has gradients in the backbone up to its levels, and none in bottleneck and head; L^h stays as it is. Stage
    A is label-smoothed CE; of the terms, smoothed labels alone act in it."""
    client = client_after_stage_a(tmp_path, cross_entropy=False)
    round = client._open(ROUND)
    with torch.no_grad():  # the model must differ from L^h, otherwise there is nothing to align
        for parameter in client.net.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    round.optimizer = make_optimizer(client.net, round.train, 0.0)
    batch = client.data.batch(np.arange(16))
    client.recipe.step.begin(round)(Batch(batch.images, batch.labels))
    gradients = {name: parameter.grad for name, parameter in client.net.named_parameters()}
    assert all(gradients[name] is None for name in gradients if name.startswith(("bottleneck", "head", "backbone.fc")))
    assert gradients["backbone.conv1.weight"].abs().sum() > 0
    before, again = client.store.get(ACQUIRED), client._open(ROUND)
    client._take_steps(again)
    local = again.scratch[ACQUIRED]
    assert not any(client.state[name].equal(value) for name, value in before.items())
    assert all(value.equal(before[name]) for name, value in local.state_dict().items())
    assert not any(parameter.requires_grad for parameter in local.parameters())
    terms = "model_contrast", "proximal", "guiding_head", "representation_norm", "self_reg"
    plain, joined, smoothed = (
        client_after_stage_a(tmp_path / str(len(add)), add=add) for add in ((), terms, ("label_smoothing",))
    )
    model = snapshot(plain.net)
    assert all(joined.state[name].equal(value) for name, value in model.items())
    assert joined.store.get(ACQUIRED) is not None
    assert joined.store.get(PREVIOUS) is None
    assert changed(smoothed.net, model)


def test_a_late_client_acquires_from_the_initial_model(tmp_path):
    """Without L^h it runs stage A first, from the initial model, and then calibrates the received one."""
    experiment = small_experiment(tmp_path, {"name": "csac"}, train={"rounds": 2, "lr": 1e-12})
    space = Workspace(resolve(experiment))
    client = space.client("rot0", "")
    initial = {name: value.clone() for name, value in space.plan.build_net().named_parameters()}
    received = {name: client.state[name].numpy() + 1 for name in client.names("train")}
    arrays, _, _ = client.fit(list(received.values()), {"round": 2, "phase": "train", "client": "rot0"})
    acquired, sent = client.store.get(ACQUIRED), dict(zip(client.upload_names(), arrays))
    assert acquired.keys() == client.net.state_dict().keys()
    for name, value in initial.items():
        assert torch.allclose(acquired[name], value, atol=1e-6)
        assert np.allclose(sent[name], received[name], atol=1e-6)


@pytest.mark.parametrize("metric", ["train_loss", "validation_loss", "validation_accuracy"])
def test_gap_of_generalization_adjustment(metric, tmp_path, monkeypatch):
    """The gap is the received risk minus that of the own last model; the largest gap has the largest weight."""
    risks, original = [], GeneralizationGap._risk
    monkeypatch.setattr(GeneralizationGap, "_risk", lambda *words: risks.append(original(*words)) or risks[-1])
    train, method = {"iterations": 6}, {"name": "feddg-ga", "generalization_gap": {"metric": metric}}
    folder, _ = run_small(tiny_experiment(tmp_path, method, train=train))
    clients = numbers(folder / "clients.csv").set_index(["round", "client"])
    received = [risks[3 + 2 * index] for index in range(3)]
    np.testing.assert_allclose(clients.loc[2, "gap"], np.subtract(received, risks[:3]), rtol=1e-12)
    if metric != "train_loss":  # the risk of the received model is what the clients had recorded
        recorded = clients.loc[1, metric]
        np.testing.assert_allclose(recorded if metric == "validation_loss" else 1 - recorded, received, rtol=1e-6)
    assert (clients.loc[1, "gap_valid"] == 0).all()
    np.testing.assert_allclose(clients.loc[1, "weight"], 1 / 3)
    assert clients.loc[2, "weight"].nunique() > 1
    assert clients.loc[2, "weight"].idxmax() == clients.loc[2, "gap"].idxmax()
