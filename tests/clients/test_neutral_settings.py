"""With the settings that switch a method off it is FedAvg, bit for bit, and sends nothing else of the model."""

import json

import pytest
from safetensors.numpy import load_file
from support import numbers, run_small, tiny_experiment

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
