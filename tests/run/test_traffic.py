"""The bytes that `fedsim methods NAME --data CONFIG` prints are those that clients.csv records."""

import pytest
from support import numbers, run_small, small_experiment

from fedsim.commands.cli import app
from fedsim.methods.table import METHODS
from fedsim.run.plan import resolve
from fedsim.run.traffic import traffic
from fedsim.settings.experiment import read_experiment


@pytest.mark.parametrize(
    "method", ["fedavg", "fedbn", "perada", "scaffold", "fedig", "copa", "stablefdg", "promptfl", "plan"]
)
def test_bytes_are_those_of_clients_csv(method, tmp_path):
    """Sums per client and round, and bytes of each bank, are equal from round 2 on, when every bank is filled."""
    model = dict(text.removeprefix("model.").split("=") for text in METHODS[method].tried_with)
    size = {"image_size": 16} if model else {}
    experiment = small_experiment(tmp_path, method, train={"rounds": 2, "iterations": 1}, model=model, data=size)
    folder, _ = run_small(experiment)
    clients = numbers(folder / "clients.csv").query("round == 2")
    rows = [row for row in traffic(resolve(experiment)) if row.when == "round"]
    assert (clients["bytes_down"] == sum(row.down for row in rows)).all()
    assert (clients["bytes_up"] == sum(row.up for row in rows)).all()
    banks = {row.record.removeprefix("bank "): row for row in rows if row.record.startswith("bank ") and row.down}
    for name, row in banks.items():
        assert (clients[f"bytes_down_{name}"] == row.down).all()
    assert bool(banks) == (method in ("scaffold", "fedig", "copa", "stablefdg"))


def test_perada_on_resnet18():
    """Adapters, norms and head: 1,411,719 parameters, 15,488 statistics, and a counter for each of 33 norms."""
    words = {"backbone": "resnet18"}
    changes = {"classes": [], "dataset": "pacs", "domains": [], "image_size": 64}
    experiment = small_experiment("unused", "perada", model=words, data=changes, run={"target": "sketch"})
    (train, *_) = traffic(resolve(experiment))
    assert train.down == train.up == 4 * (1_411_719 + 15_488) + 8 * 33


def test_unknown_amounts_are_none():
    """Amounts that depend on the data are None; visits go to the unseen domain's client."""
    rows = {row.record: row for row in traffic(resolve(small_experiment("unused", "fada")))}
    assert rows["bank target_features"].down is None
    assert rows["target_attention"].when == rows["target_training"].when == "visit"


def test_command(capsys):
    """The command prints the table for a shipped experiment; --preset or --set without --data is refused."""
    app(["methods", "scaffold", "--data", "digits"], standalone_mode=False)
    text = capsys.readouterr().out
    assert "bank control" in text
    assert "FedAvg's model" in text
    with pytest.raises(Exception, match="NAME --data CONFIG"):
        app(["methods", "--data", "digits"], standalone_mode=False)


@pytest.mark.parametrize("method", ["promptfl", "plan"])
def test_command_where_fedavg_is_refused(method, capsys):
    """The method's own bytes are printed, and FedAvg's line is empty and says why."""
    tried = METHODS[method].tried_with
    app(["methods", method, "--data", "digits", *(f"--set={text}" for text in tried)], standalone_mode=False)
    text = capsys.readouterr().out
    (train, *_) = traffic(resolve(read_experiment("digits", [*tried, f"method.name={method}", "run.device=cpu"])))
    assert method == "plan" or train.down == 16 * 32 * 4
    cells = {line.split("│")[1].strip(): line.split("│")[3:5] for line in text.splitlines() if line.count("│") == 5}
    assert [each.strip() for each in cells["model, to train"]] == [f"{train.down:,}", f"{train.up:,}"]
    assert [each.strip() for each in cells["FedAvg's model"]] == ["-", "-"]
    assert "refused with these settings: model.train = 'head' trains nothing" in text
