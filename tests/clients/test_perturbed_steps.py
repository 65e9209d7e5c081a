"""The clients of FedSAM, MoFedSAM, FedLESAM, FedCM, FedDyn and FedGaLA on numbers worked out by hand."""

import numpy as np
import pytest
import torch
from small_round import colour_images, ready_round, small_data, small_net, small_round, step_of
from support import run_small, small_experiment
from torch import nn

from clients.parts import Batch
from clients.step.supervised import SupervisedStep
from clients.store import ClientStore
from clients.terms.client_momentum import ClientMomentum
from clients.terms.cyclic_rate import CyclicRate
from clients.terms.dynamic_regularizer import OWN, DynamicRegularizer
from clients.terms.gradient_alignment import GradientAlignment, cosines
from clients.tools.last_move import ENTRY
from clients.update.sharpness_aware import AdaptiveSharpness, GlobalAscent, SharpnessAware, of_length
from fedsim.common.errors import UserError

D = {"momentum": {"w": np.ones(1, np.float32)}}
NO_D = {"momentum": {}}


class Scalar(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([float(w)]))


def square(w):
    return w**2


def scalar_round(w, loss=square, lr=0.1, records=None, store=None, momentum=0.0, decay=0.0, number=1):
    """A round of the scalar model whose loss is `loss(w)`, whatever the batch."""
    net = Scalar(w)
    round = small_round(small_data(colour_images(3)), records, net, round=number, steps=1, lr=lr)
    round.store = store or round.store
    round.optimizer = torch.optim.SGD(net.parameters(), lr, momentum=momentum, weight_decay=decay)
    round.loss_of = lambda batch: loss(net.w).sum()
    return round


def after_one_step(round, step=None, term=None):
    """w after one step with these parts."""
    if term is not None:
        assert term.begin(round) is None
    step_of(step or SupervisedStep(), round)(Batch(None, None))
    return round.net.w.item()


def stored(w):
    """The store of a client that received w in round 1, in round 2."""
    store = ClientStore(None)
    store.put(ENTRY, {"w": torch.tensor([w])})
    store.commit()
    store.open_round(2)
    return store


SAM, CM = SharpnessAware(0.5), ClientMomentum


@pytest.mark.parametrize(("step", "term", "round", "w"), [
    (SAM, None, {}, 0.7),
    (None, CM(), {"records": D}, 0.89),  # D = 1, alpha = .1
    (SAM, CM(), {"records": D}, 0.88),
    (SAM, CM(variant="official"), {"records": D}, 0.61),
    (None, CM(0.1), {"records": NO_D}, 0.98),  # without a direction a step is alpha times as long, or plain
    (None, CM(0.1, first_round="plain"), {"records": NO_D}, 0.8),
    (None, CM(1.0), {"records": D}, 0.8),
    (None, CM(), {"records": D, "lr": 0.0}, 1.0),
    (SharpnessAware(0.3), None, {"lr": 0.0, "w": 0.1}, torch.tensor(0.1).item()),  # bit-identical
    (SAM, None, {"decay": 0.5}, 0.65),  # weight decay acts at w: 1 - .1 (3 + .5 * 1)
    (GlobalAscent(0.5), None, {"store": 3.0}, 0.7),  # m = -2: e = +.5; the gradient of w^2 at 1.5 is 3
    (GlobalAscent(0.5), None, {}, 0.8),  # the first round
    (GlobalAscent(0.5), None, {"store": 1.0}, 0.8),  # a model that did not move
])  # fmt: skip
def test_numbers_by_hand(step, term, round, w):
    """L = w^2, w = 1, rho = .5, eta = .1."""
    values = {"w": 1, **round}
    if "store" in values:
        values["store"] = stored(values["store"])
    assert after_one_step(scalar_round(**values), step, term) == pytest.approx(
        w, abs=0 if values.get("lr") == 0 else 1e-6
    )


def test_direction_and_norm_of_the_perturbation():
    """w = 1 has ten times the rate .1, so that D = 3 of its move is .3 per gradient: u = .1 * 2 + .9 * .3 = .47. m =
    (-3, 0), (4), rho = .5 gives e = (.3, 0), (-.4); the size of m has no effect, 0 gives 0."""
    round = scalar_round(1, records={"momentum": {"w": np.full(1, 3, np.float32)}})
    round.optimizer.param_groups[0]["lr"] = 1.0
    assert after_one_step(round, None, ClientMomentum()) == pytest.approx(1 - 0.47)
    move = [torch.tensor([-3.0, 0.0]), torch.tensor([4.0])]
    for factor in (1, 100):
        e = of_length([factor * part for part in move], -0.5)
        torch.testing.assert_close(e, [torch.tensor([0.3, 0.0]), torch.tensor([-0.4])])
    assert of_length([torch.zeros(2)], 0.5)[0].tolist() == [0.0, 0.0]
    first = [torch.tensor([1.0, 0.0]), torch.tensor([[1.0, 1.0]]), torch.zeros(3)]
    second = [torch.tensor([0.0, 2.0]), torch.tensor([[3.0, 3.0]]), torch.ones(3)]
    torch.testing.assert_close(cosines(first, second), torch.tensor([0.0, 1.0, 0.0]))


def test_statistics_see_the_first_pass_alone():
    """They are those of one supervised step; `official` counts two batches. Tallies are of the first pass."""

    def trained(step):
        round = ready_round(small_net())
        round.terms = [lambda batch: round.tally("seen", batch.loss) or 0 * batch.loss]
        loss = step_of(step, round)(round.data.batch(np.arange(6)))
        assert round.tallied()["seen"] == pytest.approx(loss.item())
        return round.net.backbone[1]

    plain, sam, released = map(trained, (SupervisedStep(), SharpnessAware(), SharpnessAware(variant="official")))
    assert torch.equal(plain.running_mean, sam.running_mean)
    assert torch.equal(plain.running_var, sam.running_var)
    assert (plain.num_batches_tracked.item(), released.num_batches_tracked.item()) == (1, 2)
    assert not torch.equal(plain.running_mean, released.running_mean)


def test_dynamic_regularizer_over_three_rounds():
    """L_k = (w - c_k)^2 / 2, c = (1, 3), lam = .1, eta = .5: theta 2, 2.9, 2.855 with the server's H."""
    stores, theta, total = {c: ClientStore(None) for c in (1.0, 3.0)}, 0.0, 0.0
    locals_, globals_, own = [], [], []
    for number in (1, 2, 3):
        trained = []
        for c, store in stores.items():
            store.open_round(number)
            round = scalar_round(theta, lambda w, c=c: 0.5 * (w - c) ** 2, lr=0.5, store=store, number=number)
            part = DynamicRegularizer(0.1)
            trained.append(after_one_step(round, None, part))
            part.end(round)
            store.commit()
        total += sum(w - theta for w in trained) / 2
        theta = sum(trained) / 2 + total
        locals_.append(trained)
        globals_.append(theta)
        own.append([store.get(OWN)["w"].item() for store in stores.values()])
    np.testing.assert_allclose(locals_[:2], [(0.5, 1.5), (1.475, 2.425)], rtol=1e-6)
    np.testing.assert_allclose(own[:2], [(0.5, 1.5), (-0.025, 1.925)], atol=1e-6)
    np.testing.assert_allclose(globals_, (2.0, 2.9, 2.855), rtol=1e-6)


@pytest.mark.parametrize(("move", "settings", "optimizer", "w"), [
    (0.5, {}, {}, 1.2), (0.5, {"variant": "official"}, {}, 1.0), (-0.5, {"variant": "official"}, {}, 1.2),
    (-0.5, {"tau": -1.0}, {}, 1.2), (-0.5, {}, {"momentum": 0.9, "decay": 0.1}, 1.0),
])  # fmt: skip
def test_gradients_that_disagree_wait(move, settings, optimizer, w):
    """On (w - 3)^2 / 2 at w = 1 after this move; a tensor that waits is equal, even with momentum and weight decay."""
    round = scalar_round(1.0, lambda w: 0.5 * (w - 3) ** 2, store=stored(1.0 - move), **optimizer)
    found = after_one_step(round, None, GradientAlignment(**settings))
    assert found == (w if w == 1 else pytest.approx(w))
    assert round.tallied().get("dropped_tensors", 0.0) == (w == 1)
    if optimizer:
        assert not round.optimizer.state[round.net.w]["momentum_buffer"].any()


def test_half_precision_and_adam_are_refused(tmp_path):
    with pytest.raises(UserError, match="fp32"):
        SharpnessAware().check(small_experiment(tmp_path, "fedsam", train={"precision": "bf16"}))
    with pytest.raises(UserError, match="sgd"):
        run_small(small_experiment(tmp_path, "fedcm", train={"optimizer": "adam"}))


class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.tensor([2.0, -1.0])), nn.Parameter(torch.tensor([0.5]))


def test_adaptive_perturbation_by_hand():
    """T = (2.2, 1.2) for weights, 1 for the bias: ||T g||^2 = .66^2 + .48^2 + .2^2. The loss is linear plus squares."""
    net, seen = Affine(), []
    round = small_round(small_data(colour_images(3)), None, net, steps=1, lr=0.1)
    round.optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def loss(batch):
        seen.append((net.weight.detach().clone(), net.bias.detach().clone()))
        return (net.weight * torch.tensor([0.3, 0.4])).sum() + 0.2 * net.bias.sum()

    round.loss_of = loss
    step_of(AdaptiveSharpness(), round)(Batch(None, None))
    (weight, bias), (near_weight, near_bias) = seen
    moved = (*(near_weight - weight), *(near_bias - bias))
    assert [float(each) for each in moved] == pytest.approx([1.2096571752, 0.4798640034, 0.1666194456], abs=1e-6)
    assert net.weight.tolist() == pytest.approx([2 - 0.03, -1 - 0.04])
    assert AdaptiveSharpness(rho=0.0).begin(round) is not None


def test_the_rate_of_a_cycle_by_hand():
    """Of 8 rounds the cycles begin after 3: .01 falls to .0001 in 5 rounds."""
    part = CyclicRate(after=0.4, cycle=5)
    found = [0.01 * part.factor(number, 8) for number in range(1, 9)]
    assert found == pytest.approx([0.01, 0.01, 0.01, 0.00802, 0.00604, 0.00406, 0.00208, 0.0001])
    assert CyclicRate(after=0.0, cycle=1).factor(1, 8) == pytest.approx(0.01)
    round = scalar_round(1.0, lr=0.1, number=2)
    round.rounds = 2
    assert after_one_step(round, term=CyclicRate(after=0.0, cycle=2, low=0.5)) == pytest.approx(1 - 0.1 * 0.5 * 2)
    assert round.lr == pytest.approx(0.05)
