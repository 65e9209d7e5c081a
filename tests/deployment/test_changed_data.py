"""Images on a site change: between two runs of one process, or while a run is going on."""

import json
import shutil

import numpy as np
import pytest
from image_trees import _write_image, write_tree
from sites import site_grid
from support import Interrupt, numbers, small_experiment
from test_roster import Nodes

import fedsim.run.serve
from fedsim.common.errors import ClientFailedError, UserError
from fedsim.run.plan import resolve, run_folder
from fedsim.run.serve import serve
from fedsim.run.workspace import close_workspaces, workspace
from fedsim.settings import RunSettings
from strategies.wire import handshake
from strategies.wire.handshake import Roster


@pytest.fixture
def federation(tmp_path, monkeypatch):
    """run(name, *callbacks) -> the run's folder; three sites with images of their own, four of each class."""
    data = write_tree(tmp_path / "images", ["a", "b", "c"], ["cat", "dog"], 4)
    sent = fedsim.run.serve.sent_settings
    blank = {"run": {"output": "outputs"}}  # as in a deployment: two runs send the same settings
    monkeypatch.setattr(
        fedsim.run.serve, "sent_settings", lambda experiment, *rest: sent(experiment.replace(**blank), *rest)
    )

    def experiment(method="fedavg", name="run", rounds=1, **run):
        folders = {"root": str(data), "cache": str(tmp_path / "cache")}
        facts = {"dataset": "folder", "domains": ["a", "b", "c"], "classes": ["cat", "dog"]}
        sections = {
            "data": {**folders, **facts, "image_size": 16, "fraction": 1.0},
            "train": {"rounds": rounds, "batch_size": 4},
            "run": {"target": "c", "evaluate_target": "site", **run},
        }
        return small_experiment(tmp_path / name, method, **sections)

    def run(name, *callbacks, tamper=None, away=(), **words):
        experiment = run.experiment(name=name, **words)
        grid = site_grid(experiment, tmp_path / "state", tamper=tamper)
        grid.get_node_ids = lambda: [
            node for node in grid.node_ids if grid.contexts[node].node_config["domain"] not in away
        ]
        for context in grid.contexts.values():
            context.node_config["data-dir"] = str(data)
        return serve(grid, resolve(experiment), callbacks)

    run.data, run.experiment = data, experiment
    close_workspaces()
    return run


def change(folder, seed=9000):
    """Gives every image of a domain other pixels under the same name."""
    for index, file in enumerate(sorted(folder.rglob("*.png"))):
        _write_image(file, seed + index)


def losses(folder):
    return list(numbers(folder / "rounds.csv")["target_loss"])


def content(folder, domain):
    return json.loads((folder / "environment.json").read_text())["data"][domain]["content"]


def test_a_new_run_sees_the_images_of_now(federation):
    """The process of a site stays warm between the runs, and the settings that it is sent are the same."""
    before = federation("before")
    change(federation.data / "c")
    warm = federation("warm")
    close_workspaces()
    fresh = federation("fresh")
    assert content(warm, "c") == content(fresh, "c") != content(before, "c")
    assert losses(warm) == losses(fresh) != losses(before)


def test_a_new_run_adapts_to_the_images_of_now(federation):
    """The unlabelled images of the unseen domain stay in memory for one run."""
    space = workspace(federation.experiment("fada").toml())
    first = space.unlabelled("first")
    change(federation.data / "c")
    assert space.unlabelled("first") is first
    assert not np.array_equal(space.unlabelled("second").data.images, first.data.images)


class ChangedBetween(Interrupt):
    """After round 1 the images of a domain change, and the process of its site starts anew."""

    def __init__(self, folder):
        super().__init__(-1)
        self.folder = folder

    def on_round(self, row, clients):
        if row["round"] == 1:
            change(self.folder)
            close_workspaces()


@pytest.mark.parametrize("domain", ["a", "c"])  # one that trains, and the unseen one
def test_images_that_change_during_a_run_stop_it(domain, federation):
    """The site stays online as the same node, so that there is no second handshake."""
    with pytest.raises(ClientFailedError, match=f"client '{domain}' failed in round 2: .*images or labels of its site"):
        federation("run", ChangedBetween(federation.data / domain), rounds=2)


def test_a_warm_process_goes_on_with_the_images_that_it_has_in_memory(federation):
    """What changes on the disk does not concern it, and costs nothing in a round."""

    class Changed(ChangedBetween):
        def on_round(self, row, clients):
            change(self.folder, 100 * row["round"])

    unbroken = federation("unbroken", rounds=2)
    unchanged = content(unbroken, "a")
    folder = federation("changed", Changed(federation.data / "a"), rounds=2)
    assert losses(folder) == losses(unbroken)
    assert content(folder, "a") == unchanged


def said(client, content="1" * 20):
    """A site's answer in the handshake; however its images change, it has seven."""
    data = {"data-images": 7, "data-content": content, "data-environment": 0}
    role = "target" if client == "c" else "source"
    return {"client": client, "role": role, "holds": client, "examples": 7, "class-counts": [3, 4], **data}


@pytest.mark.parametrize("client", ["a", "c"])
@pytest.mark.parametrize("node", [99, 0])  # 0: the node that it had, as a SuperNode that starts again with its key
@pytest.mark.parametrize("mode", ["stop", "continue"])
def test_a_site_that_comes_back_with_other_data_is_refused(mode, node, client, monkeypatch):
    """With "continue" it is missing, and refused again when it tries again, until it has its former data."""
    monkeypatch.setattr(handshake, "POLL_SECONDS", 0.01)
    nodes = {1: said("a"), 2: said("b"), 3: said("c")}
    grid = Nodes(nodes)
    roster = Roster(grid, ["a", "b"], 2, {"token": "t"}, "c")
    roster.gather(RunSettings(wait_for_sites=1.0, patience=0, on_client_failure=mode))
    own = 1 if client == "a" else 3
    for content in ("2" * 20, "3" * 20, "1" * 20):
        nodes.pop(own, None)
        nodes.pop(node, None)
        assert roster.call(0.0, [client]) == [client]
        nodes[node or own] = said(client, content)
        if mode == "stop":
            with pytest.raises(UserError, match=f"client '{client}' came back with other data .*7 images as before"):
                roster.call(0.0, [client])
            return
        assert roster.call(0.05, [client]) == ([client] if content != "1" * 20 else [])


def test_the_data_of_a_late_site_that_is_refused_are_not_recorded(monkeypatch):
    """Its number of examples would dominate the average; when it comes with a plausible one, its data count."""
    monkeypatch.setattr(handshake, "POLL_SECONDS", 0.01)
    grid, recorded = Nodes({1: said("a"), 2: said("b")}), {}
    roster = Roster(grid, ["a", "b", "d"], 2, {"token": "t"})
    roster.gather(RunSettings(wait_for_sites=0.05, patience=0, on_client_failure="continue"))
    roster.check_late = recorded.update
    grid.nodes[4] = {**said("d", "2" * 20), "examples": 10**9, "class-counts": [10**9, 0]}
    assert roster.call(0.05, ["d"]) == ["d"]
    assert recorded == {}
    grid.nodes[5] = said("d")
    assert roster.call(0.05, ["d"]) == []
    assert recorded["d"]["content"] == "1" * 20


PATIENT = {"runtime": "deployment", "on_client_failure": "continue", "wait_for_sites": 0.1, "patience": 0.0}


class Comes(Interrupt):
    """The site of b, which is away at first, comes after round 1; the run may be stopped after another round."""

    def __init__(self, after_round=-1):
        super().__init__(after_round)
        self.away = {"b"}

    def on_round(self, row, clients):
        if row["round"] > 0:
            self.away.clear()
        super().on_round(row, clients)


def test_the_data_of_a_site_that_comes_late_are_recorded_and_compared(federation, monkeypatch):
    """Also when it is away again as the run is resumed: the run goes on without it until it has its former data."""
    monkeypatch.setattr(handshake, "POLL_SECONDS", 0.01)
    comes = Comes(2)
    with pytest.raises(KeyboardInterrupt):
        federation("run", comes, rounds=4, away=comes.away, **PATIENT)
    folder = run_folder(federation.experiment(name="run", rounds=4, **PATIENT))
    assert list(numbers(folder / "rounds.csv")["clients"]) == [0, 1, 2]
    recorded = content(folder, "b")
    change(federation.data / "b")
    close_workspaces()
    with pytest.raises(UserError, match=r"holds a run on other data .b: 8 images as before"):
        federation("run", rounds=4, **PATIENT)
    comes = Comes()
    federation("run", comes, rounds=4, away=comes.away, **PATIENT)
    assert list(numbers(folder / "rounds.csv")["clients"]) == [0, 1, 2, 1, 1]
    assert content(folder, "b") == recorded


def test_a_site_that_comes_late_with_the_images_of_another_is_refused(federation, monkeypatch):
    """Its training images would be those of the unseen domain."""
    monkeypatch.setattr(handshake, "POLL_SECONDS", 0.01)
    shutil.rmtree(federation.data / "b")
    shutil.copytree(federation.data / "c", federation.data / "b")
    comes = Comes()
    folder = federation("run", comes, rounds=2, away=comes.away, **PATIENT)
    assert list(numbers(folder / "rounds.csv")["clients"]) == [0, 1, 1]
