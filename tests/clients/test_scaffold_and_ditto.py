"""What clients keep: SCAFFOLD's variates, and the personal models of Ditto, PerAda and FedBN."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from small_round import colour_images, small_data, small_round
from support import interrupt, numbers, run_small, small_experiment, tiny_experiment
from torch import nn

from clients.companions.ditto import Ditto
from clients.terms.drift_correction import OWN, DriftCorrection
from fedsim.common.errors import UserError
from fedsim.runs.plan import resolve
from fedsim.runs.traffic import traffic
from fedsim.runs.workspace import close_workspaces, workspace
from fedsim.settings import TrainSettings
from strategies.banks.control_variates import ControlVariates
from strategies.parts import SERVER, ServerRound


def scalar_round(
    c=0.0, own=0.0, variant="option_ii", momentum=0.0, steps=5, lr=0.1, strength=1.0, train=None, **changes
):
    """(y, c_k+, delta c_k) after a round with w = 1 and the constant gradient 2."""
    net = nn.Module()
    net.w = nn.Parameter(torch.tensor([1.0]))
    settings = TrainSettings(**{"momentum": momentum, "epochs": 1, **(train or {})})
    record = {"control": {"w": np.array([c], np.float32)} if c else {}}
    round = small_round(small_data(colour_images(3)), record, net, train=settings, steps=steps, **changes)
    if own:
        round.store.put(OWN, {"w": torch.tensor([own])})
    round.optimizer = torch.optim.SGD(net.parameters(), lr, momentum=momentum)
    part = DriftCorrection(variant, strength)
    assert part.begin(round) is None
    for _ in range(steps):
        round.apply_gradients(2 * net.w.sum())
    part.end(round)
    return net.w.item(), round.store.get(OWN)["w"].item(), round.outbox["control"]["w"].item()


@pytest.mark.parametrize(("settings", "found"), [
    ({}, (0.0, 2.0, 2.0)), ({"c": 0.5, "own": 2.0}, (0.75, 2.0, 0.0)),
    ({"c": 0.5, "own": 2.0, "strength": 0.5}, (0.375, 2.75, 0.75)),  # the gradient is 2 - .75; 2 - .5 + .625 / .5
    ({"c": 0.5, "own": 2.0, "lr": 0.0}, (1.0, 2.0, 0.0)),  # the last round of a cosine divides nothing by 0
    ({"variant": "epochs_only"}, (0.0, 10.0, 10.0)), ({"variant": "without_rate"}, (0.0, 0.2, 0.2)),
    # 6 images of the 3 of the client: two epochs of iterations
    ({"variant": "epochs_only", "train": {"iterations": 5}, "images": 6}, (0.0, 5.0, 5.0)),
])  # fmt: skip
def test_numbers_by_hand(settings, found):
    assert scalar_round(**settings) == pytest.approx(found, abs=1e-5)


def test_server_counts_all_clients():
    """c + (|S|/N) times the mean change, when two of four clients deliver; the first c is sent as an empty record."""
    bank = ControlVariates()
    previous = {"w": np.zeros(2, np.float32), "buffer": np.zeros(1, np.float32)}
    server = ServerRound(2, 4, list("abcd"), previous, parameters=frozenset({"w"}))
    assert bank.hand_out({}, "a", server) == {}
    old = {SERVER: {"w": np.array([1.0, 0.0], np.float32)}}
    changes = {"a": {"w": np.array([2.0, 4.0], np.float32)}, "c": {"w": np.array([4.0, -8.0], np.float32)}}
    new = bank.merge(old, changes, server)
    np.testing.assert_allclose(new[SERVER]["w"], [2.5, -1.0])
    assert new[SERVER]["w"].dtype == np.float32
    assert bank.hand_out(new, "b", server) is new[SERVER]
    assert bank.accept("a", changes["a"], server) == ""
    assert "'buffer'" in bank.accept("a", {**changes["a"], "buffer": previous["buffer"]}, server)
    assert "expected float32[2]" in bank.accept("a", {"w": np.zeros(3, np.float32)}, server)


KEEP = {"keep_personal": True}


def test_the_pull_is_to_the_received_model():
    """With lr * lam = 1, v = w - lr * gradient after one step, wherever it was."""
    data, net = small_data(colour_images(4)), nn.Sequential(nn.Flatten(), nn.Linear(768, 3))
    round = small_round(data, net=net, train=TrainSettings(momentum=0.0), lr=1e-6)
    round.store.put("ditto", {name: value + 1 for name, value in net.state_dict().items()})
    Ditto(lam=1e6).begin(round)(data.batch(np.arange(4)))
    for own, received in zip(round.scratch["ditto"].parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(own, received, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of Ditto whose network draws (MixStyle), and its experiment."""
    method = {"name": "ditto", "add": ["mix_style"], "mix_style": {"stages": [1]}}
    experiment = tiny_experiment(tmp_path_factory.mktemp("ditto"), method, 3, run=KEEP)
    return run_small(experiment)[0], experiment


def test_personal_models_are_validated_and_kept(run):
    """They have their own columns, and the models in their files have exactly the recorded accuracy."""
    folder, experiment = run
    last = numbers(folder / "clients.csv").query("round == 3").set_index("client")
    assert not last["personal_loss"].equals(last["validation_loss"])
    files = sorted(file.name for file in folder.glob("personal-*"))
    assert files == [f"personal-{name}.safetensors" for name in ("rot0", "rot15", "rot30")]
    close_workspaces()
    space = workspace(experiment.toml())
    for name in ("rot0", "rot30"):
        model = load_file(folder / f"personal-{name}.safetensors")
        space.net.load_state_dict({key: torch.tensor(value) for key, value in model.items()})
        accuracy, loss = space.client(name, "").validate()
        assert accuracy == pytest.approx(last.loc[name, "personal_accuracy"])
        assert loss == pytest.approx(last.loc[name, "personal_loss"], rel=1e-5)


def test_personal_models_survive_a_kill_and_keep_their_batch_norm(tmp_path, run):
    """A personal model of FedBN is the last global model with the client's own layers.

    A method without anything personal is refused in one line."""
    folder, experiment = run
    again = experiment.replace(run={"output": str(tmp_path)})
    interrupt(again, 2)
    close_workspaces()
    resumed, _ = run_small(again)
    assert numbers(resumed / "clients.csv").equals(numbers(folder / "clients.csv"))
    name = "personal-rot15.safetensors"
    assert (resumed / name).read_bytes() == (folder / name).read_bytes()
    folder, _ = run_small(tiny_experiment(tmp_path, "fedbn", 1, run=KEEP))
    last, own = load_file(folder / "last.safetensors"), load_file(folder / "personal-rot0.safetensors")
    different = {name for name in last if not (last[name] == own[name]).all()}
    assert different
    assert all("norm" in name for name in different)
    with pytest.raises(UserError, match=r"run\.keep_personal"):
        run_small(tiny_experiment(tmp_path / "b", run=KEEP))


def test_a_refused_reply_leaves_no_trace_in_the_personal_model(tmp_path):
    """It keeps the client's own layers of the last round that the server took."""

    def broken(message, reply):
        config = message.content.config_records["config"]
        if (config["phase"], config.get("round"), config["client"]) == ("train", 2, "rot0"):
            reply.content.metric_records["metrics"]["num-examples"] += 1
        return reply

    changes = {"train": {"evaluate_clients": "1"}, "run": {**KEEP, "on_client_failure": "continue"}}
    one, two = (
        run_small(tiny_experiment(tmp_path / str(rounds), "fedbn", rounds, **changes), tamper=broken)[0]
        for rounds in (1, 2)
    )
    assert numbers(two / "rounds.csv")["failed"].tolist() == [0, 0, 1]
    for client, same in (("rot0", True), ("rot15", False)):
        a, b = (load_file(folder / f"personal-{client}.safetensors") for folder in (one, two))
        own = [name for name in a if "norm" in name and "running" in name]
        assert all((a[name] == b[name]).all() for name in own) == same


def test_bytes_of_a_round_on_resnet18():
    """Adapters, norms and head: 1,411,719 parameters, 15,488 statistics, and a counter for each of 33 norms."""
    data = {"classes": [], "dataset": "pacs", "domains": [], "image_size": 64}
    model, target = {"backbone": "resnet18"}, {"target": "sketch"}
    (train, *_) = traffic(resolve(small_experiment("unused", "perada", model=model, data=data, run=target)))
    assert train.down == train.up == 4 * (1_411_719 + 15_488) + 8 * 33
