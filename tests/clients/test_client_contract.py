"""What the client's contract promises: the order of a round, hooks, the store; slots that combine; neutral settings."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from small_round import CONFIG, changed, client_of, digits_net, fit, small_round, snapshot
from support import interrupt, numbers, run_small, small_experiment, tiny_experiment

from clients.companions.ditto import Ditto
from clients.local_round import LocalRound
from clients.parts import Report, Term
from clients.terms.moon import ModelContrast
from clients.tools.networks import statistics_frozen
from fedsim.common.errors import UserError
from fedsim.methods.recipe import Recipe
from fedsim.models.layout import evaluating
from fedsim.models.norms import BIN, DSON, IBN, XAN, BatchNorm, MixIG
from fedsim.runs.checkpoint import load_checkpoint
from strategies.parts import Share
from strategies.weights.by_examples import ByExamples

EVENTS: list[tuple] = []


@dataclass(frozen=True)
class Recording(Term):
    """A term that removes the gradients of the head's bias, tallies values, and notes all calls of its methods."""

    def begin(self, round):
        EVENTS.append(("begin", round.steps, dict(round.scratch), round.index))
        round.scratch["seen"] = 0

        def hook():
            EVENTS.append(("hook", round.net.head.bias.grad is not None))
            round.net.head.bias.grad.mul_(0)

        round.before_step.append(hook)

        def term(batch):
            round.scratch["seen"] += len(batch.labels)
            round.tally("confidence", batch.logits.softmax(1).amax(1).mean())
            return 0.0 * batch.loss

        return term

    def end(self, round):
        EVENTS.append(("end", round.scratch["seen"]))


@dataclass(frozen=True)
class Ending(Report):
    def before(self, round):
        EVENTS.append(("before",))
        return {}

    def end(self, round):
        EVENTS.append(("report end",))

    def after(self, round):
        EVENTS.append(("after",))
        return {}


def test_order_of_a_round(tmp_path):
    """Every round begins with an empty scratch and knows its steps; a hook acts between backward and step; all end."""
    client = client_of(tmp_path, Recipe(terms=(Recording(),), reports=(Ending(),)), train={"epochs": 2})
    examples, size = client.data.examples, client.experiment.train.batch_size
    steps = 2 * -(-examples // size)
    for number in (1, 2):
        EVENTS.clear()
        before = snapshot(client.net.head)
        metrics = fit(client, {**CONFIG, "round": number})[2]
        assert [event[0] for event in EVENTS] == ["before", "begin", *["hook"] * steps, "end", "report end", "after"]
        assert EVENTS[1] == ("begin", steps, {}, 1)
        assert all(event[1] for event in EVENTS if event[0] == "hook")
        assert EVENTS[-3] == ("end", metrics["images"]) == ("end", 2 * examples)
        assert 0.1 < metrics["confidence"] < 1  # a mean over the steps
        assert changed(client.net.head, before) == {"weight"}
    assert Recipe(reports=(Ending(), Ending())).client_parts().count(Ending()) == 1  # what has two slots ends once


def test_tallies_remembered_values_and_records():
    """A tally is divided by the steps; values follow their key; `tensors` gives copies."""
    round = small_round(steps=4)
    for value in (1.0, 2.0, 5.0):
        round.tally("loss", torch.tensor(value, requires_grad=True))
    assert round.tallied() == {"loss": 2.0}
    round, made = small_round(), []
    for key in (1, 1, 2, 1):
        round.remembered("style", key, lambda key=key: made.append(key) or key)
    assert made == [1, 2, 1]
    assert round.for_phase("other").remembered("style", 1, lambda: 0) == 1
    arrays = {"w": np.array([1.0, 2.0], np.float32)}
    arrays["w"].setflags(write=False)
    round = small_round(None, {"bank": arrays})
    tensors = round.tensors("bank", "part")
    tensors["w"] += 1
    round.send("up", tensors)
    assert (round.outbox["up"]["w"].tolist(), arrays["w"].tolist()) == ([2, 3], [1, 2])
    with pytest.raises(UserError, match="part needs the record 'other'"):
        round.tensors("other", "part")


@pytest.mark.parametrize("norm", [BatchNorm(), XAN(), IBN(), DSON(), BIN(), MixIG()], ids=str)
def test_statistics_frozen(norm):
    """A pass inside the block normalizes like a training pass, but no norm layer changes its running statistics."""
    net = digits_net(norm=norm).train()
    images, before = torch.rand(4, 3, 16, 16), snapshot(net)
    with statistics_frozen(net):
        inside = net(images)
        inside.sum().backward()
    assert not changed(net, before)
    torch.testing.assert_close(net(images), inside)
    assert {name.rpartition(".")[2] for name in changed(net, before)} >= {"running_var", "num_batches_tracked"}


@dataclass(frozen=True)
class HeadOnly(Share):
    def place(self, net):
        return {name: "shared" if name.startswith("head") else "frozen" for name in net.state_dict()}


def test_frozen_tensors_and_changes_in_place(tmp_path):
    """Frozen tensors, including running statistics, are neither sent nor changed, and no client stores them."""
    recipe = Recipe(share=HeadOnly(), companions=(Ditto(),), terms=(ModelContrast(),))
    client = client_of(tmp_path, recipe, train={"local_checks": 2})
    before, head = snapshot(client.net), {"head.weight", "head.bias"}
    sent, _, _ = fit(client)
    assert set(sent) == head == set(client.names("train")) == changed(client.net, before)
    client.store.open_round(2)
    assert client.store.get("personal") is None
    for entry in ("ditto", "previous-model"):  # parts that keep a model leave out what is the same everywhere
        assert client.store.get(entry).keys() == head
    fit(client, {**CONFIG, "round": 2})
    assert changed(client.net, before) == head
    client = client_of(tmp_path, Recipe(reports=(Doubling(),)))
    sent, _, _ = fit(client)
    assert not all(client.state[name].is_contiguous() for name in sent)  # channels-last
    for name, array in sent.items():
        np.testing.assert_array_equal(array, 2 * client.state[name].numpy())


@pytest.mark.parametrize("module", range(5))
def test_a_mode_that_a_part_left_does_not_stay(module, tmp_path):
    view = client_of(tmp_path, Recipe(share=HeadOnly())).view
    for set_mode, modes in ((view.train, [mode for _, mode in view.modes]), (view.eval, [False] * len(view.modes))):
        view.modes[module][0].training ^= True
        set_mode()
        assert [module.training for module in view.net.modules()] == modes
    assert len({mode for _, mode in view.modes}) == 2  # norm layers whose statistics are frozen stay in evaluation mode


@dataclass(frozen=True)
class Doubling(Report):
    """Doubles, in place, everything that leaves."""

    def leave(self, round, trained, received):
        for array in trained.values():
            flat = array.reshape(-1)
            flat += flat
            assert np.shares_memory(flat, array)  # C order: a change of the flat view is a change of the array
        return trained


OFFICIAL = {"name": "rsc", "self_challenging": {"variant": "official"}}
FAR = {"name": "fisc", "style_contrast": {"margin": 2.0}}  # with less, few draws matter
DRAWING = ["augmix", "randconv", "jigen", "rsc", OFFICIAL, "l2d", "fedccrl", "stablefdg", "fedig", "cutmix",
           FAR, "sfa-s", "selfreg"]  # fmt: skip


@pytest.mark.parametrize("method", DRAWING, ids=str)
def test_the_second_pass_of_a_batch_has_the_draws_of_the_first(method, tmp_path, monkeypatch):
    """At the same weights the loss is the same; the embedding of L2D, which draws in the network, is in eval mode."""
    loss_of, found = LocalRound.loss_of, []
    still = evaluating if method == "l2d" else statistics_frozen

    def twice(round, batch):
        sums = dict(round.sums)
        with still(round.net):
            found.append([loss_of(round, batch).item() for _ in range(2)])
        round.sums = sums
        return loss_of(round, batch)

    monkeypatch.setattr(LocalRound, "loss_of", twice)
    run_small(tiny_experiment(tmp_path, method, 1, train={"batch_size": 32}, parts={"jigsaw": {}}))
    assert found
    assert all(first == second for first, second in found)


SKEWED = {"clients_per_domain": 2, "partition": "dirichlet", "alpha": 0.1, "split": "random"}


def test_server_parts_know_the_classes_and_records_name_those_that_are_missing(tmp_path, monkeypatch):
    """The classes are counted in the handshake; environment.json and the log name those that a client lacks."""
    weigh = ByExamples.weigh

    def counting(self, updates, server):
        server.state["counts"] = {client: list(counts) for client, counts in server.class_counts.items()}
        return weigh(self, updates, server)

    monkeypatch.setattr(ByExamples, "weigh", counting)
    experiment = small_experiment(tmp_path, data={**SKEWED, "fraction": 0.05}, train={"rounds": 2})
    folder = interrupt(experiment, 1)
    counts = load_checkpoint(folder / "checkpoint").state.parts["weights"]["counts"]
    assert len(counts) == 6
    clients = numbers(folder / "clients.csv").query("round == 1").set_index("client")
    assert {client: sum(own) for client, own in counts.items()} == clients["examples"].astype(int).to_dict()
    said = json.loads((folder / "environment.json").read_text())
    lacking = {client: [said["classes"][k] for k, n in enumerate(own) if n == 0] for client, own in counts.items()}
    assert any(lacking.values())
    assert said["missing_classes"] == {client: names for client, names in lacking.items() if names}


UNIFORM = {"name": "fedavg", "weights": "uniform"}
MIX = {"add": ["mix_style"], "mix_style": {"stages": [1]}}  # draws in the network
HEAD = {"representation": {"stochastic": False, "width": 8}}
PLAYERS = {"d_noise": 4, "width": 8, "r": 6, "hidden": 5}
CSAC = {
    "name": "csac", "semantic_calibration": {"acquire_iterations": 0, "acquire_epochs": 0, "weight": 0.0},
    "semantic_divergence": {"strategy": "average"},
}  # fmt: skip
# (the method without its parts, FedAvg with what remains, changes of [train])
TABLE = [
    ({"name": "feddg-ga", "generalization_adjustment": {"d": 0.0}}, "fedavg", {}),
    ({"name": "fedsam", "sharpness_aware": {"rho": 0.0}}, "fedavg", {}),
    ({"name": "fedlesam", "global_ascent": {"rho": 0.0}}, "fedavg", {}),
    ({"name": "fedgala", "gradient_alignment": {"tau": -1.0}, "fuse": "weighted_mean"}, "fedavg", {}),
    ({"name": "moon", "model_contrast": {"mu": 0.0}, "inserts": "none"}, "fedavg", {}),
    ({"name": "fpl", "prototype_contrast": {"min_per_proto": 1000}}, "fedavg", {}),
    ({"name": "elcfs", "episodic_step": {"m_test": 0}}, "fedavg", {}),
    ({"name": "fediir", "classifier_alignment": {"gamma": 0.0}}, UNIFORM, {}),
    ({"name": "perada", "inserts": "none", "companions": "none"}, UNIFORM, {}),
    ({"name": "stablefdg", "inserts": ["style_exploration"], "style_exploration": {"p": 0.0},
      "enlarged_batch": {"sharing": 0.0}}, UNIFORM, {}),
    ({"name": "fedl2r", "representation_norm": {"alpha_l2r": 0.0}, **HEAD},
     {"name": "fedavg", "add": ["representation"], **HEAD}, {}),
    ({"name": "fedadg", "adversarial_reference": {**PLAYERS, "lambda0": 0.0, "lambda1": 1.0, "smooth": 0.0, "E0": 0},
      **MIX}, {"name": "fedavg", **MIX}, {}),
    ({"name": "ditto", **MIX}, {"name": "fedavg", **MIX}, {}),
    (CSAC, UNIFORM, {"budget": "images"}),
    (CSAC, UNIFORM, {"budget": "steps"}),
]  # fmt: skip


def outcome(folder, method, train):
    run, grid = run_small(tiny_experiment(folder, method, train={"iterations": 2, **train}))
    names = {name for _, reply in grid.seen for name in reply.content.array_records.get("arrays", {})}
    columns = numbers(run / "rounds.csv")[["train_loss", "target_loss", "mean_validation_accuracy"]][1:]
    return load_file(run / "last.safetensors"), columns, names


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """FedAvg's outcome, run once for all methods that are compared with it."""
    found = {}

    def of(method, train):
        key = json.dumps([method, train])
        if key not in found:
            found[key] = outcome(tmp_path_factory.mktemp("plain"), method, train)
        return found[key]

    return of


@pytest.mark.parametrize(("method", "reference", "train"), TABLE, ids=repr)
def test_switched_off_it_is_fedavg(method, reference, train, plain, tmp_path):
    model, rounds, names = outcome(tmp_path, method, train)
    wanted = plain(reference, train)
    assert all((model[name] == array).all() for name, array in wanted[0].items())
    assert rounds.equals(wanted[1])
    assert names == wanted[2]
