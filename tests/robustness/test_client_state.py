"""A client's stored state that is foreign, old or damaged is refused in one line; other clients are not affected."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from flwr.app import Error, Message
from safetensors.numpy import load_file
from support import Interrupt, numbers, run_small, small_experiment

from clients.store import ClientStore
from fedsim.common.errors import UserError
from fedsim.run.plan import run_folder
from fedsim.run.workspace import close_workspaces

VICTIM = "rot15"


def store_with(folder: Path, rounds: range, **names: str) -> ClientStore:
    """A store in which every round left a version."""
    store = ClientStore(folder, **{"client": "photo", "run": "a" * 16, **names})
    for round in rounds:
        store.open_round(round)
        store.put_number("risk", float(round))
        assert store.commit() == 1
    return store


def interrupted(experiment, after_round: int) -> Path:
    """The state folder of the victim in a run that was stopped."""
    with pytest.raises(KeyboardInterrupt):
        run_small(experiment, Interrupt(after_round))
    close_workspaces()  # a run is resumed in a new process
    return run_folder(experiment) / "state" / VICTIM


def test_a_foreign_folder_is_refused_by_name(tmp_path):
    """A folder of another client, another run or no owner, or with an unreadable owner: one line says what to do."""
    store_with(tmp_path / "a", range(1, 3))
    for names in ({"client": "sketch"}, {"run": "b" * 16}):
        with pytest.raises(
            UserError, match=r"a holds the state of 'photo' in run 'a+'.*use another state folder"
        ) as error:
            store_with(tmp_path / "a", range(3), **names)
        assert "\n" not in str(error.value)
    (tmp_path / "a" / "owner.json").write_text("{")
    with pytest.raises(UserError, match="unreadable owner"):
        store_with(tmp_path / "a", range(3))
    (tmp_path / "a" / "owner.json").unlink()
    with pytest.raises(UserError, match="an unknown client"):
        store_with(tmp_path / "a", range(3))


def test_a_folder_that_becomes_foreign_is_noticed(tmp_path):
    """When two runs have the same folder, the next message of the second writer is refused."""
    first, second = (ClientStore(tmp_path / "a", "photo", run) for run in ("a", "b"))
    first.open_round(1)
    second.open_round(1)
    first.put_number("risk", 1.0)
    first.commit()
    with pytest.raises(UserError, match="in run 'a', not that of 'photo' in run 'b'"):
        second.open_round(2)


def test_a_client_without_state_leaves_no_trace(tmp_path):
    """A method that stores nothing creates no folder, and the server expects no stored entries."""
    store = ClientStore(tmp_path / "a", "photo", "a")
    store.open_round(5, counted=-1, saved=4)
    assert store.commit() == 0
    assert not (tmp_path / "a").exists()
    folder, _ = run_small(small_experiment(tmp_path / "out"))
    assert not (folder / "state").exists()


@pytest.mark.parametrize(("counted", "found"), [(4, 4.0), (3, 3.0), (None, 4.0), (-1, None)])
def test_state_of_replies_that_the_server_did_not_take_is_dropped(tmp_path, counted, found):
    """When the reply of round 4 is late or refused, its state is removed too, in memory and on disk."""
    store = store_with(tmp_path / "a", range(1, 5))
    store.open_round(5, counted=counted)
    assert store.get_number("risk") == found
    assert ClientStore(tmp_path / "a", "photo", "a" * 16).get_number("risk") == found


def test_stale_and_missing_state_are_refused(tmp_path):
    """Three cases: a restored backup, an emptied folder, and a store in the memory of a new process."""
    store = store_with(tmp_path / "a", range(1, 3))
    with pytest.raises(UserError, match=r"'photo' is of round 2 in .*a, but the server counts on that of round 4"):
        store.open_round(5, counted=4)
    for folder in (tmp_path / "b", None):
        with pytest.raises(UserError, match=r"'photo' is missing.*of round 4"):
            ClientStore(folder, "photo", "a").open_round(5, counted=4)


def test_a_damaged_file_is_refused(tmp_path):
    """A power cut may leave a file without its content."""
    store_with(tmp_path / "a", range(1, 3))
    (tmp_path / "a" / "risk-000002.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"risk-000002.safetensors is not a readable state file"):
        ClientStore(tmp_path / "a", "photo", "a" * 16)


def test_versions_are_kept_as_long_as_a_resumed_run_may_need_them(tmp_path):
    """The newest version of a saved round, the one before this round and this one are kept."""
    store = ClientStore(tmp_path / "a", "photo", "a")
    for round, saved in ((1, -1), (2, -1), (3, -1), (4, 3), (5, 3), (6, 3), (9, 8)):
        store.open_round(round, saved=saved)
        store.put("risk", {"value": torch.tensor(float(round))})
        store.commit()
        kept = sorted(int(path.stem[-6:]) for path in (tmp_path / "a").glob("risk-*"))
        assert kept == {1: [1], 2: [1, 2], 3: [2, 3], 4: [3, 4], 5: [3, 4, 5], 6: [3, 5, 6], 9: [6, 9]}[round]


@pytest.fixture(scope="module")
def six_rounds(tmp_path_factory):
    """The folder of an unbroken run."""
    return run_small(small_experiment(tmp_path_factory.mktemp("whole"), "fedbn", train={"rounds": 6}))[0]


@pytest.mark.parametrize("every", [2, 3])
def test_a_run_with_rare_checkpoints_resumes_with_the_right_state(six_rounds, tmp_path, every):
    """Up to `checkpoint_every` rounds are repeated, from the state that the clients had then."""
    cut = small_experiment(tmp_path, "fedbn", train={"rounds": 6}, run={"checkpoint_every": every})
    interrupted(cut, after_round=5)
    resumed, _ = run_small(cut)
    assert numbers(resumed / "clients.csv").equals(numbers(six_rounds / "clients.csv"))
    assert numbers(resumed / "rounds.csv").equals(numbers(six_rounds / "rounds.csv"))


def test_a_restored_backup_stops_the_run_in_one_line(tmp_path):
    """The message names client, rounds and folder."""
    experiment = small_experiment(tmp_path, "gperxan", train={"rounds": 4})
    state = interrupted(experiment, after_round=3)
    for file in state.glob("personal-*"):
        file.rename(state / "personal-000001.safetensors")
    with pytest.raises(
        UserError, match=rf"client {VICTIM}: the state of client '{VICTIM}' is of round 1 in .*round 3"
    ) as e:
        run_small(experiment)
    assert "\n" not in str(e.value)


def test_an_emptied_folder_loses_one_client_when_asked(tmp_path):
    """With `continue` the other clients go on, and every round records why this one does not."""
    experiment = small_experiment(tmp_path, "fedbn", train={"rounds": 4}, run={"on_client_failure": "continue"})
    shutil.rmtree(interrupted(experiment, after_round=2))
    folder, _ = run_small(experiment)
    rows = numbers(folder / "clients.csv").query("client == @VICTIM").set_index("round")["status"]
    assert list(rows.loc[:2]) == ["ok", "ok"]
    assert rows.loc[3:].str.contains("is missing in .* the server counts on that of round 2").all()
    assert (numbers(folder / "rounds.csv")["clients"].iloc[3:] == 2).all()


def test_a_run_that_is_moved_resumes(tmp_path):
    """The identity is stored in the folder."""
    experiment = small_experiment(tmp_path / "here", "fedbn")
    interrupted(experiment, after_round=2)
    (tmp_path / "here").rename(tmp_path / "there")
    folder, _ = run_small(small_experiment(tmp_path / "there", "fedbn"))
    whole, _ = run_small(small_experiment(tmp_path / "whole", "fedbn"))
    assert numbers(folder / "rounds.csv").equals(numbers(whole / "rounds.csv"))


def test_settings_that_change_no_number_do_not_make_a_state_foreign(tmp_path):
    """For example, a run can be resumed with a longer timeout."""
    interrupted(small_experiment(tmp_path, "fedbn"), after_round=2)
    folder, _ = run_small(small_experiment(tmp_path, "fedbn", run={"timeout": 7200.0}))
    assert list(numbers(folder / "rounds.csv")["round"]) == [0, 1, 2, 3]


def test_a_copied_state_of_another_client_is_refused(tmp_path):
    """This happens when two sites exchange their kits by mistake."""
    experiment = small_experiment(tmp_path, "fedbn")
    state = interrupted(experiment, after_round=2)
    shutil.rmtree(state)
    shutil.copytree(state.parent / "rot0", state)
    assert json.loads((state / "owner.json").read_text())["client"] == "rot0"
    with pytest.raises(UserError, match="rot15 holds the state of 'rot0'"):
        run_small(experiment)


def test_what_a_refused_reply_left_behind_is_no_obstacle(tmp_path):
    """The client has trained and stored its state, but the server refused the reply: the run continues to its end."""

    def lose(message, reply):
        config = message.content.config_records["config"]
        hit = message.metadata.message_type == "train" and (config["client"], config["round"]) == (VICTIM, 2)
        return Message(Error(2, "lost on the way"), reply_to=message) if hit else reply

    experiment = small_experiment(tmp_path, "fedbn", run={"on_client_failure": "continue"})
    folder, _ = run_small(experiment, tamper=lose)
    status = numbers(folder / "clients.csv").query("client == @VICTIM")["status"]
    assert list(status) == ["ok", "error 2: lost on the way", "ok"]
    assert load_file(folder / "last.safetensors")
