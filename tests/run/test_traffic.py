"""The bytes that `fedsim methods NAME --data CONFIG` prints are those that clients.csv records."""

import pytest
from support import numbers, run_small, tiny_experiment

from fedsim.commands.cli import app
from fedsim.methods.table import METHODS
from fedsim.run.plan import resolve
from fedsim.run.traffic import traffic
from fedsim.settings.experiment import read_experiment


@pytest.mark.parametrize("method", ["fedbn", "perada", "scaffold", "fedig", "copa", "stablefdg", "plan"])
def test_bytes_are_those_of_clients_csv(method, tmp_path):
    """Sums per client and round, and bytes of each bank, are equal from round 2 on, when every bank is filled."""
    model = dict(text.removeprefix("model.").split("=") for text in METHODS[method].tried_with)
    experiment = tiny_experiment(tmp_path, method, model=model, data={"image_size": 16} if model else {})
    folder, _ = run_small(experiment)
    clients = numbers(folder / "clients.csv").query("round == 2")
    rows = [row for row in traffic(resolve(experiment)) if row.when == "round"]
    for way in ("down", "up"):
        assert (clients[f"bytes_{way}"] == sum(getattr(row, way) for row in rows)).all()
    banks = {row.record.removeprefix("bank "): row for row in rows if row.record.startswith("bank ") and row.down}
    for name, row in banks.items():
        assert (clients[f"bytes_down_{name}"] == row.down).all()
    assert bool(banks) == (method in ("scaffold", "fedig", "copa", "stablefdg"))


@pytest.mark.parametrize("method", ["scaffold", "promptfl", "plan"])
def test_command(method, capsys):
    """FedAvg's line is empty, and says why, where FedAvg is refused; amounts that depend on the data are unknown."""
    tried = METHODS[method].tried_with
    app(["methods", method, *(f"--set={text}" for text in tried), "--data", "digits"], standalone_mode=False)
    text = capsys.readouterr().out
    cells = {line.split("│")[1].strip(): line.split("│")[3:5] for line in text.splitlines() if line.count("│") == 5}
    if method == "scaffold":
        assert "bank control" in text
        assert cells["FedAvg's model"][0].strip() != "-"
        rows = {row.record: row for row in traffic(resolve(tiny_experiment("unused", "fada")))}
        assert rows["bank target_features"].down is None
        assert rows["target_attention"].when == rows["target_training"].when == "visit"
        return
    (train, *_) = traffic(resolve(read_experiment("digits", [*tried, f"method.name={method}", "run.device=cpu"])))
    assert method == "plan" or train.down == 16 * 32 * 4
    assert [each.strip() for each in cells["model, to train"]] == [f"{train.down:,}", f"{train.up:,}"]
    assert [each.strip() for each in cells["FedAvg's model"]] == ["-", "-"]
    assert "refused with these settings: model.train = 'head' trains nothing" in text
