"""fedsim.client_app in an app of somebody else's: his network and Datasets, with the method's own client."""

import importlib

import numpy as np
import pandas as pd
import pytest
import torch
from apps import grid_of, shift_app, use_example
from flwr.app import ArrayRecord
from torch import nn
from torch.utils.data import TensorDataset

import fedsim
from fedsim import UserError
from fedsim.methods.any_client import requirements

use_example("our-client")
TASK = importlib.import_module("our_client.task")
DOMAINS, Net, load_domain = TASK.DOMAINS, TASK.Net, TASK.load_domain
SOURCES = DOMAINS[:3]


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))


def load(context):
    number = context.node_config["partition-id"]
    return DOMAINS[number], load_domain(number), load_domain(number, test=True)


def play(method, rounds=2, data=load, model=Net, target=("scanner-d", 3), nodes=3, server=None, output="", **settings):
    app = fedsim.client_app(method, model=model, data=data, **{"batch_size": 32, "lr": 0.05, **settings})
    strategy = fedsim.strategy(method, model, client="fedsim", output=output, **(server or {}))
    unseen = (target[0], load_domain(target[1])) if isinstance(target, tuple) and target[1] in range(4) else target
    return strategy.start(grid_of(app, nodes), num_rounds=rounds, target=unseen)


def test_the_example_learns_with_its_own_client():
    from our_client.client_app import METHOD, app

    strategy = fedsim.strategy(METHOD, Net, client="fedsim")
    result = strategy.start(grid_of(app), num_rounds=4, target=("scanner-d", load_domain(3)))
    assert result.evaluate_metrics_clientapp[4]["validation_accuracy"] > 0.5
    assert list(result.evaluate_metrics_serverapp) == [0, 1, 2, 3, 4]


def test_fedavg_is_what_a_loop_by_hand_computes():
    """One step on all data of each of two clients, by plain SGD: the mean by examples of both, to the last bit."""
    from fedsim.models.own_module import copies_of

    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(256, 10))
    start, sums, total = copies_of(net)().state_dict(), {}, 0
    for number in (0, 1):
        images, classes = load_domain(number).tensors
        own = copies_of(net)()
        nn.functional.cross_entropy(own(images), classes).backward()
        for name, parameter in own.named_parameters():
            moved = start[name] - 0.05 * parameter.grad
            sums[name] = sums.get(name, 0) + len(classes) * moved.double()
        total += len(classes)
    result = play("fedavg", rounds=1, model=net, target=None, nodes=2, batch_size=1000)
    after = result.arrays.to_torch_state_dict()
    assert list(after) == ["1.weight", "1.bias"]
    for name, tensor in after.items():
        assert torch.allclose(tensor.double(), sums[name] / total, atol=1e-7)
    assert result.evaluate_metrics_serverapp == {}


@pytest.mark.parametrize(
    "method", ["feddg-ga", "scaffold", "fedbn", "csac", "fedprox+fedadam", "fpl", "ccst", "stablefdg"]
)
def test_methods_of_all_kinds_run(method):
    result = play(method, rounds=1)
    assert 0 <= result.evaluate_metrics_serverapp[1]["accuracy"] <= 1
    assert np.isfinite(result.train_metrics_clientapp[1]["train_loss"])


def test_the_records_are_those_of_a_run(tmp_path):
    output = str(tmp_path / "out")
    torch.manual_seed(1)
    result = play("fedbn", rounds=2, output=output, server={"seed": 3})
    (folder,) = [file.parent for file in (tmp_path / "out").rglob("summary.csv")]
    assert folder.parts[-3:] == ("fedbn", "scanner-d", "seed3")
    clients = pd.read_csv(folder / "clients.csv")
    assert sorted(set(clients["client"])) == list(SOURCES)
    experiment = fedsim.read_experiment(str(folder / "experiment.toml"))
    assert experiment.train.lr == 0.05
    assert experiment.model.backbone == "our_client.task:Net"
    again = play("fedbn", rounds=2, output=output, server={"seed": 3})  # it is finished
    for name, array in again.arrays.items():
        assert np.array_equal(array.numpy(), result.arrays[name].numpy())
    model = fedsim.load(folder, which="last", trust=True)
    images, classes = load_domain(3).tensors
    accuracy = (model(images).argmax(1) == classes).float().mean().item()
    assert accuracy == pytest.approx(pd.read_csv(folder / "rounds.csv")["target_accuracy"].iloc[-1])


def test_another_unseen_dataset_of_the_same_name_is_another_run(tmp_path):
    play("fedavg", rounds=1, output=str(tmp_path), target=("scanner-d", 3))
    with pytest.raises(UserError, match=r"holds a run on other data \(scanner-d: .*; choose another output="):
        play("fedavg", rounds=1, output=str(tmp_path), target=("scanner-d", mirrored()))
    assert play("fedavg", rounds=1, output=str(tmp_path), target=("scanner-d", 3)).evaluate_metrics_serverapp[1]


def mirrored():
    """The unseen domain with other pixels."""
    images, classes = load_domain(3).tensors
    return TensorDataset(images.flip(3), classes)


def test_clients_with_images_and_with_other_tensors_of_their_shape_train_together():
    """Client 1 has normalized images, so that the others' are tensors of numbers, too."""

    def mixed(context):
        return (load_normalized if context.node_config["partition-id"] == 1 else load)(context)

    result = play("fedavg", rounds=1, data=mixed, target=None)
    assert np.isfinite(result.evaluate_metrics_clientapp[1]["validation_loss"])


def test_a_seed_of_the_clients_alone_is_refused():
    """The network was made with the server's: runs of several seeds would begin with one and the same."""
    with pytest.raises(UserError, match=r"seed is 3 in fedsim\.client_app, and 0 in fedsim\.strategy"):
        play("fedavg", rounds=1, seed=3)
    assert play("fedavg", rounds=1, seed=3, server={"seed": 3}).train_metrics_clientapp


def test_a_run_that_was_stopped_goes_on_with_what_its_clients_kept(tmp_path):
    """SCAFFOLD's control variates are in the state folder of each client: the records equal an unbroken run's."""

    def play_until(folder, until):
        app = fedsim.client_app("scaffold", Net, load, batch_size=32, state=str(tmp_path / "state"))
        strategy = fedsim.strategy("scaffold", Net, client="fedsim", output=str(tmp_path / folder))

        def evaluate(number, arrays):
            if number == until:
                raise RuntimeError("stopped")

        strategy.start(grid_of(app), num_rounds=4, evaluate_fn=evaluate)

    play_until("whole", 99)
    with pytest.raises(RuntimeError, match="stopped"):
        play_until("stopped", 2)
    play_until("stopped", 99)
    tables = [pd.read_csv(next((tmp_path / name).rglob("clients.csv"))) for name in ("whole", "stopped")]
    timeless = [table.drop(columns=[name for name in table if name.endswith("_seconds")]) for table in tables]
    pd.testing.assert_frame_equal(*timeless)


def test_a_site_may_hold_the_unseen_domain():
    assert 0 <= play("fada", rounds=1, target="scanner-c").evaluate_metrics_serverapp[1]["accuracy"] <= 1
    result = play("fedavg", rounds=1, target="scanner-c")
    assert result.train_metrics_clientapp[1]["weight"] == pytest.approx(1 / 2)
    assert 0 <= result.evaluate_metrics_serverapp[1]["accuracy"] <= 1


def test_the_weights_of_a_given_module_are_the_start():
    torch.manual_seed(5)
    net = Net()
    seen = []
    app = fedsim.client_app("fedavg", model=Net, data=load)
    strategy = fedsim.strategy("fedavg", net)  # the clients say themselves that they are fedsim's
    strategy.start(grid_of(app), num_rounds=1, evaluate_fn=lambda number, arrays: seen.append(arrays))
    first = seen[0].to_torch_state_dict()
    assert first.keys() == net.state_dict().keys()
    assert all(torch.equal(first[name], value) for name, value in net.state_dict().items())
    other = Net()
    strategy = fedsim.strategy("fedavg", Net)
    strategy.start(
        grid_of(app), ArrayRecord(other.state_dict()), 1, evaluate_fn=lambda number, arrays: seen.append(arrays)
    )
    assert torch.equal(seen[2].to_torch_state_dict()["conv1.weight"], other.conv1.weight)


def rows(number, count=40):
    """Rows of three numbers in units of very different sizes; their class is the sign of the second one."""
    rng = torch.Generator().manual_seed(number)
    values = torch.randn(count, 3, generator=rng) * torch.tensor([1.0, 10.0, 1000.0]) + torch.tensor([0.0, 0.0, 5000.0])
    return TensorDataset(values, (values[:, 1] > 0).long())


def load_rows(context):
    number = context.node_config["partition-id"]
    return f"site-{number}", rows(number), rows(number + 10, 10)


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 2)

    def forward(self, x):
        return self.out(x)


@pytest.mark.parametrize("method", ["feddg-ga", "scaffold", "fedprox"])
def test_rows_of_a_table_are_standardized_by_the_sums_of_all_clients(method):
    """Without that, the values around 5000 would drown the column that decides."""
    result = play(method, rounds=4, data=load_rows, model=Linear, lr=1.0, batch_size=8, target=("unseen", rows(20, 60)))
    assert result.evaluate_metrics_serverapp[4]["accuracy"] > 0.9


def load_normalized(context):
    name, training, validation = load(context)
    return name, *(TensorDataset((each.tensors[0] - 0.5) / 0.5, each.tensors[1]) for each in (training, validation))


def test_normalized_images_are_tensors_of_which_no_pixels_are_changed():
    unseen = TensorDataset((load_domain(3).tensors[0] - 0.5) / 0.5, load_domain(3).tensors[1])
    result = play("fedbn", rounds=2, data=load_normalized, target=("unseen", unseen))
    assert np.isfinite(result.evaluate_metrics_serverapp[2]["loss"])
    with pytest.raises(UserError) as error:
        play("ccst", data=load_normalized, target=None)
    assert "images" in str(error.value)
    assert "\n" not in str(error.value)


def data_of(training, validation, name=None):
    def load_these(context):
        number = context.node_config["partition-id"]
        return DOMAINS[number] if name is None else name, training, validation

    return load_these


GOOD = TensorDataset(torch.rand(6, 1, 16, 16), torch.arange(6))
NO_LINEAR = nn.Sequential(nn.Conv2d(1, 10, 16), nn.Flatten())
REFUSED = {
    "an unknown method": (lambda: fedsim.client_app("fedbnn", Net, load), "did you mean 'fedbn'"),
    "an unknown setting": (lambda: fedsim.client_app("fedbn", Net, load, lrate=1), "no setting is called 'lrate'"),
    "a target on a client": (lambda: fedsim.client_app("fedbn", Net, load, target="a"), "take no target"),
    "the usual number of rounds": (lambda: fedsim.client_app("fedbn", Net, load, rounds=10), "take no rounds"),
    "a server's setting as it is without": (
        lambda: fedsim.client_app("fedbn", Net, load, on_client_failure="stop"), "give on_client_failure to",
    ),
    "a server's setting on a client": (
        lambda: play("fedavg", callbacks=["json:JSONDecoder"]), "give callbacks to fedsim.strategy",
    ),
    "a server's setting in a section": (
        lambda: play("fedavg", run={"on_client_failure": "continue"}), "give on_client_failure to fedsim.strategy",
    ),
    "a score of own clients": (
        lambda: play("fedavg", server={"score": "top1"}), "remove score and evaluates from fedsim.strategy",
    ),
    "no validation, which is for own clients": (
        lambda: play("fedavg", server={"evaluates": False}), "remove score and evaluates from fedsim.strategy",
    ),
    "a setting twice": (lambda: play("fedavg", train={"lr": 0.1}), "lr is given twice, as 0.05 and 0.1"),
    "a setting of both apps in two forms": (
        lambda: play("fedavg", server={"train": {"lr": 0.1}}), "lr is given twice, as 0.1 and 0.05",
    ),
    "a model without Linear": (lambda: play("fedavg", model=NO_LINEAR), "has no Linear"),
    "texts of classes": (lambda: fedsim.client_app("promptfl", Net, load), "learned_prompts learns texts of classes"),
    "texts on the server": (lambda: fedsim.strategy("plan", Net, client="fedsim"), "prompt_sets learns texts of"),
    "pooled data": (lambda: fedsim.strategy("deepall", Net, client="fedsim"), "pooled on one client"),
    "visits to no site": (lambda: play("fada"), "fada visits the unseen domain"),
    "no model": (lambda: fedsim.strategy("fedbn", client="fedsim"), "needs the network"),
    "another word": (lambda: fedsim.strategy("fedbn", Net, client="ours"), "write 'any', or 'fedsim'"),
    "clients that are not fedsim's": (
        lambda: fedsim.strategy("fedbn", Net, client="fedsim").start(grid_of(shift_app())), "is not fedsim.client_app",
    ),
    "another method on the clients": (
        lambda: fedsim.strategy("fedavg", Net).start(grid_of(fedsim.client_app("fedadam", Net, load))),
        "runs 'fedadam', and the server 'fedavg'",
    ),
    "a setting that differs": (
        lambda: play("fedprox", server={"proximal": {"mu": 0.5}}, proximal={"mu": 0.1}), "proximal is {'mu': 0.1} in",
    ),
    "a function that fails": (lambda: play("fedavg", data=lambda context: 1 / 0), "data(context) failed: ZeroDivision"),
    "a function that gives less": (lambda: play("fedavg", data=lambda context: "a"), "must return (name of the domain"),
    "shapes of training and validation": (
        lambda: play("fedavg", data=data_of(GOOD, TensorDataset(torch.rand(2, 1, 8, 8), torch.ones(2).long()))),
        "training has the shape [1, 16, 16], validation [1, 8, 8]",
    ),
    "no Dataset": (lambda: play("fedavg", data=data_of(None, None)), "there is no Dataset"),
    "one name for all": (lambda: play("fedavg", data=data_of(GOOD, GOOD, "a")), "two nodes say that they are 'a'"),
    "a name with a slash": (lambda: play("fedavg", data=data_of(GOOD, GOOD, "a/1")), "a name of its own, without /"),
    "a target among the sources": (lambda: play("fedavg", target=("scanner-a", 0)), "among the sources"),
    "a target of another shape": (
        lambda: fedsim.strategy("fedavg", Net).start(
            grid_of(fedsim.client_app("fedavg", Net, load)), target=TensorDataset(torch.rand(2, 3), torch.ones(2).int())
        ),
        "its examples have the shape [3], the others' [1, 16, 16]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line(case):
    call, text = REFUSED[case]
    with pytest.raises(UserError) as error:
        call()
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_no_row_is_without_a_way():
    assert {client for _, client, _ in requirements()} == {"any client", "fedsim's client", "none"}
