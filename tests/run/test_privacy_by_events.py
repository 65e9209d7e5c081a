"""The statement's epsilon for ten settings, beside dp-accounting's composition of the run's events."""

import json
import math

import pytest
from support import tiny_experiment

from clients.step.calibration import SemanticCalibration
from fedsim.methods.assembly import build_recipe
from fedsim.methods.recipe import Recipe
from fedsim.results.provenance import provenance_notes
from fedsim.run.privacy_account import statement
from strategies.fuse.private_mean import PrivateMean

pytest.importorskip("dp_accounting")
from dp_accounting import dp_event as events
from dp_accounting.pld import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant


def composed(noise, times):
    return events.SelfComposedDpEvent(events.GaussianDpEvent(noise), times)


def epsilon_of(said):
    return float(said.split("epsilon ")[1].split()[0])


@pytest.mark.parametrize(
    ("per_round", "delta", "rounds", "prelude", "repeated", "releases"),
    [(1.0, 1e-5, 1, False, 0, 1), (1.0, 1e-5, 20, False, 0, 20), (0.5, 1e-6, 40, False, 0, 40),
     (1.0, 1e-5, 20, True, 0, 21), (1.0, 1e-3, 9, True, 5, 15)],
)  # fmt: skip
def test_local(tmp_path, per_round, delta, rounds, prelude, repeated, releases):
    """A release of each client's model in every round, in the prelude, and in every round that was repeated."""
    train = {"dp_clip": 0.5, "dp_epsilon": per_round, "dp_delta": delta}
    recipe = Recipe(client=SemanticCalibration()) if prelude else Recipe()
    said = statement(tiny_experiment(tmp_path, rounds=rounds, train=train), recipe, 3, repeated)
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-3)
    accountant.compose(composed(math.sqrt(2 * math.log(1.25 / delta)) / per_round, releases))
    assert epsilon_of(said) == pytest.approx(accountant.get_epsilon(delta), rel=1e-3)


@pytest.mark.parametrize(("noise", "rounds"), [(3.0, 20), (5.0, 20), (10.0, 100)])
def test_central_with_all_clients(tmp_path, noise, rounds):
    said = statement(tiny_experiment(tmp_path, rounds=rounds), Recipe(fuse=PrivateMean(1.0, noise)), 3)
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-3)
    accountant.compose(composed(noise, rounds))
    assert epsilon_of(said) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.parametrize("repeated", [0, 4])
def test_central_with_drawn_clients(tmp_path, repeated):
    """One client in another's place: the sensitivity is 2C. A repeated round draws the same clients again."""
    experiment = tiny_experiment(tmp_path, rounds=50, train={"clients_per_round": 10})
    said = statement(experiment, Recipe(fuse=PrivateMean(1.0, 8.0)), 100, repeated)
    sampled = events.SampledWithoutReplacementDpEvent(100, 10, events.GaussianDpEvent(4.0))
    whole = [events.SelfComposedDpEvent(sampled, 50), *([composed(4.0, repeated)] if repeated else [])]
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    accountant.compose(events.ComposedDpEvent(whole))
    assert epsilon_of(said) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        ({"name": "fedavg", "fuse": "private_mean"}, ""),
        ({"name": "fedcm", "fuse": "private_mean"}, ", nor is what gradient_count sends"),
        ({"name": "feddg-ga"}, ", nor is what generalization_gap sends"),
    ],
)
def test_what_the_epsilon_does_not_cover_is_said_beside_it(tmp_path, method, parts):
    """In the statement, and below a table of the runs that have recorded it."""
    train = {} if "fuse" in method else {"dp_clip": 0.5}
    experiment = tiny_experiment(tmp_path, method, model={"backbone": "digits-cnn"}, train=train)
    said = statement(experiment, build_recipe(experiment), 3)
    assert said.endswith(f"(metrics and counts are not covered{parts})")
    assert f"a, b: {said}." in provenance_notes(json.loads(json.dumps({run: {"privacy": said} for run in "ab"})))
