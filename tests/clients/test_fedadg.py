"""FedADG: its losses, its networks, and a client's round."""

import copy

import numpy as np
import pytest
import torch
from small_round import changed, colour_images, digits_net, ready_round, small_data, small_round, snapshot
from torch import nn

from clients.step.adversarial_reference import AdversarialReference, features_are_nonnegative
from clients.step.feature_generator import (
    Discriminator,
    Generator,
    discriminator_loss,
    feature_loss,
    generator_loss,
    label_code,
    smoothed_cross_entropy,
)
from fedsim.settings import TrainSettings

SMALL = {"d_noise": 4, "width": 8, "r": 6, "hidden": 5}


def scores(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_losses():
    """D(h) = (.3, .4), D(h') = (.8, .6). `pull` lowers the score of a generated sample, the paper's form raises it."""
    extracted, generated = scores(0.3, 0.4), scores(0.8, 0.6)
    assert discriminator_loss(extracted, generated).item() == pytest.approx(0.225)
    assert discriminator_loss(extracted, generated, "max").item() == pytest.approx(-0.925)
    assert feature_loss(extracted).item() == pytest.approx(0.425)
    assert generator_loss(generated, "pull").item() == pytest.approx(0.5)
    assert generator_loss(generated, "paper").item() == pytest.approx(0.1)
    for kind, slope in (("pull", 0.287470), ("paper", -0.105754)):
        u = scores(1.0).requires_grad_()
        generator_loss(torch.sigmoid(u), kind).backward()
        assert u.grad.item() == pytest.approx(slope, abs=1e-6)
    for kind, slope in (("ls", 1.8), ("max", 0.2)):
        wrong = scores(0.9).requires_grad_()
        discriminator_loss(wrong, scores(0.5), kind).backward()
        assert wrong.grad.item() == pytest.approx(slope)
    logits, label = torch.tensor([[2.0, 0, 0, 0, 0]]), torch.tensor([0])
    for smooth, loss in ((0.2, 0.832653), (0.0, 0.432653)):  # each other class gets smooth / (C - 1)
        assert smoothed_cross_entropy(logits, label, smooth).item() == pytest.approx(loss, abs=1e-6)


def test_players():
    code = label_code(torch.tensor([2, 0]), 3, 0.7)
    assert code.tolist() == [pytest.approx([0, 0, 0.7]), pytest.approx([0.7, 0, 0])]
    features = Generator(4, 3, 8, 6, nonnegative=True)(torch.rand(2, 4), code)
    assert features.shape == (2, 6)
    assert (features >= 0).all()
    assert (Generator(0, 3, 8, 60, nonnegative=False)(torch.rand(2, 0), code) < 0).any()
    for label_first in (False, True):
        found = Discriminator(6, 3, 5, 4, label_first=label_first)(features, code)
        assert found.shape == (2,)
        assert ((found > 0) & (found < 1)).all()
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in Generator(2048, 7, 4096, d, True).parameters()) for d in (4096, 512)]
        discriminator = Discriminator(4096, 7, 1024, 1024)
    assert sizes == [25_202_688, 10_519_040]
    assert discriminator.projection.numel() == 4_194_304
    assert sum(p.numel() for p in discriminator.parameters()) == 1_057_793
    torch.manual_seed(0)
    kinds = {kind: Discriminator(50, 3, 64, 4, kind) for kind in ("frozen", "trained", "kaiming")}
    norms = {kind: discriminator.projection.norm().item() for kind, discriminator in kinds.items()}
    assert norms["frozen"] == pytest.approx(1) == pytest.approx(norms["trained"])
    assert norms["kaiming"] > 2
    trained = {kind: "projection" in dict(found.named_parameters()) for kind, found in kinds.items()}
    assert trained == {"frozen": False, "trained": True, "kaiming": True}


def small(steps=1, **fields):
    """(part, round, step function) of a round with this many steps that has begun."""
    net, train = digits_net(), TrainSettings(momentum=0.9, weight_decay=0.01)
    build = copy.deepcopy(net)
    round = ready_round(net, {"generator": {}}, 12, train=train, steps=steps, build_net=lambda: copy.deepcopy(build))
    part = AdversarialReference(**{**SMALL, "E0": 0, **fields})
    return part, round, part.begin(round)


@pytest.mark.parametrize("gen", ["pull", "paper", "frozen"])
def test_who_moves_in_which_step(gen, monkeypatch):
    """Step D changes D except its projection; step F, Cl the network; step G the generator if not frozen."""
    part, round, step = small(gen=gen)
    players, moved = round.scratch["generator"], {}
    watched = {"F": round.net, "G": players.generator, "D": players.discriminator}
    states = {name: snapshot(module) for name, module in watched.items()}

    def note(name):
        moved[name] = {key for key, module in watched.items() if changed(module, states[key])}
        states.update({key: snapshot(module) for key, module in watched.items()})

    for name, optimizer in (("d", players.d_optimizer), ("f", round.optimizer), ("g", players.g_optimizer)):
        taken = optimizer.step
        monkeypatch.setattr(optimizer, "step", lambda taken=taken, name=name: (taken(), note(name)))
    projection = players.discriminator.projection.clone()
    step(round.data.batch(np.arange(4)))
    assert moved == {"d": {"D"}, "f": {"F"}, **({} if gen == "frozen" else {"g": {"G"}})}
    assert players.discriminator.projection.equal(projection)
    assert round.net.training
    part.end(round)
    assert set(round.store.get("discriminator")) == set(players.discriminator.state_dict())
    assert set(round.outbox["generator"]) == {"hidden.weight", "hidden.bias", "out.weight", "out.bias"}


def test_loss_and_phases():
    """The step returns lambda1 CE + lambda0 L_f of its tallies; E0 / (E0 + E1) of the steps are plain."""
    _, round, step = small(steps=2, E0=1, E1=1, lambda1=0.15, lambda0=0.85, smooth=0.0)
    first, second = (step(round.data.batch(np.arange(start, start + 4))).item() for start in (0, 4))
    found = round.tallied()
    assert second == pytest.approx(0.15 * found["ce_loss"] + 0.85 * found["feature_loss"], rel=1e-5)
    assert first != pytest.approx(second)
    assert round.scratch["generator"].d_optimizer.state != {}
    _, round, step = small(steps=20, E0=3, E1=7)
    discriminator = round.scratch["generator"].discriminator
    before = snapshot(discriminator)
    for number in range(1, 8):
        step(round.data.batch(np.arange(4)))
        assert bool(changed(discriminator, before)) == (number > 6)


def test_players_of_the_next_round():
    """In round 1 all clients have the same G; each client has its own D, which it keeps with its momentum."""
    part, round, step = small()
    other = small_data(colour_images(12), client="b")
    theirs = part._players(small_round(other, {"generator": {}}, round.net, lr=0.1, build_net=round.build_net))
    players = round.scratch["generator"]
    assert not changed(theirs.generator, players.generator.state_dict())
    assert changed(theirs.discriminator, players.discriminator.state_dict())
    step(round.data.batch(np.arange(4)))
    part.end(round)
    buffer = round.store.get("discriminator-optimizer")["0.momentum_buffer"]
    round.store.commit()
    round.store.open_round(2)
    round.records = {"generator": {name: array + 1 for name, array in round.outbox["generator"].items()}}
    following = part._players(round)
    assert not changed(following.discriminator, players.discriminator.state_dict())
    assert following.d_optimizer.state_dict()["state"][0]["momentum_buffer"].equal(buffer)
    assert not following.g_optimizer.state
    assert torch.allclose(following.generator.out.bias, players.generator.out.bias + 1)


def test_sign_of_features_is_that_of_the_initial_network():
    """Clients, and another process later, see other images and other weights, and must make the same generator."""
    _, round, _ = small()
    assert round.scratch["generator"].generator.nonnegative
    signed = copy.deepcopy(round.net)
    signed.bottleneck = nn.Linear(50, 20)
    for net in (round.net, signed):
        for initial, nonnegative in ((copy.deepcopy(net), net is not signed), (signed, False)):
            round.net, round.build_net = net, lambda net=initial: copy.deepcopy(net)
            round.warm.clear()
            torch.manual_seed(0)
            assert features_are_nonnegative(round) is nonnegative
            assert torch.initial_seed() == 0
