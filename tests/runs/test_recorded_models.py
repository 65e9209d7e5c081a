"""What `run.record` asks for: it changes no other number, and its numbers are those that other records have already."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from support import numbers, run_small, tiny_experiment

from fedsim.common.errors import UserError
from fedsim.data import load_target
from fedsim.records.alphas import FILE, Alphas, read_alphas
from fedsim.runs.local_models import distances
from fedsim.runs.plan import resolve
from fedsim.runs.workspace import open_workspace
from fedsim.tensors.arrays import load_arrays
from strategies.parts import Update

SOURCES = ("rot0", "rot15", "rot30")
DOMAINS = (*SOURCES, "rot45")
TRAIN = {"iterations": 6, "lr": 0.1}


def wide(details, quantity):
    """The values of a quantity by round, client and name."""
    rows = details[details["quantity"] == quantity]
    return rows.set_index(["round", "client", "name"])["value"]


@pytest.fixture(scope="module")
def csac(tmp_path_factory):
    """(the folder of a run of CSAC with the records, that of the same run without)."""
    folder = tmp_path_factory.mktemp("csac")
    run = {"select_on": "local"}
    plain, _ = run_small(tiny_experiment(folder / "plain", "csac", train=TRAIN, run=run))
    run["record"] = ["local_models", "classes"]
    return run_small(tiny_experiment(folder / "recorded", "csac", train=TRAIN, run=run))[0], plain


def test_other_numbers_are_as_without_the_records(csac):
    recorded, plain = csac
    for name in ("rounds.csv", "clients.csv", "summary.csv"):
        assert numbers(recorded / name).equals(numbers(plain / name)), name
    assert (recorded / "last.safetensors").read_bytes() == (plain / "last.safetensors").read_bytes()
    details, before = (numbers(folder / "details.csv") for folder in csac)
    added = ("local_accuracy", "fused_accuracy", "distance_across")
    assert details[~details["quantity"].isin(added)].reset_index(drop=True).equals(before)
    assert "class_counts" not in json.loads((plain / "environment.json").read_text())


def test_models_on_all_domains(csac):
    """The acquisition (round 0) and both rounds. On its own domain a client's model has the accuracy that the client
    measures; a fused model has that of the clients' validation and of the evaluation on the unseen domain."""
    details, clients, rounds = (numbers(csac[0] / f"{name}.csv") for name in ("details", "clients", "rounds"))
    details = details.fillna({"client": ""})
    local, fused = wide(details, "local_accuracy"), wide(details, "fused_accuracy")
    assert set(local.index) == {(number, client, name) for number in range(3) for client in SOURCES for name in DOMAINS}
    assert set(fused.index) == {(number, "", name) for number in range(3) for name in DOMAINS}
    measured = clients.query("round > 0").set_index(["round", "client"])
    for (number, client), row in measured.iterrows():
        assert local[number, client, client] == row["local_validation_accuracy"]
        assert fused[number, "", client] == row["validation_accuracy"]
    for number, accuracy in rounds.set_index("round")["target_accuracy"].items():
        assert fused[number, "", "rot45"] == accuracy
    assert local.nunique() > 3


def test_distances_by_hand():
    """Two clients of a and one of b: the pair of a differs by (3, 4), and each from b by (3, 4) or (0, 0)."""
    models = {"a/0": [0.0, 0.0], "a/1": [3.0, 4.0], "b": [0.0, 0.0]}
    updates = [Update(client, 1, {"w": np.array(value, np.float32)}) for client, value in models.items()]
    found = distances(updates, ["w"])
    assert found["distance_within"]["w"] == pytest.approx((25 / 2) ** 0.5)
    assert found["distance_across"]["w"] == pytest.approx((25 / 2) ** 0.5 / 2)
    assert distances(updates[:1], ["w"]) == {}


def test_classes_of_the_clients(csac):
    counts = json.loads((csac[0] / "environment.json").read_text())["class_counts"]
    clients = numbers(csac[0] / "clients.csv").query("round == 1").set_index("client")
    assert {client: sum(row) for client, row in counts.items()} == clients["examples"].to_dict()


def test_alpha_of_every_image(tmp_path):
    """Over the images it has the mean, deviation and bounds that details.csv has of the selected round, and each image
    has what the rule gives for it alone."""
    experiment = tiny_experiment(tmp_path, "fedig-a", 3, run={"record": ["alpha"]})
    folder, _ = run_small(experiment)
    alphas = read_alphas(folder)
    chosen = int(numbers(folder / "summary.csv").loc[0, "best_validation_round"])
    details = numbers(folder / "details.csv").query(f"round == {chosen}").set_index(["name", "quantity"])["value"]
    for layer, values in zip(alphas.layers, alphas.alpha, strict=True):
        of_layer = [values.mean(), values.std(), values.min(), values.max()]
        assert list(details[layer]) == pytest.approx(of_layer, rel=1e-9)
    index = load_file(folder / "predictions" / f"round{chosen:06d}.safetensors")["index"]
    assert alphas.index.tolist() == index.tolist()
    assert alphas.alpha.std(axis=1).max() > 0
    space = open_workspace(resolve(experiment))
    load_arrays(space.net, load_file(folder / "best.safetensors"), space.travelling)
    images = torch.from_numpy(load_target(experiment.data, "rot45")[0][alphas.index])
    for place in range(3):  # one image alone
        predict = space.recipe.infer.begin(space.net, tuple)
        with torch.inference_mode():
            predict(space.transforms.normalize(space.transforms.read(images[[place]])))
        of_image = [float(values[0]) for values in space.recipe.infer.alphas(space.net).values()]
        assert of_image == pytest.approx(alphas.alpha[:, place].tolist(), abs=1e-5)


def test_alphas_are_kept_in_the_order_of_the_images(tmp_path):
    Alphas(np.array([7, 2]), np.array([[0.1, 0.9], [0.2, 0.8]]), ("x", "y")).write(tmp_path)
    alphas = read_alphas(tmp_path)
    assert (alphas.index.tolist(), alphas.layers) == ([2, 7], ("x", "y"))
    assert alphas.alpha.tolist() == [[0.9, 0.1], [0.8, 0.2]]
    (tmp_path / FILE).write_bytes(b"no tensors")
    with pytest.raises(UserError, match=r"alpha\.safetensors"):
        read_alphas(tmp_path)


@pytest.mark.parametrize(("method", "run", "said"), [
    ("fedavg", {"record": ["alpha"]}, "needs an inference rule with an alpha for each image .* fedavg has eval_mode"),
    ("fedig-a", {"record": ["alpha"], "runtime": "deployment", "federation": "f"}, "'alpha' reads the images"),
    ("fedavg", {"record": ["local_models"], "runtime": "deployment", "federation": "f"}, "of simulations alone"),
    ({"name": "fedavg", "fuse": "secure_mean"}, {"record": ["local_models"], "update_limit": 0}, "secure_mean hides"),
    ({"name": "silobn", "without_statistics": {"upload": False}, "infer": "recompute"}, {"record": ["local_models"]},
     r"clients of .* keep \d+ to themselves"),
])  # fmt: skip
def test_what_cannot_be_recorded_is_one_line(tmp_path, method, run, said):
    with pytest.raises(UserError, match=said):
        run_small(tiny_experiment(tmp_path, method, run=run))
    assert not list(tmp_path.rglob("rounds.csv"))
