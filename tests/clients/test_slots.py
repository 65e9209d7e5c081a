"""Objective, update and companions: what combines and what repeats its draws; neutral settings; missing classes."""

import json

import pytest
from safetensors.numpy import load_file
from support import Interrupt, numbers, run_small, small_experiment, tiny_experiment

from clients.companions.ditto import Ditto
from clients.local_round import LocalRound
from clients.objective.jigsaw import Jigsaw
from clients.tools.networks import evaluating, statistics_frozen
from clients.update.sharpness_aware import SharpnessAware
from fedsim.common.errors import UserError
from fedsim.methods.assembly import assemble, find_recipe
from fedsim.methods.recipe import Recipe
from fedsim.run.checkpoint import load_checkpoint
from fedsim.run.plan import run_folder
from strategies.weights.by_examples import ByExamples

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


@pytest.mark.parametrize(("method", "words"), [
    ("jigen+fedadg", "jigsaw assumes .* loss of a batch from the objective, .* not hold with adversarial_reference"),
    ("fedsam+elcfs", "sharpness_aware assumes .* moves the weights in each step, .* not hold with episodic_step"),
    ("mixup+selfreg", "self_reg assumes .* one class as its label, which does not hold with mix_up; use one of the"),
])  # fmt: skip
def test_what_does_not_combine_is_refused_by_a_fact(method, words):
    with pytest.raises(UserError, match=words):
        find_recipe(method)


def test_parts_that_were_steps_are_found_in_client():
    assert Recipe(client=Jigsaw()) == Recipe(objective=Jigsaw())
    assert Recipe(client=Ditto()) == Recipe(companions=(Ditto(),))
    found = assemble({"name": "fedsam", "client": "jigsaw"}, {})
    assert (found.objective, found.update) == (Jigsaw(), Recipe().update)
    assert assemble({"name": "perada", "client": "supervised_step"}, {}).companions == ()
    both = assemble({"name": "fedavg", "update": "sharpness_aware", "client": "jigsaw", "jigsaw": {"alpha": 0.5}}, {})
    assert (both.objective, both.update) == (Jigsaw(alpha=0.5), SharpnessAware())


SKEWED = {"clients_per_domain": 2, "partition": "dirichlet", "alpha": 0.1, "split": "random"}


def test_server_parts_know_the_classes_and_records_name_those_that_are_missing(tmp_path, monkeypatch):
    """The classes are counted in the handshake; environment.json and the log name those that a client lacks."""
    weigh = ByExamples.weigh

    def counting(self, updates, server):
        server.state["counts"] = {client: list(counts) for client, counts in server.class_counts.items()}
        return weigh(self, updates, server)

    monkeypatch.setattr(ByExamples, "weigh", counting)
    experiment = small_experiment(tmp_path, data={**SKEWED, "fraction": 0.05}, train={"rounds": 2})
    with pytest.raises(KeyboardInterrupt):
        run_small(experiment, Interrupt(1))
    folder = run_folder(experiment)
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
