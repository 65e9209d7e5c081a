"""Objective, update and companions: what combines, what repeats its draws, and earlier names; missing classes."""

import dataclasses
import json

import numpy as np
import pytest
from support import Interrupt, numbers, run_small, small_experiment, tiny_experiment

from clients.companions.ditto import Ditto
from clients.local_round import LocalRound
from clients.objective.jigsaw import Jigsaw
from clients.parts import Step
from clients.tools.networks import evaluating, statistics_frozen
from clients.update.sharpness_aware import SharpnessAware
from fedsim.common.errors import UserError
from fedsim.methods.assembly import assemble, find_recipe
from fedsim.methods.compatibility import check_recipe
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


@pytest.mark.parametrize("method", [
    "jigen+fedsam", "csac+fedsam", "randconv+ditto", "elcfs+ditto", "l2d+elcfs", "stablefdg+mofedsam",
    {"name": "stablefdg", "style_exploration": {"official": True}, "enlarged_batch": {"balanced": "step"}},
], ids=str)  # fmt: skip
def test_an_objective_an_update_and_a_companion_combine(method, tmp_path):
    folder, _ = run_small(tiny_experiment(tmp_path, method, 1, train={"momentum": 0.0}))
    assert np.isfinite(numbers(folder / "rounds.csv")["train_loss"].iloc[1:]).all()


@pytest.mark.parametrize(("method", "words"), [
    ("jigen+fedadg", "jigsaw assumes .* loss of a batch from the objective, .* not hold with adversarial_reference"),
    ("fedsam+elcfs", "sharpness_aware assumes .* moves the weights in each step, .* not hold with episodic_step"),
    ("mixup+selfreg", "self_reg assumes .* one class as its label, which does not hold with mix_up; use one of the"),
])  # fmt: skip
def test_what_does_not_combine_is_refused_by_a_fact(method, words):
    with pytest.raises(UserError, match=words):
        find_recipe(method)


@dataclasses.dataclass(frozen=True)
class Mine(Step):
    """A step from outside, as earlier versions knew it."""

    def begin(self, round):
        return lambda batch: round.apply_gradients(round.loss_of(batch))


def test_a_step_from_outside_takes_neither_objective_nor_update_unless_it_says_so():
    check_recipe(Recipe(client=Mine()), "mine")
    for part in ({"objective": Jigsaw()}, {"update": SharpnessAware()}):
        with pytest.raises(UserError, match="which does not hold with mine"):
            check_recipe(Recipe(client=Mine(), **part), "mine")


def test_parts_that_were_steps_are_found_in_client():
    """They replace what answered the three questions before."""
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
