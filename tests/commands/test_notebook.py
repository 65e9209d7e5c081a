"""fedsim.run, sweep and compare: runs as objects and data frames, from experiments, folders and torch Datasets."""

import subprocess
import sys
import types

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedsim
from fedsim import UserError
from fedsim.commands import notebook
from fedsim.commands.notebook_html import curve
from fedsim.commands.runs import headline

SMALL = {"rounds": 2, "fraction": 0.1, "processes": 1}


class Net(nn.Module):
    """Three numbers to two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(3, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(x).relu())


def rows(number, count=60, first=0):
    """The class is the sign of the second number; each domain has its own mean of the first one."""
    values = torch.randn(count, 3, generator=torch.Generator().manual_seed(number))
    values[:, 0] += number
    return TensorDataset(values, (values[:, 1] > 0).long() + first)


def domains(first=0):
    return {name: rows(number, first=first) for number, name in enumerate(("north", "south", "west"))}


def test_a_run_of_an_experiment_is_an_object_with_data_frames(tmp_path):
    run = fedsim.run("fedprox", "digits", "rot75", output=str(tmp_path), proximal={"mu": 0.5}, **SMALL)
    assert run.folder.parts[-3:] == ("fedprox@proximal.mu=0.5", "rot75", "seed0")
    assert run.rounds["round"].tolist() == [0, 1, 2]
    assert set(run.clients["client"]) == {"rot0", "rot15", "rot30", "rot45", "rot60"}
    assert len(run.summary) == 1
    assert run.experiment.method["proximal"] == {"mu": 0.5}
    assert run.model(torch.rand(2, 1, 28, 28)).shape == (2, 10)
    assert repr(run) == headline(run.folder)
    page = run._repr_html_()
    assert page.count("<polyline") == 2
    assert page.count("<tr>") == 3
    assert "<td>2</td>" in page
    again = fedsim.run("fedprox", "digits", "rot75", output=str(tmp_path), proximal={"mu": 0.5}, **SMALL)
    assert again.folder == run.folder


def test_datasets_of_rows_with_a_network_of_ones_own(tmp_path):
    settings = {"output": str(tmp_path), "rounds": 8, "lr": 0.5, "batch_size": 16}
    run = fedsim.run("feddg-ga", domains(), "west", model=Net, **settings)
    assert run.rounds["target_accuracy"].iloc[-1] > 0.9
    assert set(run.clients["client"]) == {"north", "south"}
    values, classes = rows(2).tensors
    accuracy = (run.model(values).argmax(1) == classes).float().mean().item()
    assert accuracy == pytest.approx(run.summary["best_validation_target_accuracy"].iloc[0])
    assert fedsim.run("fedavg", domains(first=1), "west", name="from-one", **settings).experiment.data.classes == [
        "1",
        "2",
    ]


def test_fedavg_is_the_mean_of_what_each_domain_computes_by_itself(tmp_path):
    """One step of plain SGD on the training rows of each domain, and the mean by their numbers."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 2))
    start = {name: value.clone() for name, value in net.state_dict().items()}
    from fedsim.data import load_client

    settings = {"output": str(tmp_path), "rounds": 1, "lr": 0.5, "batch_size": 100, "scale": "none"}
    run = fedsim.run("fedavg", domains(), "west", model=net, **settings)
    sums, total = dict.fromkeys(start, 0.0), 0
    for domain in ("north", "south"):
        data = load_client(run.experiment.data, domain)
        values, labels = torch.from_numpy(data.images[data.train]), torch.from_numpy(data.labels[data.train])
        own = nn.Sequential(nn.Linear(3, 2))
        own.load_state_dict(start)
        nn.functional.cross_entropy(own(values), labels).backward()
        for name, parameter in own.named_parameters():
            sums[name] += len(values) * (start[name] - 0.5 * parameter.grad)
        total += len(values)
    from safetensors.torch import load_file

    last = load_file(run.folder / "last.safetensors")
    assert torch.allclose(last["head.weight"], sums["0.weight"] / total, atol=1e-6)
    assert torch.allclose(last["head.bias"], sums["0.bias"] / total, atol=1e-6)


def test_images_as_datasets_are_images(tmp_path):
    images = {
        name: TensorDataset(torch.randint(0, 256, (12, 1, 16, 16)) / 255, torch.arange(12) % 2)
        for name in ("a", "b", "c")
    }
    run = fedsim.run("ccst", images, "c", rounds=1, output=str(tmp_path), batch_size=4)
    assert run.experiment.data.image_size == 16
    assert run.experiment.data.dataset.endswith(":GREY")


def test_a_sweep_and_its_comparison_are_data_frames(tmp_path):
    settings = {"output": str(tmp_path), "rounds": 2, "lr": 0.5, "name": "three"}
    table = fedsim.sweep(["fedavg", "fedprox"], domains(), seeds=(0, 1), model=Net, **settings)
    assert len(table) == 2 * 3 * 2
    assert isinstance(table.attrs["notes"], list)
    compared = fedsim.compare(table, baseline="fedavg")
    assert set(compared.index) == {"fedavg", "fedprox"}
    means = table[table["method"] == "fedavg"].groupby("target")["best_validation_target_accuracy"].mean()
    for target in ("north", "south", "west"):
        assert compared.loc["fedavg", target] == pytest.approx(means[target])
    assert compared.loc["fedavg", "average"] == pytest.approx(means.mean())
    assert any("seed" in note for note in compared.attrs["notes"])
    one = fedsim.run("fedavg", domains(), "west", model=Net, **settings)
    assert fedsim.compare([one]).shape[0] == 1
    assert fedsim.compare(tmp_path / "three").shape[0] == 2


def test_a_cell_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    launched = notebook.carry_out

    def carry_out(plan, callbacks):
        if plan.experiment.method_name == "fedprox":
            raise fedsim.ClientFailedError("client 'north' failed\nwith a traceback")
        return launched(plan, callbacks)

    monkeypatch.setattr(notebook, "carry_out", carry_out)
    table = fedsim.sweep(["fedavg", "fedprox"], domains(), ["west"], model=Net, rounds=1, output=str(tmp_path))
    assert table["method"].tolist() == ["fedavg"]
    assert table.attrs["notes"][0] == "failed: fedprox → west (seed 0): client 'north' failed with a traceback"


def test_a_folder_and_a_file_are_data(tmp_path):
    arrays = {name: dataset.tensors for name, dataset in domains().items()}
    x = np.concatenate([values.numpy() for values, _ in arrays.values()])
    label = np.concatenate([classes.numpy() for _, classes in arrays.values()])
    np.savez(tmp_path / "rows.npz", x=x, label=label, domain=np.repeat(list(arrays), 60))
    run = fedsim.run("fedavg", tmp_path / "rows.npz", "west", model="linear", rounds=1, output=str(tmp_path / "out"))
    assert run.experiment.name == "rows"
    with pytest.raises(UserError, match="class folder"):
        fedsim.run("fedavg", tmp_path / "out" / "rows" / "fedavg" / "west" / "seed0")


def test_a_notebook_gets_a_bar_that_changes(tmp_path, monkeypatch):
    shown = []

    class Output:
        def update(self, page):
            shown.append(page)

    fake = types.ModuleType("IPython.display")
    fake.HTML = str
    fake.display = lambda page, display_id: shown.append(page) or Output()
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    monkeypatch.setattr(notebook, "_in_notebook", lambda: True)
    fedsim.run("fedavg", domains(), "west", model=Net, rounds=2, output=str(tmp_path))
    assert [page.partition("/progress> ")[2].partition(" ")[0] for page in shown] == ["0/2", "0/2", "1/2", "2/2"]


def test_the_curve_has_its_points_where_they_belong():
    """Of 420 by 160 pixels with margins of 28: round 1 of 2 is at 210, 0 % at 132 and 100 % at 28."""
    rounds = pd.DataFrame(
        {"round": [0, 1, 2], "target_accuracy": [0.0, 0.5, 1.0], "mean_validation_accuracy": [None, 1, 1]}
    )
    drawing = curve(rounds)
    assert 'points="28.0,132.0 210.0,80.0 392.0,28.0"' in drawing
    assert 'points="210.0,28.0 392.0,28.0"' in drawing


def test_importing_fedsim_and_its_help_stay_quick():
    code = "import sys, fedsim; print(sorted({'torch', 'flwr', 'pandas', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    code = "import atexit, sys\natexit.register(lambda: print(sorted({'torch', 'flwr', 'ray'} & set(sys.modules))))\n"
    code += "from fedsim.commands.start import main; sys.argv = ['fedsim', '--help']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")


ROWS = rows(0)
REFUSED = {
    "an unknown method": (lambda: fedsim.run("fedavgg", "digits"), "did you mean 'fedavg'"),
    "an unknown setting": (lambda: fedsim.run("fedavg", "digits", roundss=2), "did you mean 'rounds'"),
    "an unknown experiment": (lambda: fedsim.run("fedavg", "digitz"), "did you mean 'digits'"),
    "no data": (lambda: fedsim.run("fedavg", 3), "data is int; give"),
    "an unknown target": (lambda: fedsim.run("fedavg", domains(), "est", model=Net), "did you mean 'west'"),
    "one domain": (lambda: fedsim.run("fedavg", {"a": ROWS}, model=Net), "has one domain only"),
    "different shapes": (
        lambda: fedsim.run("fedavg", {"a": ROWS, "b": TensorDataset(torch.rand(4, 2), torch.arange(4))}),
        "the domains have examples of different shapes: a [3], b [2]",
    ),
    "a Dataset of texts": (lambda: fedsim.run("fedavg", {"a": ["x"], "b": ROWS}), "not a pair (tensor, target)"),
    "labels with a gap": (
        lambda: fedsim.run("fedavg", {"a": TensorDataset(torch.rand(4, 3), torch.tensor([0, 1, 3, 3])), "b": ROWS}),
        "they must be 0 to K-1",
    ),
    "a model that is none": (lambda: fedsim.run("fedavg", domains(), model=3), "model is int"),
    "an unknown backbone": (lambda: fedsim.run("fedavg", domains(), model="mlpp"), "did you mean 'mlp'"),
    "a model for other inputs": (
        lambda: fedsim.run("fedavg", domains(), model=lambda: nn.Sequential(nn.Linear(5, 2))), "of the shape [3]",
    ),
    "a model for other classes": (
        lambda: fedsim.run("fedavg", domains(), model=nn.Sequential(nn.Linear(3, 4))), "gives 4 outputs, and there are",
    ),
    "some of the domains": (
        lambda: fedsim.run("fedavg", domains(), "west", model=Net, domains=["north", "west"]),
        "leave domains out, and give the Datasets that the run shall have",
    ),
    "names of classes": (
        lambda: fedsim.run("fedavg", domains(), "west", model=Net, classes=["no", "yes"]), "leave classes out",
    ),
    "another runtime": (lambda: fedsim.run("fedavg", domains(), model=Net, runtime="ray"), "are in this process"),
    "a row for images": (lambda: fedsim.run("ccst", domains(), model=Net), "images"),
    "one method as a text": (lambda: fedsim.sweep("fedavg", domains()), "methods is a list"),
    "no runs": (lambda: fedsim.compare([]), "compare takes a folder"),
    "another data frame": (lambda: fedsim.compare(pd.DataFrame()), "that fedsim.sweep returned"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, text = REFUSED[case]
    with pytest.raises(UserError) as error:
        call()
    assert text in str(error.value)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
