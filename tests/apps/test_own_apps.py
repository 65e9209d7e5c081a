"""fedsim.strategy with ClientApps that know nothing of fedsim."""

import re
import runpy

import pandas as pd
import pytest
import torch
from apps import EXAMPLES, grid_of, shift_app, use_example, weight_of, zeros
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from torch import nn
from torch.utils.data import TensorDataset

import fedsim
from fedsim import UserError
from fedsim.analysis.compare import compare
from fedsim.analysis.report import settings_apart
from fedsim.analysis.report_data import command_line
from fedsim.methods.any_client import requirements
from fedsim.records.differences import comparable_settings
from fedsim.records.reading import read_runs
from fedsim.runtime.local_grid import InlineGrid
from strategies.base import FedDG
from strategies.fuse.krum import Krum
from strategies.wire.own_apps import MEANINGS

use_example("any-client")

ANY = [name for name, client, _ in requirements() if client == "any client"]
CONFIG = ConfigRecord({"lr": 0.1})


def test_the_mean_is_that_of_the_examples():
    """Clients 0, 1, 2 add 1, 2, 4 and have 10, 20, 30 examples: a round adds (10 + 40 + 120) / 60 = 17/6."""
    result = fedsim.strategy("fedavg", zeros()).start(grid_of(shift_app()), num_rounds=2)
    assert weight_of(result.arrays) == pytest.approx(2 * 17 / 6)
    assert result.train_metrics_clientapp[1]["weight"] == pytest.approx(1 / 3)
    assert result.evaluate_metrics_clientapp[2]["validation_accuracy"] == pytest.approx(0.1)
    assert list(result.train_metrics_clientapp) == [1, 2]


def test_flowers_own_arguments_keep_their_meaning():
    """The initial arrays, in the second place as in Flower; what evaluate_fn returns; the config of the messages."""
    seen = []

    def evaluate(number, arrays):
        seen.append((number, weight_of(arrays)))
        return MetricRecord({"mine": float(number)})

    initial = ArrayRecord({name: value + 1 for name, value in zeros().state_dict().items()})
    result = fedsim.strategy("fedavg").start(grid_of(shift_app()), initial, 1, evaluate_fn=evaluate)
    assert seen == [(0, 1.0), (1, pytest.approx(1 + 17 / 6))]
    assert result.evaluate_metrics_serverapp[1]["mine"] == 1.0


def test_the_gap_of_feddg_ga_comes_from_two_losses():
    """Losses of the received model 3, 3, 3 and of the trained one 1, 2, 2.5: gaps in round 2 are 2, 1 and 0.5.

    Their mean is 7/6 and the deviations 5/6, -1/6, -4/6; with d = 0.2, T = 2 and t = 2 the step is 0.1, so that the
    weights are 1/3 + 0.1 (1, -0.2, -0.8), whose sum is 1.
    """
    trained = [1.0, 2.0, 2.5]
    app = shift_app(lambda number, round: {"received_loss": 3.0, "trained_loss": trained[number]})
    result = fedsim.strategy("feddg-ga", zeros()).start(grid_of(app), num_rounds=2)
    first = (1 + 2 + 4) / 3
    assert weight_of(result.arrays) == pytest.approx(first + 1 / 3 * 7 + 0.1 * (1 - 0.4 - 3.2), rel=1e-5)
    assert result.train_metrics_clientapp[1]["gap_valid"] == 0
    assert result.train_metrics_clientapp[2]["gap"] == pytest.approx(3.5 / 3)


def test_a_loss_that_is_no_number_costs_one_round(tmp_path):
    """Client 1 has none in round 2; its gap of round 3 is that to its loss of round 1, 3/3 - 2."""

    def metrics(number, round):
        trained = float("nan") if (number, round) == (1, 2) else 1.0 + number
        return {"received_loss": 3.0 / round, "trained_loss": trained}

    strategy = fedsim.strategy("feddg-ga", zeros(), output=str(tmp_path), on_client_failure="continue")
    strategy.start(grid_of(shift_app(metrics)), num_rounds=3)
    clients = pd.read_csv(next(tmp_path.rglob("clients.csv"))).set_index(["client", "round"]).loc["site-1"]
    assert list(clients["status"] == "ok") == [True, False, True]
    assert clients.loc[3, "gap"] == pytest.approx(-1)


def test_a_gap_of_the_clients_own_is_taken():
    app = shift_app(lambda number, round: {"gap": [2.0, 1.0, 0.5][number]})
    result = fedsim.strategy("feddg-ga", zeros()).start(grid_of(app), num_rounds=2)
    assert result.train_metrics_clientapp[1]["gap"] == pytest.approx(3.5 / 3)


def test_a_recipe_object_and_settings_of_parts():
    result = fedsim.strategy(fedsim.Recipe(fuse=Krum(select=3)), zeros()).start(grid_of(shift_app()), num_rounds=1)
    assert weight_of(result.arrays) == pytest.approx(17 / 6)
    result = fedsim.strategy("krum", zeros(), krum={"select": 3}).start(grid_of(shift_app()), num_rounds=1)
    assert weight_of(result.arrays) == pytest.approx(17 / 6)
    result = fedsim.strategy("fedavg", zeros(), fuse="coordinate_median").start(grid_of(shift_app()), num_rounds=1)
    assert weight_of(result.arrays) == pytest.approx(2)


@pytest.mark.parametrize("method", ANY)
def test_every_row_that_needs_no_more_runs_with_the_example(method):
    from any_client.client_app import app
    from any_client.task import Net, load_domain

    torch.manual_seed(0)
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    target = "scanner-d", load_domain(3, test=True)
    result = fedsim.strategy(method, net).start(grid_of(app), num_rounds=2, train_config=CONFIG, target=target)
    assert 0 < result.evaluate_metrics_serverapp[2]["loss"] < 10
    after = result.arrays.to_torch_state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_every_other_row_is_refused_when_the_strategy_is_made():
    for method, client, reason in requirements():
        if client != "any client":
            with pytest.raises(UserError) as error:
                fedsim.strategy(method, zeros())
            assert reason in str(error.value)
            assert ("use fedsim.client_app" in str(error.value)) == (client == "fedsim's client")
            assert "\n" not in str(error.value)


def test_the_page_has_the_table_and_the_names_of_the_code():
    page = (EXAMPLES.parent / "own-app.md").read_text()
    program = runpy.run_path(str(EXAMPLES.parent / "own_app_table.py"))
    assert program["with_table"](page) == page
    assert all(f"| `{name}` | {meaning} |" in page for name, meaning in MEANINGS.items())
    rows = [line.strip("|").split(" | ") for line in page.splitlines() if line.count(" | ") == 2]
    for name, client, needs in requirements():
        ((clients, reason, _),) = [row for row in rows if name in row[2].strip().split(", ")]
        assert clients.strip() == client
        assert reason == ("" if client == "fedsim's client" else needs or "nothing more")


def test_the_weights_on_the_page_are_those_of_the_example(tmp_path):
    """The first row has 1/3 + d (1 - 1/6) = 0.5 by hand; the page has four digits of each number."""
    from any_client.client_app import app
    from any_client.task import Net

    torch.manual_seed(0)
    strategy = fedsim.strategy("feddg-ga", Net(), output=str(tmp_path))
    strategy.start(grid_of(app), num_rounds=6, train_config=ConfigRecord({"lr": 0.5}))
    clients = pd.read_csv(next(tmp_path.rglob("clients.csv"))).set_index(["round", "client"])
    page = (EXAMPLES.parent / "own-app.md").read_text()
    for client in ("scanner-a", "scanner-b", "scanner-c"):
        row = clients.loc[(2, client)]
        numbers = [row["received_loss"], clients.loc[(1, client)]["trained_loss"], row["gap"], row["weight"]]
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {client} |")]
        assert [float(cell) for cell in line.strip("|").split("|")[1:]] == pytest.approx(numbers, abs=1e-3)


def test_names_come_from_the_domain_then_the_partition_then_the_node(tmp_path):
    def names(app):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        fedsim.strategy("fedavg", zeros(), output=str(folder)).start(grid_of(app), num_rounds=1)
        return sorted(pd.read_csv(next(folder.rglob("clients.csv")))["client"])

    assert names(shift_app()) == ["site-0", "site-1", "site-2"]
    assert names(shift_app(names=lambda number: "")) == ["node-2", "node-3", "node-4"]
    assert names(shift_app(evaluates=False)) == ["node-2", "node-3", "node-4"]


def test_an_app_that_cannot_evaluate_trains():
    result = fedsim.strategy("fedavg", zeros()).start(grid_of(shift_app(names=lambda n: "", evaluates=False)))
    assert weight_of(result.arrays) == pytest.approx(3 * 17 / 6)
    assert result.evaluate_metrics_clientapp == {}


def test_one_client_that_cannot_evaluate_does_not_end_the_validation_of_all():
    """The run stops before its first round, in one line that says who it is; without validation it is played."""
    grid = grid_of(shift_app())
    usual, without = grid._app, shift_app(evaluates=False)
    grid._app = lambda message, context: (without if context.node_id == 3 else usual)(message, context)
    with pytest.raises(UserError, match=r"^client 'node-3' has no function that evaluates, and others have one; .*$"):
        fedsim.strategy("fedavg", zeros()).start(grid)
    result = fedsim.strategy("fedavg", zeros(), evaluates=False).start(grid, num_rounds=1)
    assert weight_of(result.arrays) == pytest.approx(17 / 6)
    assert result.evaluate_metrics_clientapp == {}


def test_a_client_may_hold_the_unseen_domain():
    """Client 2, which adds 4, does not train: (10 + 40) / 30 = 5/3. It alone says how good the model is there: 0.2."""
    result = fedsim.strategy("fedavg", zeros()).start(grid_of(shift_app()), num_rounds=1, target="site-2")
    assert weight_of(result.arrays) == pytest.approx(5 / 3)
    assert result.evaluate_metrics_serverapp[1]["accuracy"] == pytest.approx(0.2)


def test_a_dataset_as_the_unseen_domain():
    """Every output is equal, so that the first class is predicted: one of four examples is of it."""
    data = TensorDataset(torch.ones(4, 2), torch.tensor([0, 1, 2, 2]))
    result = fedsim.strategy("fedavg", zeros()).start(grid_of(shift_app()), num_rounds=1, target=data)
    assert result.evaluate_metrics_serverapp[0]["accuracy"] == pytest.approx(0.25)


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path):
    """The state of the server's optimizer and of the gaps is in the checkpoint: the records equal an unbroken run's."""

    def app(until=99):
        def metrics(number, round):
            assert round <= until
            return {"received_loss": 3.0 / round, "trained_loss": 1.0 + number}

        return shift_app(metrics)

    def play(folder, until=99):
        strategy = fedsim.strategy("feddg-ga+fedadam", zeros(), output=str(folder))
        return strategy.start(grid_of(app(until)), num_rounds=4)

    whole = play(tmp_path / "whole")
    with pytest.raises(fedsim.ClientFailedError):
        play(tmp_path / "stopped", until=2)
    result = play(tmp_path / "stopped")
    assert weight_of(result.arrays) == weight_of(whole.arrays)
    tables = [pd.read_csv(next((tmp_path / name).rglob("clients.csv"))) for name in ("whole", "stopped")]
    assert tables[0].equals(tables[1])
    assert list(result.train_metrics_clientapp) == [1, 2, 3, 4]
    assert dict(result.train_metrics_clientapp[1]) == dict(whole.train_metrics_clientapp[1])
    again = play(tmp_path / "stopped", until=0)  # which is finished, so that no client is asked to train
    assert weight_of(again.arrays) == weight_of(whole.arrays)


def test_the_second_start_of_a_finished_run_returns_its_metrics(tmp_path):
    """Accuracies 0, 0.1, 0.2 have the mean 0.1; the first of four examples of the unseen domain is right."""
    data = TensorDataset(torch.ones(4, 2), torch.tensor([0, 1, 2, 2]))

    def start():
        strategy = fedsim.strategy("fedavg", zeros(), output=str(tmp_path))
        return strategy.start(grid_of(shift_app(lambda n, r: {"train_loss": n + r / 3})), num_rounds=2, target=data)

    first, second = start(), start()
    assert second.evaluate_metrics_clientapp[2]["validation_accuracy"] == pytest.approx(0.1)
    assert second.evaluate_metrics_serverapp[2]["accuracy"] == 0.25
    for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
        before, after = getattr(first, name), getattr(second, name)
        assert {number: dict(record) for number, record in after.items()} == {
            number: dict(record) for number, record in before.items()
        }


def test_metrics_of_an_evaluation_keep_the_names_of_the_client(tmp_path):
    """Accuracies 0, 0.1, 0.2 over 10, 20, 70 examples are 0.16 by FedAvg's mean, and 0.1 by the mean of the clients."""

    def start():
        app = shift_app(evaluation=lambda number: {"num-examples": (10, 20, 70)[number], "Top-5, F1": 1.0 + number})
        return fedsim.strategy("fedavg", zeros(), output=str(tmp_path)).start(grid_of(app), num_rounds=1)

    for result in (start(), start()):  # the second is of the records
        metrics = result.evaluate_metrics_clientapp[1]
        assert metrics["eval_acc"] == pytest.approx(0.16)
        assert metrics["validation_accuracy"] == pytest.approx(0.1)
        assert metrics["Top-5, F1"] == pytest.approx(2.6)
        assert set(metrics) == {"validation_accuracy", "validation_loss", "eval_acc", "eval_loss", "Top-5, F1"}
        assert "eval_acc" not in str(dict(result.train_metrics_clientapp[1]))


def test_metrics_of_a_training_keep_their_values_whatever_they_are_called(tmp_path):
    """A name may begin as a column of the server's: 1, 2 and 3 have the mean 2, and are none of an evaluation."""
    names = ("images_seen", "examples_right", "evaluate_f1", "validation_f1")

    def start():
        app = shift_app(lambda number, round: dict.fromkeys(names, 1.0 + number))
        return fedsim.strategy("fedavg", zeros(), output=str(tmp_path)).start(grid_of(app), num_rounds=1)

    for result in (start(), start()):  # the second is of the records
        training = result.train_metrics_clientapp[1]
        assert training["images_seen"] == training["examples_right"] == pytest.approx(2)
        assert training["reported_evaluate_f1"] == training["reported_validation_f1"] == pytest.approx(2)
        assert not [name for name in result.evaluate_metrics_clientapp[1] if "f1" in name]
    app = shift_app(lambda number, round: {"evaluate_f1": 1.0}, evaluates=False)
    result = fedsim.strategy("fedavg", zeros(), evaluates=False).start(grid_of(app), num_rounds=1)
    assert result.train_metrics_clientapp[1]["reported_evaluate_f1"] == 1


def test_the_log_has_the_weights_of_the_clients_and_the_best_round(tmp_path, caplog):
    """10, 20 and 30 of 60 examples are the weights 1/6, 1/3 and 1/2 of FedAvg; the mean accuracy is 0.1."""
    strategy = fedsim.strategy("fedavg", zeros(), output=str(tmp_path))
    strategy.start(grid_of(shift_app(lambda number, round: {"train_loss": 1.23456})), num_rounds=1)
    lines = [line.strip() for line in caplog.messages]
    assert "weights: site-0 0.1667, site-1 0.3333, site-2 0.5" in lines
    (means,) = [line for line in lines if line.startswith("means over the clients: ")]
    assert "train_loss 1.235" in means
    assert "weight" not in means
    assert "eval_acc" not in means
    folder = tmp_path / "app" / "fedavg" / "no-target" / "seed0"
    assert lines[-1] == f"fedsim: best round 1, mean validation accuracy 0.1; records: {folder}"


def test_another_train_config_is_another_run(tmp_path):
    def start(lr):
        strategy = fedsim.strategy("fedavg", zeros(), output=str(tmp_path))
        return strategy.start(grid_of(shift_app()), num_rounds=1, train_config=ConfigRecord({"lr": lr}))

    start(0.1)
    with pytest.raises(UserError, match=r"another train_config: lr was 0\.1, and is 0\.01; choose another output="):
        start(0.01)
    assert weight_of(start(0.1).arrays) == pytest.approx(17 / 6)


def test_another_unseen_dataset_or_score_is_another_run(tmp_path):
    """The first of four examples is right with the first Dataset, and the first two with the other one."""

    def start(labels=(0, 1, 2, 2), score=""):
        data = TensorDataset(torch.ones(4, 2), torch.tensor(labels))
        strategy = fedsim.strategy("fedavg", zeros(), output=str(tmp_path), score=score)
        app = shift_app(evaluation=lambda number: {"f1": 0.5})
        return strategy.start(grid_of(app), num_rounds=1, target=data)

    start()
    with pytest.raises(UserError, match=r"on other data \(unseen: 4 images as before, .*; choose another output="):
        start((0, 0, 2, 2))
    with pytest.raises(UserError, match="another strategy: score was '', and is 'f1'; choose another output="):
        start(score="f1")
    assert start().evaluate_metrics_serverapp[1]["accuracy"] == 0.25


def test_records_of_own_clients_have_no_settings_of_a_client_and_no_zeros(tmp_path, monkeypatch):
    """The run of fedsim's client has lr 0.05, which nothing compares with the lr of an app: nobody knows that one."""

    unseen = TensorDataset(torch.ones(4, 2), torch.tensor([0, 1, 2, 2]))

    def start(method, lr, output):
        strategy = fedsim.strategy(method, zeros(), output=str(output))
        app = shift_app(names=lambda number: "abc"[number])
        config = ConfigRecord({"lr": lr})
        strategy.start(grid_of(app), num_rounds=1, train_config=config, target=unseen)

    def load(context):
        data = TensorDataset(torch.rand(8, 2), torch.tensor([0, 1, 2, 0] * 2))
        return "abc"[context.node_config["partition-id"]], data, data

    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    start("fedomg", 0.1, tmp_path / "one")
    app = fedsim.client_app("fedprox", model=nn.Sequential(nn.Linear(2, 3)), data=load, lr=0.05)
    net = nn.Sequential(nn.Linear(2, 3))
    strategy = fedsim.strategy("fedprox", net, client="fedsim", output=str(tmp_path / "one"))
    strategy.start(grid_of(app), num_rounds=1, target=unseen)
    runs = read_runs(tmp_path / "one")
    comparison = compare(runs)
    assert any("app's own code" in note and note.startswith("app/fedomg/") for note in comparison.notes)
    methods = comparison.methods.set_index("label")
    assert methods.loc["fedomg", ["images", "steps"]].isna().all()
    assert methods.loc["fedprox", "images"] > 0
    rounds = runs.rounds.set_index(["method", "round"]).loc[("fedomg", 1)]
    assert rounds[["images", "steps", "train_seconds"]].isna().all()
    assert rounds["bytes_down"] > 0
    assert rounds["evaluation_seconds"] > 0  # of the Dataset, on the server
    settings = [comparable_settings(experiment) for experiment in runs.experiments.values()]
    own, ours = sorted(settings, key=lambda table: "train.lr" in table)
    assert ours["train.lr"] == 0.05
    assert own["app.train_config.lr"] == 0.1
    assert not any(key in own for key in ("train.batch_size", "model.backbone", "data.image_size", "run.runtime"))
    assert command_line(runs.experiments["app/fedomg/unseen/seed0"], tmp_path).startswith("# start the Flower app")
    apart, shared = settings_apart(runs)
    assert not any("lr" in key for key in [*apart, *shared] if not key.startswith("app."))


def test_other_configs_of_an_app_are_not_compared(tmp_path):
    def start(method, **config):
        strategy = fedsim.strategy(method, zeros(), output=str(tmp_path))
        unseen = TensorDataset(torch.ones(4, 2), torch.tensor([0, 1, 2, 2]))
        strategy.start(grid_of(shift_app()), num_rounds=1, train_config=ConfigRecord(config), target=unseen)

    start("fedomg", lr=0.1)
    start("fedavg")
    with pytest.raises(
        UserError, match=r"app\.train_config\.lr \(default \| 0\.1\); say .* --by app\.train_config\.lr"
    ):
        compare(read_runs(tmp_path))


def test_clients_without_names_cannot_be_resumed_which_both_starts_say(tmp_path, caplog):
    def start(nodes):
        grid = InlineGrid(shift_app(names=lambda number: ""), 4)
        grid.node_ids = nodes
        return fedsim.strategy("fedavg", zeros(), output=str(tmp_path)).start(grid, num_rounds=1)

    start([2, 3])
    assert "cannot be resumed; reply with ConfigRecord" in caplog.text
    with pytest.raises(UserError, match=r"other clients \(node-3\) than those of today \(node-4\); give every client"):
        start([2, 4])


def test_a_run_is_not_resumed_with_other_clients_of_its_domains(tmp_path):
    def start(nodes):
        grid = InlineGrid(shift_app(names=("north/0", "south", "north/1").__getitem__), 3)
        grid.node_ids = nodes
        strategy = fedsim.strategy("fedavg", zeros(), output=str(tmp_path), keep_state=True)
        return strategy.start(grid, num_rounds=len(nodes))

    start([2, 3])
    with pytest.raises(UserError, match=r"other clients \(none more\) than those of today \(north/1\); choose another"):
        start([2, 3, 4])


REFUSED = {
    "an unknown method": (lambda: fedsim.strategy("feddg-gaa"), "did you mean 'feddg-ga'"),
    "an unknown setting": (lambda: fedsim.strategy("fedavg", seeed=1), "did you mean 'seed'"),
    "a setting of two sections": (lambda: fedsim.strategy("fedavg", weights="uniform"), "model={'weights'"),
    "a setting of the client": (lambda: fedsim.strategy("fedavg", lr=0.1), "lr acts on the client"),
    "its value without a word": (lambda: fedsim.strategy("fedavg", lr=0.01), "lr acts on the client"),
    "the same in its section": (lambda: fedsim.strategy("fedavg", train={"lr": 0.01}), "lr acts on the client"),
    "a setting of start": (lambda: fedsim.strategy("fedavg", rounds=2), "num_rounds"),
    "the usual number of rounds": (lambda: fedsim.strategy("fedavg", rounds=10), "num_rounds"),
    "a field of a part": (lambda: fedsim.strategy("krum", krum={"selct": 2}), "did you mean 'select'"),
    "no model at all": (lambda: fedsim.strategy("fedavg").start(grid_of(shift_app())), "there is no initial model"),
    "a model that is none": (lambda: fedsim.strategy("fedavg", 3), "give an nn.Module"),
    "a function that makes none": (lambda: fedsim.strategy("fedavg", lambda: 3), "model makes int"),
    "a class with arguments": (lambda: fedsim.strategy("fedavg", nn.Linear), "without arguments"),
    "a method that is none": (lambda: fedsim.strategy(3), "not int"),
    "tensors of another model": (
        lambda: fedsim.strategy("fedavg", zeros()).start(grid_of(shift_app()), ArrayRecord({"a": torch.ones(1)})),
        "not the tensors of the model: a, bias, weight",
    ),
    "a target that is no Dataset": (
        lambda: fedsim.strategy("fedavg", zeros()).start(grid_of(shift_app()), target=3), "target is int",
    ),
    "a target among the sources": (
        lambda: fedsim.strategy("fedavg", zeros()).start(
            grid_of(shift_app()), target=("site-1", TensorDataset(torch.ones(1, 2), torch.zeros(1)))
        ),
        "'site-1' is among the sources",
    ),
    "no examples": (lambda: play(shift_app(lambda n, r: {"num-examples": [1]})), "lacks the metric 'num-examples'"),
    "a gap that is missing": (lambda: play(shift_app(), "feddg-ga"), "lacks the metric 'gap' (or received_loss and"),
    "one of two losses": (
        lambda: play(shift_app(lambda n, r: {"received_loss": 3.0}), "feddg-ga"),
        "lacks the metric 'trained_loss', the mean loss of the trained model on the same data; of it and its received",
    ),
    "an argument of FedAvg": (lambda: fedsim.strategy("fedavg", fraction_train=0.5), "clients_per_round=N trains N"),
    "steps that are missing": (lambda: play(shift_app(), "fednova"), "lacks the metric 'steps', the number of"),
    "a loss that is missing": (lambda: play(shift_app(), "afl"), "lacks the metric 'received_loss', the mean loss"),
    "a loss of the training": (lambda: play(shift_app(), "qfedavg"), "lacks the metric 'train_loss'"),
    "two clients of one name": (lambda: play(shift_app(names=lambda number: "one")), "two nodes say that they are"),
    "a name that no domain has": (lambda: play(shift_app(names=lambda number: "average")), "no domain can be called"),
    "two metrics of one column": (
        lambda: play(shift_app(lambda n, r: {"Top 1": 1.0, "top-1": 2.0})),
        "the metrics 'Top 1' and 'top-1' of its reply to train are one column, 'top_1', of clients.csv",
    ),
    "one metric in two records": (lambda: play(twice), "has the metric 'f1' in two records, as 1.0 and 2.0"),
    "an accuracy of another name": (
        lambda: fedsim.strategy("fedavg", zeros(), score="top1").start(grid_of(shift_app())), "no accuracy: top1",
    ),
}  # fmt: skip


def twice(message, context):
    """The reply of the usual client, with the same metric in two records."""
    reply = shift_app()(message, context)
    reply.content["f1"] = MetricRecord({"f1": 1.0})
    reply.content["macro"] = MetricRecord({"f1": 2.0})
    return reply


def play(app, method="fedavg", rounds=1):
    return fedsim.strategy(method, zeros()).start(grid_of(app), num_rounds=rounds)


WITHOUT_EFFECT = {
    "needs fedsim's own clients": ({"select_on": "local"}, {"personalised": True}, {"record": ["classes"]},
                                   {"keep_personal": True}, {"validation_domain": "site-1"}),
    "says where it runs": ({"processes": 2}, {"workers": 3}, {"ray_address": "a"}, {"federation": "a.toml"}),
    "strategy.start(..., target=...) says": ({"evaluate_target": "site"},),
    "looks at the records of a run": ({"callbacks": ["wandb"]}, {"tensorboard": True}, {"keep_state": True},
                                        {"stop_after": 2}),
}  # fmt: skip


def test_a_setting_without_effect_is_refused_when_the_strategy_is_made():
    """The first three also where the run has records; trackers and a kept state are for such a run."""
    for text, cases in WITHOUT_EFFECT.items():
        for settings in cases:
            with pytest.raises(UserError, match=re.escape(text)) as error:
                fedsim.strategy("fedavg", zeros(), **settings)
            assert next(iter(settings)) in str(error.value)
    assert fedsim.strategy("fedavg", zeros(), output="unused", tensorboard=True, keep_state=True)


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line(case):
    call, text = REFUSED[case]
    with pytest.raises(UserError) as error:
        call()
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_a_client_may_not_change_its_name():
    calls = []
    app = shift_app(names=lambda number: f"site-{number}" if len(calls) < 6 else "another")
    app_calls = app.__call__
    grid = grid_of(app)
    grid._app = lambda message, context: (calls.append(1), calls.append(1), app_calls(message, context))[2]
    with pytest.raises(UserError, match="its reply calls it 'another'"):
        fedsim.strategy("fedavg", zeros()).start(grid)


class ComesBack(InlineGrid):
    """The node 4 is gone after two phases of training, and is then back as node 9."""

    def __init__(self, app):
        super().__init__(app, 3)
        self.contexts[9] = self.contexts[4]
        self.trained = 0

    def deliver(self, messages):
        self.trained += sum(message.metadata.message_type == "train" for message in messages)
        if self.trained >= 6:
            self.node_ids = [2, 3, 9]
        return super().deliver(messages)


def test_a_client_is_known_by_its_name_when_its_node_changes(monkeypatch):
    monkeypatch.setattr("strategies.wire.handshake.POLL_SECONDS", 0.01)
    result = fedsim.strategy("fedavg", zeros()).start(ComesBack(shift_app()), num_rounds=4)
    assert weight_of(result.arrays) == pytest.approx(4 * 17 / 6)
    nameless = shift_app(names=lambda number: "")
    strategy = fedsim.strategy("fedavg", zeros(), wait_for_sites=0.05, patience=0.0)
    with pytest.raises(fedsim.ClientFailedError, match="no node for node-4"):
        strategy.start(ComesBack(nameless), num_rounds=4)


def test_a_failure_ends_the_run_or_is_that_of_the_client_alone(tmp_path):
    """Client 2 sends NaN in round 2: with "continue" the round is the mean of the others, (10 + 40) / 30 = 5/3."""

    def metrics(number, round):
        return {"train_loss": float("nan") if (number, round) == (2, 2) else 1.0}

    with pytest.raises(
        fedsim.ClientFailedError, match=r"'site-2' failed in round 2.*'train_loss' is not a finite number"
    ):
        play(shift_app(metrics), rounds=2)
    strategy = fedsim.strategy("fedavg", zeros(), on_client_failure="continue", output=str(tmp_path))
    result = strategy.start(grid_of(shift_app(metrics)), num_rounds=2)
    assert weight_of(result.arrays) == pytest.approx(17 / 6 + 5 / 3)
    clients = pd.read_csv(next(tmp_path.rglob("clients.csv")))
    assert (clients["status"] != "ok").sum() == 1

    def fails(number, round):
        raise KeyError("no such file")

    with pytest.raises(fedsim.ClientFailedError, match="no such file"):
        play(shift_app(fails))


def test_a_client_that_claims_far_more_examples_than_the_others_is_refused(tmp_path):
    """1001 of the claimed examples are more than 100 times the others' 10, whose mean is then (1 + 2) / 2."""
    app = shift_app(lambda number, round: {"num-examples": 1001 if number == 2 else 10})
    with pytest.raises(fedsim.ClientFailedError, match=r"'site-2' .*it reports 1001 examples, 100 times the median"):
        play(app)
    tolerant = {"on_client_failure": "continue", "output": str(tmp_path)}
    result = fedsim.strategy("fedavg", zeros(), **tolerant).start(grid_of(app), num_rounds=1)
    assert weight_of(result.arrays) == pytest.approx(1.5)
    result = fedsim.strategy("fedavg", zeros(), examples_limit=0).start(grid_of(app), num_rounds=1)
    assert weight_of(result.arrays) == pytest.approx((10 + 20 + 4004) / 1021)


def test_too_few_clients_end_the_run_in_one_line(monkeypatch):
    monkeypatch.setattr("strategies.wire.handshake.POLL_SECONDS", 0.01)
    strategy = fedsim.strategy("fedavg", zeros(), min_available_nodes=4, wait_for_sites=0.05)
    with pytest.raises(fedsim.ClientFailedError, match=r"3 clients answered in time; at least 4 are awaited"):
        strategy.start(grid_of(shift_app()))


def test_a_target_that_is_not_there_is_said_soon_with_those_who_are(monkeypatch, caplog):
    monkeypatch.setattr("strategies.wire.handshake.POLL_SECONDS", 0.01)
    monkeypatch.setattr("strategies.wire.handshake.FIRST_SECONDS", 0.02)
    strategy = fedsim.strategy("fedavg", zeros(), wait_for_sites=0.2)
    with pytest.raises(fedsim.ClientFailedError) as error:
        strategy.start(grid_of(shift_app()), target="site-22")
    names = "site-0, site-1, site-2"
    assert str(error.value) == (
        "3 clients answered in time, and not 'site-22', which holds the unseen domain; did you mean 'site-2'? "
        f"here are: {names}"
    )
    lines = [line for line in caplog.messages if "waiting" in line]
    assert len(lines) == 1
    assert f"3 clients have answered ({names}), and not 'site-22'" in lines[0]


def test_a_run_that_cannot_go_on_says_so_in_the_words_of_an_app(tmp_path):
    def start(rounds):
        fedsim.strategy("fedavg", zeros(), output=str(tmp_path)).start(grid_of(shift_app()), num_rounds=rounds)

    start(2)
    with pytest.raises(UserError) as error:
        start(3)
    assert "give fedsim.strategy(..., keep_state=True) for a run that may go on" in str(error.value)
    assert str(error.value).endswith("choose another output=..., or remove the folder")
    with pytest.raises(UserError, match=r"fewer rounds \(num_rounds\)"):
        start(1)


def test_the_strategy_inside_plays_no_empty_rounds():
    """`FedDG` alone knows no clients, which it says; it does not return the initial model without a word."""
    strategy = fedsim.strategy("fedavg", zeros())
    config = {"experiment": "", "state-dir": "", "token": "t", "timeout": 1.0}
    inside = FedDG(strategy.recipe, strategy.experiment, {"weight": "shared"}, config)
    with pytest.raises(UserError, match=r"fedsim\.strategy"):
        inside.start(grid_of(shift_app()), ArrayRecord(zeros().state_dict()), num_rounds=2)
    with pytest.raises(NotImplementedError):
        strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid_of(shift_app()))
