"""Images on a site change between runs of one process or during a run; a site comes late, with its images, or never."""

import json
import shutil

import numpy as np
import pytest
from image_trees import _write_image, write_tree
from sites import run_on_sites
from support import Interrupt, numbers, small_experiment

import fedsim.runs.serve
from fedsim.common.errors import ClientFailedError, UserError
from fedsim.runs.plan import run_folder
from fedsim.runs.workspace import close_workspaces, workspace
from strategies.wire import handshake

PATIENT = {"runtime": "deployment", "on_client_failure": "continue", "wait_for_sites": 0.05, "patience": 0.0}


class Sites:
    """Three sites a, b and c (the unseen domain) with images of their own, four of each class."""

    def __init__(self, folder):
        facts = {"domains": ["a", "b", "c"], "classes": ["cat", "dog"]}
        self.folder, self.data = folder, write_tree(folder / "images", *facts.values(), 4)
        places = {"dataset": "folder", "root": str(self.data), "cache": str(folder / "cache")}
        self.settings = {**places, **facts, "image_size": 16, "fraction": 1.0}

    def experiment(self, method="fedavg", name="run", rounds=1, **run):
        sections = {"data": self.settings, "train": {"rounds": rounds, "batch_size": 4}}
        run = {"target": "c", "evaluate_target": "site", **run}
        return small_experiment(self.folder / name, method, **sections, run=run)

    def run(self, name="run", *callbacks, away=(), **words):
        experiment, state = self.experiment(name=name, **words), self.folder / "state"
        return run_on_sites(experiment, state, *callbacks, away=away, **{"data-dir": str(self.data)})[0]

    def change(self, domain, seed=9000):
        """Give every image of a domain other pixels under the same name."""
        for index, file in enumerate(sorted((self.data / domain).rglob("*.png"))):
            _write_image(file, seed + index)


@pytest.fixture
def sites(tmp_path, monkeypatch):
    serve, sent = fedsim.runs.serve, fedsim.runs.serve.sent_settings
    blank = {"run": {"output": "outputs"}}  # as in a deployment: two runs send the same settings
    monkeypatch.setattr(serve, "sent_settings", lambda given, *rest: sent(given.replace(**blank), *rest))
    monkeypatch.setattr(handshake, "POLL_SECONDS", 0.005)
    close_workspaces()
    yield Sites(tmp_path)
    close_workspaces()


def column(folder, name="target_loss"):
    return list(numbers(folder / "rounds.csv")[name])


def content(folder, domain):
    return json.loads((folder / "environment.json").read_text())["data"][domain]["content"]


def test_a_new_run_sees_the_images_of_now(sites):
    """The process of a site stays warm between the runs, and the settings that it is sent are the same."""
    before = sites.run("before")
    sites.change("c")
    warm = sites.run("warm")
    close_workspaces()
    fresh = sites.run("fresh")
    assert content(warm, "c") == content(fresh, "c") != content(before, "c")
    assert column(warm) == column(fresh) != column(before)


def test_a_new_run_adapts_to_the_images_of_now(sites):
    """The unlabelled images of the unseen domain stay in memory for one run."""
    space = workspace(sites.experiment("fada").toml())
    first = space.unlabelled("first")
    sites.change("c")
    assert space.unlabelled("first") is first
    assert not np.array_equal(space.unlabelled("second").data.images, first.data.images)


class During(Interrupt):
    """After each round something happens; the run may be stopped after one."""

    def __init__(self, happens, after_round=-1):
        super().__init__(after_round)
        self.happens = happens

    def on_round(self, row, clients):
        self.happens(row["round"])
        super().on_round(row, clients)


@pytest.mark.parametrize("domain", ["a", "c"])  # one that trains, and the unseen one
def test_images_that_change_while_the_process_of_their_site_starts_anew_stop_the_run(domain, sites):
    """The site stays online as the same node, so that there is no second handshake."""
    starts_anew = During(lambda round: round == 1 and (sites.change(domain), close_workspaces()))
    with pytest.raises(ClientFailedError, match=f"client '{domain}' failed in round 2: .*images or labels of its site"):
        sites.run("run", starts_anew, rounds=2)


def late(after_round=-1):
    """(a callback, the domains away): the site of b comes after round 1."""
    away = {"b"}
    return During(lambda round: away.clear() if round else None, after_round), away


def test_the_data_of_a_site_that_comes_late_are_recorded_and_compared(sites):
    """Also when it is away again as the run is resumed: the run goes on without it until it has its former data."""
    comes, away = late(2)
    with pytest.raises(KeyboardInterrupt):
        sites.run("run", comes, rounds=4, away=away, **PATIENT)
    folder = run_folder(sites.experiment(rounds=4, **PATIENT))
    assert column(folder, "clients") == [0, 1, 2]
    recorded = content(folder, "b")
    sites.change("b")
    close_workspaces()
    with pytest.raises(UserError, match=r"holds a run on other data .b: 8 images as before"):
        sites.run("run", rounds=4, **PATIENT)
    comes, away = late()
    sites.run("run", comes, rounds=4, away=away, **PATIENT)
    assert column(folder, "clients") == [0, 1, 2, 1, 1]
    assert content(folder, "b") == recorded


def test_a_site_that_comes_late_with_the_images_of_another_is_refused(sites):
    """Its training images would be those of the unseen domain."""
    shutil.rmtree(sites.data / "b")
    shutil.copytree(sites.data / "c", sites.data / "b")
    comes, away = late()
    assert column(sites.run("run", comes, rounds=2, away=away, **PATIENT), "clients") == [0, 1, 1]
