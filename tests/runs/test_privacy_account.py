"""Epsilon over all rounds, compared with integrals and with published numbers of single rounds."""

import json
import math

import numpy as np
import pytest
from support import Interrupt, run_small, tiny_experiment

from clients.step.calibration import SemanticCalibration
from fedsim.analysis.provenance import provenance_notes
from fedsim.commands.runs import headline
from fedsim.methods.assembly import build_recipe
from fedsim.methods.recipe import Recipe
from fedsim.runs import privacy_account
from fedsim.runs.privacy_account import delta_of, repeated_rounds, sampled_epsilon, statement, total_epsilon
from strategies.banks.feature_styles import FeatureStyles
from strategies.banks.interpolation_style import InterpolationStyle
from strategies.fuse.private_mean import PrivateMean


@pytest.mark.parametrize(("epsilon", "mu"), [(0.0, 1.0), (1.0, 1.0), (3.0, 2.0), (20.0, 4.47)])
def test_delta_is_the_hockey_stick_divergence(epsilon, mu):
    """It is the integral of max(0, p - e^epsilon q) for N(mu, 1) and N(0, 1)."""
    edge = epsilon / mu + mu / 2  # p > e^epsilon q from here on
    x = np.linspace(edge, edge + 40, 200_001)
    p, q = np.exp(-((x - mu) ** 2) / 2), np.exp(epsilon - x**2 / 2)
    found = np.trapezoid(p - q, x) / math.sqrt(2 * math.pi)
    assert delta_of(epsilon, mu) == pytest.approx(found, rel=1e-6, abs=1e-13)


def test_rounds_compose():
    """100 rounds at z = 10 equal one at z = 1; without noise epsilon is infinite, without rounds it is 0."""
    assert total_epsilon(10.0, 100, 1e-5) == pytest.approx(total_epsilon(1.0, 1, 1e-5), rel=1e-9)
    epsilon = total_epsilon(1.0, 20, 1e-5)
    assert delta_of(epsilon, math.sqrt(20)) == pytest.approx(1e-5, rel=1e-6)
    # the bound by concentrated privacy, T/(2z^2) + sqrt(2T ln(1/delta))/z = 31.5, is less tight
    assert epsilon < 20 / 2 + math.sqrt(2 * 20 * math.log(1e5))
    assert total_epsilon(1.0, 21, 1e-5) > epsilon
    assert total_epsilon(0.0, 1, 1e-5) == math.inf
    assert sampled_epsilon(1.0, 10, 1e-5, 5, 5) is None  # nobody is drawn
    assert total_epsilon(1.0, 0, 1e-5) == total_epsilon(1e6, 1, 1e-5) == 0.0
    assert 1e20 < total_epsilon(1e-14, 1, 1e-5) < math.inf  # with very little noise, without an overflow


def test_numbers_by_hand():
    """Local, epsilon 1 in each of 20 rounds: z = sqrt(2 ln 125000), mu = sqrt(20) / z. Central: z = 1."""
    # at 3.990776: Phi(-3.861794) - e^3.990776 Phi(-4.784872) = 5.62788e-5 - 54.09685 x 8.55481e-7 = 1e-5
    # at 28.37347: Phi(-4.108434) - e^28.37347 Phi(-8.580570) = 1.99176e-5 - 2.10108e12 x 4.72022e-18 = 1e-5
    z = math.sqrt(2 * math.log(1.25 / 1e-5))
    assert z == pytest.approx(4.844805, abs=1e-6)
    assert total_epsilon(z, 20, 1e-5) == pytest.approx(3.990776, abs=1e-6)
    assert total_epsilon(1.0, 20, 1e-5) == pytest.approx(28.37347, abs=1e-5)


def test_the_statement_names_all_rounds(tmp_path):
    experiment = tiny_experiment(tmp_path, train={"rounds": 20})
    assert statement(experiment, Recipe(), 3) == ""
    said = statement(experiment, Recipe(fuse=PrivateMean(1.0, 1.0)), 3)
    assert said.startswith("central differential privacy: epsilon 2")
    assert "20 rounds" in said
    prelude = statement(experiment, Recipe(step=SemanticCalibration(), fuse=PrivateMean(1.0, 1.0)), 3)
    assert "21 rounds" in prelude  # the acquired models are sent too
    banks = InterpolationStyle(), FeatureStyles(shared=False)
    assert "nor is what interpolation_style sends" in statement(experiment, Recipe(fuse=PrivateMean(), banks=banks), 3)
    noise = {"dp_clip": 0.5, "dp_epsilon": 1.0, "dp_delta": 1e-5}
    experiments = [tiny_experiment(tmp_path, train={"rounds": rounds, **noise}) for rounds in (1, 20)]
    one, local = (float(statement(each, Recipe(), 3).split("epsilon ")[1].split()[0]) for each in experiments)
    assert 0.5 < one < 1.0  # the classical calibration is not tight
    assert local > 3 * one


def test_a_prelude_and_repeated_rounds_are_not_counted_as_drawn(tmp_path, monkeypatch):
    """All clients take part in the prelude, and a repeated round draws the same clients as before."""
    counted = []
    monkeypatch.setattr(privacy_account, "sampled_epsilon", lambda *numbers: counted.append(numbers))
    experiment = tiny_experiment(tmp_path, train={"rounds": 20, "clients_per_round": 2})
    recipe = Recipe(step=SemanticCalibration(), fuse=PrivateMean(1.0, 2.0))
    said = statement(experiment, recipe, 30, repeated=3)
    assert counted == [(2.0, 20, 1e-5, 2, 30, 4)]
    assert f"epsilon {total_epsilon(2.0, 24, 1e-5):.4g} " in said
    assert "24 rounds, of which 3 were repeated" in said
    (tmp_path / "begun").write_text("6")
    assert [repeated_rounds(tmp_path, recipe, done) for done in (-1, 3, 5)] == [6, 2, 0]


def test_a_resumed_run_states_the_repeated_rounds(tmp_path):
    """Interrupted twice before its first checkpoint: 2 + 2 + 3 noisy models of every client have left it."""
    private = {"rounds": 3, "dp_clip": 0.001, "dp_epsilon": 1.0}
    model, run = {"backbone": "digits-cnn"}, {"checkpoint_every": 3, "update_limit": 0}
    experiment = tiny_experiment(tmp_path, model=model, train=private, run=run)
    models = 0
    for stop in (2, 2, 99):
        try:
            folder, grid = run_small(experiment, interrupt := Interrupt(stop))
        except KeyboardInterrupt:
            models += interrupt.after_round
    models += sum(message.metadata.message_type == "train" for message, _ in grid.seen) // 3
    said = json.loads((folder / "environment.json").read_text())["privacy"]
    epsilon = total_epsilon(math.sqrt(2 * math.log(1.25 / 1e-5)), models, 1e-5)
    assert models == 7
    assert f"epsilon {epsilon:.4g} " in said
    assert "7 rounds, of which 4 were repeated after an interruption" in said
    assert said in headline(folder)


@pytest.mark.parametrize("repeated", [0, 4])
def test_central_with_drawn_clients(tmp_path, repeated):
    """One client in another's place: the sensitivity is 2C. A repeated round draws the same clients again."""
    events = pytest.importorskip("dp_accounting").dp_event
    from dp_accounting.privacy_accountant import NeighboringRelation
    from dp_accounting.rdp import RdpAccountant

    experiment = tiny_experiment(tmp_path, rounds=50, train={"clients_per_round": 10})
    said = statement(experiment, Recipe(fuse=PrivateMean(1.0, 8.0)), 100, repeated)
    sampled = events.SampledWithoutReplacementDpEvent(100, 10, events.GaussianDpEvent(4.0))
    whole = [
        events.SelfComposedDpEvent(sampled, 50),
        *([events.SelfComposedDpEvent(events.GaussianDpEvent(4.0), repeated)] if repeated else []),
    ]
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    accountant.compose(events.ComposedDpEvent(whole))
    assert float(said.split("epsilon ")[1].split()[0]) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


def test_what_the_epsilon_does_not_cover_is_said_beside_it(tmp_path):
    """In the statement, and below a table of the runs that have recorded it."""
    method = {"name": "fedcm", "fuse": "private_mean"}
    experiment = tiny_experiment(tmp_path, method, model={"backbone": "digits-cnn"})
    said = statement(experiment, build_recipe(experiment), 3)
    assert said.endswith("(metrics and counts are not covered, nor is what gradient_count sends)")
    assert f"a, b: {said}." in provenance_notes({run: {"privacy": said} for run in "ab"})
