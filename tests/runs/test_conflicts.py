"""Which runs are refused: in a folder with other settings or changed records, and those that can never start."""

import json
import logging
import shutil
from unittest.mock import Mock

import pytest
from flwr.app import Error, Message
from image_trees import write_tree
from support import interrupt, numbers, run_small, small_experiment, tiny_experiment

from fedsim.commands.runs import run_one
from fedsim.common.errors import ClientFailedError, UserError
from fedsim.runs import leftovers
from fedsim.runs.admission import check_folder
from fedsim.runs.checkpoint import load_checkpoint
from fedsim.runs.plan import resolve, run_folder
from fedsim.runs.workspace import close_workspaces
from fedsim.runtime.launch import launch
from strategies.wire import handshake

RUN = {"target": "sketch"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """asked(state, **sections): a short run on a tree of four domains of 24 images each, finished or stopped before."""
    place = tmp_path_factory.mktemp("conflicts")
    root = write_tree(place / "tree", ("art", "cartoon", "photo", "sketch"), ("cat", "dog"), 12)
    data = {"dataset": "folder", "root": str(root), "domains": [], "fraction": 1, "image_size": 28}

    def asked(state, **sections):
        given = {"data": data, "run": RUN, "train": {"rounds": 2, "iterations": 1}, **sections}
        return small_experiment(place / state, **given)

    launch(asked("finished"))
    interrupt(asked("stopped"), 1)
    return asked


@pytest.fixture(autouse=True)
def _new_process():
    close_workspaces()


@pytest.mark.parametrize(("key", "sections"), [  # the rule that selects the round; a domain that no client has
    ("run.select_on", {"run": {**RUN, "select_on": "local"}}),
    ("run.validation_domain", {"run": {**RUN, "validation_domain": "photo"}}),
    ("train.lr", {"train": {"rounds": 2, "iterations": 1, "lr": 0.5}}),
])  # fmt: skip
@pytest.mark.parametrize(("state", "call"), [("finished", launch), ("finished", run_one), ("stopped", launch)])
def test_a_run_with_other_settings_is_neither_the_result_nor_continued(key, sections, state, call, folders, caplog):
    """Neither for `fedsim run` nor for `launch`; another held-out domain may be one on which the model was trained."""
    with pytest.raises(UserError, match=f"holds a run with other settings \\({key}\\)"):
        call(folders(state, **sections))
    if state == "finished" and call is launch:
        with caplog.at_level(logging.INFO, "fedsim"):
            folder = launch(folders("finished"))
        assert f"already finished: {folder}" in caplog.text


def test_a_stopped_run_may_go_on_with_other_limits_and_a_finished_one_has_its_own(folders):
    """A limit refuses replies, so that a run with another one has other numbers; its records say from which round."""
    other = {"run": {**RUN, "update_limit": 3.0}}
    with pytest.raises(UserError, match=r"holds a run with other settings \(run.update_limit\)"):
        launch(folders("finished", **other))
    interrupt(folders("limited"), 1)
    record = json.loads((launch(folders("limited", **other)) / "environment.json").read_text())
    assert (record["earlier"][0]["update_limit"], record["update_limit"]) == (100.0, 3.0)


def test_the_model_of_a_run_that_trained_on_the_unseen_domain_is_no_start(folders):
    weights = {"weights": str(run_folder(folders("finished")) / "best.safetensors")}
    launch(folders("start", model=weights))  # that of a run with the same unseen domain is one
    with pytest.raises(UserError, match=r"best.safetensors is of a run that trained on 'photo', which would be unseen"):
        launch(folders("start", model=weights, run={"target": "photo"}))


def five_rounds(output):
    return tiny_experiment(output, rounds=5, run={"checkpoint_every": 2})


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The output of a run that was stopped after round 3; its checkpoint is of round 2."""
    output = tmp_path_factory.mktemp("stopped")
    interrupt(five_rounds(output), 3)
    return output


def without(*rounds):
    return lambda text: "".join(line for line in text.splitlines(keepends=True) if line.split(",")[0] not in rounds)


@pytest.mark.parametrize(("file", "change", "said"), [
    ("rounds.csv", lambda text: f"\ufeff{text}", "first column is not called round"),
    ("rounds.csv", lambda text: text.replace("0.", "0,"), "round 0 has cells that are not numbers"),
    ("rounds.csv", lambda text: text.replace("\n2,", "\n2.0,"), "'2.0' is not the number of a round"),
    ("rounds.csv", lambda text: text.encode("utf-16"), "it is not text in UTF-8"),
    ("rounds.csv", without("1"), "no row of round 1, but the run has a checkpoint of round 2"),
    ("rounds.csv", lambda text: "", "no row of round 0"),
    ("rounds.csv", None, "no row of round 0"),
    ("clients.csv", without("2", "3"), "no row of round 2"),
    ("clients.csv", None, "no row of round 1"),
])  # fmt: skip
def test_a_changed_file_is_named(file, change, said, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    record = run_folder(five_rounds(tmp_path)) / file
    changed = change(record.read_text(encoding="utf-8")) if change else None
    changed = changed.encode() if isinstance(changed, str) else changed
    record.unlink() if changed is None else record.write_bytes(changed)
    with pytest.raises(UserError, match=rf"{file}: .*{said}") as error:
        run_small(five_rounds(tmp_path))
    assert "\n" not in str(error.value)
    assert "remove the run's folder" in str(error.value) or "UTF-8" in said
    assert (record.read_bytes() if record.is_file() else None) == changed


def test_too_few_images_are_refused_from_the_folder_alone(tmp_path):
    """Nothing is decoded and nothing written, so that the command runs with the other unseen domain that it needs."""
    root = write_tree(tmp_path / "images", ["one", "photo", "sketch"], ["cat", "dog"], 4)
    for file in sorted((root / "one").rglob("*.png"))[1:]:
        file.unlink()
    data = {"dataset": "folder", "root": str(root), "cache": str(root / "cache"), "image_size": 16, "fraction": 1}
    data |= {"classes": ["cat", "dog"], "domains": ["one", "photo", "sketch"]}

    def run(target):
        return launch(tiny_experiment(tmp_path / "out", rounds=1, data=data, run={"target": target}))

    with pytest.raises(UserError, match="client 'one' has 0 training and 1 validation images, at least 2 and 1 are"):
        run("sketch")
    assert not any(path.exists() for path in (tmp_path / "out", root / "cache"))
    assert (run("one") / "summary.csv").is_file()


def refusal(monkeypatch, reason):
    """Let the handshake, which begins after the run's folder was opened, fail."""
    monkeypatch.setattr(handshake.Roster, "gather", Mock(side_effect=reason))


@pytest.mark.parametrize("reason", [UserError("client 'rot0': too few"), ClientFailedError("no node for rot0"), ""])
def test_a_run_that_the_handshake_refuses_leaves_nothing(tmp_path, monkeypatch, reason):
    """The command with another setting then runs. A node may refuse, too, as a site with too few images does."""
    said = "user error: client 'rot0' has 0 images"
    refuse = {"tamper": lambda message, reply: Message(Error(code=2, reason=said), reply_to=message)}
    with monkeypatch.context() as patch:
        if reason:
            refusal(patch, reason)
        with pytest.raises(type(reason or UserError("")), match=str(reason) or "client 'rot0' has 0 images"):
            run_small(tiny_experiment(tmp_path / "out"), **({} if reason else refuse))
    assert not list((tmp_path / "out").iterdir())
    assert (run_small(tiny_experiment(tmp_path / "out", rounds=1))[0] / "summary.csv").is_file()


def test_records_and_folders_of_others_stay(tmp_path, monkeypatch):
    experiment = tiny_experiment(tmp_path)
    folder = run_folder(experiment)
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")

    def refused(experiment, said):
        with monkeypatch.context() as patch:
            refusal(patch, UserError("no"))
            with pytest.raises(UserError, match=said):
                run_small(experiment)
        return {file.name for file in folder.iterdir()}

    for _ in range(2):
        assert refused(experiment, "no") == {"notes.txt"}
    interrupt(experiment, 1)
    other = experiment.replace(train={"lr": 0.5})
    for changed, said in ((experiment, "no"), (other, "holds a run with other settings")):
        assert {"experiment.toml", "environment.json", "rounds.csv", "notes.txt"} <= refused(changed, said)
        assert load_checkpoint(folder / "checkpoint").round == 1


def test_a_private_round_that_began_is_kept(tmp_path):
    """Its guarantee counts every round that was begun, also of an attempt that failed in the first."""
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(UserError), leftovers.nothing_left(tmp_path, lambda: True):  # noqa: PT012
        (tmp_path / "experiment.toml").write_text("")
        (tmp_path / "checkpoint" / "begun").write_text("1")
        raise UserError("no")
    assert (tmp_path / "checkpoint" / "begun").is_file()
    assert (tmp_path / "experiment.toml").is_file()


def test_a_run_that_was_killed_between_its_first_two_files_begins_anew(tmp_path):
    """environment.json, which has the format, is written first: a folder with settings always says its format."""
    experiment = tiny_experiment(tmp_path, rounds=1)
    folder, _ = run_small(experiment)
    before = numbers(folder / "rounds.csv")
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "environment.json":
            path.unlink()
    run_small(experiment)
    assert numbers(folder / "rounds.csv").equals(before)


LOSS = """
from dataclasses import dataclass
from clients.parts import Term
from fedsim import Recipe

@dataclass(frozen=True)
class Small(Term):
    def begin(self, round):
        return lambda batch: 0.01 * batch.logits.square().mean()

small = Recipe(terms=(Small(),))
"""


def test_a_finished_run_of_a_method_whose_file_has_changed_is_not_the_result(tmp_path, monkeypatch):
    """Only the recorded hash can tell: no setting has changed. A record without a hash is not compared."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "changed_loss.py"
    file.write_text(LOSS)
    experiment = tiny_experiment(tmp_path / "out", rounds=2, method="changed_loss:small")
    launch(experiment)
    file.write_text(LOSS.replace("0.01", "0.02"))
    reason = r"holds a run with other code \(changed_loss has changed since\); put that back, choose another"
    for call in (launch, run_one):
        with pytest.raises(UserError, match=reason):
            call(experiment)
    with pytest.raises(UserError, match=reason):
        check_folder(resolve(experiment))  # as a sweep asks of each of its cells
    file.write_text(LOSS)
    assert launch(experiment) == run_folder(experiment)
    file.write_text(LOSS.replace("0.01", "0.02"))
    environment = run_folder(experiment) / "environment.json"
    environment.write_text(environment.read_text().replace("sha256:", "unknown:"))
    launch(experiment)


def test_a_run_ends_with_the_next_commands(tmp_path, capsys):
    run_one(tiny_experiment(tmp_path, rounds=1))
    (folder,) = tmp_path.iterdir()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"next: fedsim compare {folder}; fedsim report {folder}"
