"""A run that can never start leaves nothing, so that the command with changed settings is not refused."""

import pytest
from flwr.app import Error, Message
from image_trees import write_tree
from support import Interrupt, run_small, small_experiment

from fedsim.common.errors import ClientFailedError, UserError
from fedsim.run import leftovers
from fedsim.run.checkpoint import load_checkpoint
from fedsim.runtime.launch import launch
from strategies.wire import handshake


def test_too_few_images_are_refused_from_the_folder_alone(tmp_path):
    """Nothing is decoded and nothing written, so that the command runs with the other unseen domain that it needs."""
    root = write_tree(tmp_path / "images", ["one", "photo", "sketch"], ["cat", "dog"], 4)
    for file in sorted((root / "one").rglob("*.png"))[1:]:
        file.unlink()

    def run(target):
        names = {"classes": ["cat", "dog"], "domains": ["one", "photo", "sketch"]}
        data = {"dataset": "folder", "root": str(root), "cache": str(root / "cache"), "image_size": 16, "fraction": 1}
        return launch(
            small_experiment(tmp_path / "out", data=data | names, train={"rounds": 1}, run={"target": target})
        )

    with pytest.raises(UserError, match="client 'one' has 0 training and 1 validation images, at least 2 and 1 are"):
        run("sketch")
    assert not (tmp_path / "out").exists()
    assert not (root / "cache").exists()
    assert (run("one") / "summary.csv").is_file()


def refused(reason):
    """Something that a run does after it has opened its folder, and that fails."""

    def fail(*words, **more):
        raise reason

    return fail


@pytest.mark.parametrize("reason", [UserError("client 'rot0': too few"), ClientFailedError("no node for rot0")])
def test_a_run_that_the_handshake_refuses_leaves_nothing(tmp_path, monkeypatch, reason):
    """Its folder and those above it are gone, and the command with another setting runs."""
    with monkeypatch.context() as patch:
        patch.setattr(handshake.Roster, "gather", refused(reason))
        with pytest.raises(type(reason), match=str(reason)):
            run_small(small_experiment(tmp_path / "out"))
    assert not list((tmp_path / "out").iterdir())
    folder, _ = run_small(small_experiment(tmp_path / "out", train={"rounds": 1}))
    assert (folder / "summary.csv").is_file()


def test_the_site_of_a_client_may_refuse(tmp_path):
    """An error reply of a node in the handshake, as a deployed site with too few images sends it."""

    def tamper(message, reply):
        return Message(Error(code=2, reason="user error: client 'rot0' has 0 images"), reply_to=message)

    with pytest.raises(UserError, match="client 'rot0' has 0 images"):
        run_small(small_experiment(tmp_path / "out"), tamper=tamper)
    assert not list((tmp_path / "out").iterdir())


def test_records_and_folders_of_others_stay(tmp_path, monkeypatch):
    """What an earlier attempt or another program wrote is not removed, nor a folder with a record."""
    experiment = small_experiment(tmp_path)
    folder = tmp_path / "small" / "fedavg" / "rot45" / "seed0"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    monkeypatch.setattr(handshake.Roster, "gather", refused(UserError("no")))
    for _ in range(2):
        with pytest.raises(UserError):
            run_small(experiment)
        assert [file.name for file in folder.iterdir()] == ["notes.txt"]
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt):
        run_small(experiment, Interrupt(after_round=1))
    monkeypatch.setattr(handshake.Roster, "gather", refused(UserError("no")))
    with pytest.raises(UserError):
        run_small(experiment)
    assert load_checkpoint(folder / "checkpoint").round == 1
    assert {"experiment.toml", "environment.json", "rounds.csv", "notes.txt"} <= {
        file.name for file in folder.iterdir()
    }
    with pytest.raises(UserError, match="holds a run with other settings"):
        run_small(small_experiment(tmp_path, train={"rounds": 9}))
    assert load_checkpoint(folder / "checkpoint").round == 1


def test_a_private_round_that_began_is_kept(tmp_path):
    """Its guarantee counts every round that was begun, also of an attempt that failed in the first."""
    folder = tmp_path / "run"
    (folder / "checkpoint").mkdir(parents=True)

    def attempt():
        with leftovers.nothing_left(folder):
            (folder / "experiment.toml").write_text("")
            (folder / "checkpoint" / "begun").write_text("1")
            raise UserError("no")

    with pytest.raises(UserError):
        attempt()
    assert (folder / "checkpoint" / "begun").is_file()
    assert (folder / "experiment.toml").is_file()
