"""A run that can never start leaves nothing, so that the command with changed settings is not refused."""

import pytest
from flwr.app import Error, Message
from image_trees import write_tree
from support import Interrupt, run_small, tiny_experiment

from fedsim.common.errors import ClientFailedError, UserError
from fedsim.run import leftovers
from fedsim.run.checkpoint import load_checkpoint
from fedsim.run.plan import run_folder
from fedsim.runtime.launch import launch
from strategies.wire import handshake


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
    assert not (tmp_path / "out").exists()
    assert not (root / "cache").exists()
    assert (run("one") / "summary.csv").is_file()


def refusal(monkeypatch, reason):
    """Let the handshake, which begins after the run's folder was opened, fail."""

    def fail(*words, **more):
        raise reason

    monkeypatch.setattr(handshake.Roster, "gather", fail)


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
    folder, _ = run_small(tiny_experiment(tmp_path / "out", rounds=1))
    assert (folder / "summary.csv").is_file()


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
    with pytest.raises(KeyboardInterrupt):
        run_small(experiment, Interrupt(after_round=1))
    for changed, said in ((experiment, "no"), (tiny_experiment(tmp_path, rounds=9), "holds a run with other settings")):
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
