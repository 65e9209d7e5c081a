"""Whole runs on real data: no client reads the target, special settings equal FedAvg, and bytes are counted."""

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file
from support import SHARED_DATA, numbers, run_small, small_experiment

import fedsim.run.target
from fedsim.common.seeding import numpy_rng
from fedsim.data import loading
from fedsim.methods.assembly import build_net, build_recipe
from fedsim.results import read_runs, select
from fedsim.run.workspace import close_workspaces, workspace


def last(folder):
    """The last global model."""
    return load_file(folder / "last.safetensors")


def same_model(a, b, **tolerance):
    """All tensors equal (exactly, unless a tolerance is given)."""
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], err_msg=name, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("method", ["fedavg", "deepall", "csac", "ccst"])
def test_no_client_opens_the_target(method, tmp_path, monkeypatch):
    """Only the server's evaluation reads the unseen domain; without this evaluation the same round is selected."""
    opened = []
    original = loading.reader

    def watched(*words):
        read = original(*words)
        images = read.images
        read.images = lambda domain, *more: opened.append(domain) or images(domain, *more)
        return read

    monkeypatch.setattr(loading, "reader", watched)
    monkeypatch.setattr(
        fedsim.run.target, "load_target", lambda *words: opened.append("evaluation") or loading.load_target(*words)
    )
    close_workspaces()
    experiment = small_experiment(tmp_path, method)
    folder, _ = run_small(experiment)
    place = opened.index("evaluation")
    assert opened[place + 1] == "rot45"
    del opened[place : place + 2]
    assert set(opened) == {"rot0", "rot15", "rot30"}
    rounds = pd.read_csv(folder / "rounds.csv")
    blind = rounds.assign(target_accuracy=np.nan, target_loss=np.nan)
    assert select(rounds, "best_validation")["round"] == select(blind, "best_validation")["round"]


def test_fedprox_with_mu_zero_is_fedavg(tmp_path):
    """mu = 0 equals FedAvg bit for bit."""
    plain, _ = run_small(small_experiment(tmp_path / "a"))
    zero, _ = run_small(small_experiment(tmp_path / "b", {"name": "fedprox", "proximal": {"mu": 0.0}}))
    same_model(last(plain), last(zero))


def test_fedsb_without_smoothing_and_budget_is_fedavg(tmp_path):
    """With eps = 0, no budget and equal sizes both are equal."""
    plain, _ = run_small(small_experiment(tmp_path / "a"))
    method = {"name": "fedsb", "label_smoothing": {"eps": 0.0}, "balanced_budget": {"budget": 0}}
    reduced, _ = run_small(small_experiment(tmp_path / "b", method))
    same_model(last(plain), last(reduced))


def test_generalization_adjustment_with_d_zero_is_fedavg(tmp_path):
    """With d = 0 and equal sizes both are equal."""
    plain, _ = run_small(small_experiment(tmp_path / "a"))
    reduced, _ = run_small(
        small_experiment(tmp_path / "b", {"name": "feddg-ga", "generalization_adjustment": {"d": 0.0}})
    )
    same_model(last(plain), last(reduced))


def test_csac_without_its_parts_is_fedavg(tmp_path):
    """With averaging fusion, lambda 0 and no stage A (whose model would replace the initial one) both are equal."""
    plain, _ = run_small(small_experiment(tmp_path / "a"))
    method = {"name": "fedavg", "fuse": "semantic_divergence", "semantic_divergence": {"strategy": "average"}}
    reduced, _ = run_small(small_experiment(tmp_path / "b", method))
    same_model(last(plain), last(reduced), rtol=1e-5, atol=1e-6)


def test_fedbn_without_batch_norm_is_fedavg(tmp_path):
    """On a network without batch norm both models are equal."""
    backbone = {"backbone": "digits-cnn"}
    plain, _ = run_small(small_experiment(tmp_path / "a", model=backbone))
    fedbn, _ = run_small(small_experiment(tmp_path / "b", "fedbn", model=backbone))
    same_model(last(plain), last(fedbn))


def test_fedbn_and_silobn_part_after_round_one(tmp_path):
    """Equal non-norm tensors after round 1, different ones from round 2 on."""
    models = {}
    for rounds in (1, 2):
        for method in ("fedbn", "silobn"):
            experiment = small_experiment(tmp_path / f"{method}{rounds}", method, train={"rounds": rounds})
            models[method, rounds] = last(run_small(experiment)[0])
    names = [name for name in models["fedbn", 1] if "norm" not in name]
    assert all(np.array_equal(models["fedbn", 1][name], models["silobn", 1][name]) for name in names)
    assert not all(np.array_equal(models["fedbn", 2][name], models["silobn", 2][name]) for name in names)


def test_deepall_on_one_domain_is_fedavg_with_one_client(tmp_path, monkeypatch):
    """The same model, bit for bit, once both draw the same batches. Their streams have other names."""

    def without_the_client(seed, purpose, client, *rest):
        return numpy_rng(seed, purpose, *rest)

    monkeypatch.setattr("clients.local_round.numpy_rng", without_the_client)
    data = {"domains": ["rot0", "rot45"]}
    single, _ = run_small(small_experiment(tmp_path / "a", data=data))
    pooled, _ = run_small(small_experiment(tmp_path / "b", "deepall", data=data))
    a, b = numbers(single / "clients.csv"), numbers(pooled / "clients.csv")
    for column in ("examples", "validation_examples", "train_loss", "validation_loss"):
        assert list(a[column].dropna()) == list(b[column].dropna())
    same_model(last(single), last(pooled))


def test_personal_state_survives_between_rounds(tmp_path):
    """In round 2 a client trains on its own norm side of round 1 and the server's shared tensors."""
    from clients.base import DomainClient

    starts, ends = {}, {}
    train = DomainClient._train

    def spy(self, round):
        key = (round.client, round.round)
        starts[key] = {name: value.clone() for name, value in self.net.state_dict().items()}
        loss = train(self, round)
        ends[key] = {name: value.clone() for name, value in self.net.state_dict().items()}
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DomainClient, "_train", spy)
        experiment = small_experiment(tmp_path, "gperxan")
        run_small(experiment)
    places = workspace(experiment.toml()).places
    personal = [name for name, place in places.items() if place == "upload"]
    assert personal
    for client in ("rot0", "rot15", "rot30"):
        for name in personal:
            assert starts[client, 2][name].equal(ends[client, 1][name]), name
    for name, place in places.items():
        if place == "shared":
            assert starts["rot0", 2][name].equal(starts["rot15", 2][name]), name
    assert any(not starts["rot0", 2][name].equal(starts["rot15", 2][name]) for name in personal)


def test_bytes_are_counted_by_record(tmp_path):
    """FedAvg sends the whole state both ways; gPerXAN's server does not send the batch-norm part of its XAN layers."""

    def per_client(method):
        experiment = small_experiment(tmp_path / method, method)
        clients = numbers(run_small(experiment)[0] / "clients.csv")
        net = build_net(experiment, build_recipe(experiment))
        size = sum(value.numel() * value.element_size() for value in net.state_dict().values())
        row = clients[clients["round"] == 1].iloc[0]
        return size, row["bytes_up_arrays"], row["bytes_down_arrays"]

    size, up, down = per_client("fedavg")
    assert (up, down) == (size, 2 * size)  # the model is sent to train and to validate, and returned once
    size, up, down = per_client("gperxan")
    side = 4 * (4 * 30 + 2) + 2 * 8  # 30 channels x 4 floats and a score for each of 2 layers, 2 counters
    assert (up, down) == (size, 2 * size - side)


def test_partial_participation(tmp_path):
    """Two of three clients take part in a round, drawn by the seed; their weights sum to one."""
    experiment = small_experiment(tmp_path, train={"clients_per_round": 2})
    clients = numbers(run_small(experiment)[0] / "clients.csv")
    taking_part = clients.dropna(subset=["weight"])
    assert (taking_part.groupby("round")["weight"].sum().round(12) == 1).all()
    assert (taking_part.groupby("round").size() == 2).all()
    assert taking_part["client"].nunique() == 3


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_several_clients_per_domain(partition, tmp_path):
    """They are called photo/0, photo/1, ..., belong to one domain, and have different images."""
    data = {"clients_per_domain": 2, "partition": partition, "alpha": 5.0, "fraction": 0.3}
    folder, _ = run_small(small_experiment(tmp_path, data=data, train={"rounds": 1}))
    clients = read_runs(folder).clients
    rows = clients[clients["round"] == 1]
    assert list(rows["client"]) == [f"rot{angle}/{index}" for angle in (0, 15, 30) for index in (0, 1)]
    assert list(rows["domain"]) == [name.split("/")[0] for name in rows["client"]]
    held = rows["examples"] + rows["validation_examples"]
    assert (held.groupby(rows["domain"]).sum() == 300).all()


@pytest.mark.skipif(not (SHARED_DATA / "PACS").is_dir(), reason="the PACS images are not on this machine")
def test_pacs_with_resnet(tmp_path):
    """Two rounds of ResNet-18 on every 40th image of PACS at 64 pixels, with augmentation."""
    for file in sorted((SHARED_DATA / "PACS").rglob("*.[jp]*g"))[::40]:
        link = tmp_path / "data" / file.relative_to(SHARED_DATA)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    table = {
        "dataset": "folder",
        "root": str(tmp_path / "data" / "PACS"),
        "image_size": 64,
        "augment": "domainbed",
        "normalize": "imagenet",
        "domains": [],
        "cache": str(tmp_path / "cache"),
    }
    experiment = small_experiment(
        tmp_path / "out",
        "gperxan",
        data=table,
        model={"backbone": "resnet18"},
        train={"rounds": 2, "batch_size": 32, "lr": 0.01},
        run={"target": "sketch"},
    )
    folder, _ = run_small(experiment)
    rounds = numbers(folder / "rounds.csv")
    assert list(rounds["round"]) == [0, 1, 2]
    assert np.isfinite(rounds["train_loss"].iloc[1:]).all()


@pytest.mark.skipif(not (SHARED_DATA / "MNIST").is_dir(), reason="the MNIST files are not on this machine")
def test_rotated_mnist_config(tmp_path):
    """The shipped experiment runs on torchvision's files."""
    from fedsim.run.plan import complete
    from fedsim.settings.experiment import read_experiment

    experiment = complete(
        read_experiment(
            "rotated-mnist",
            [
                f"data.root={SHARED_DATA}",
                "data.fraction=0.1",
                "train.rounds=1",
                "train.epochs=1",
                f"run.output={tmp_path}",
            ],
        )
    )
    assert numbers(run_small(experiment)[0] / "rounds.csv")["round"].tolist() == [0, 1]
