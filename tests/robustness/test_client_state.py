"""A client's stored state that is foreign, old or damaged is refused in one line; other clients are not affected."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from flwr.app import Error, Message
from support import Interrupt, numbers, run_small, tiny_experiment

from clients.store import ClientStore
from fedsim.common.errors import UserError
from fedsim.run.plan import run_folder
from fedsim.run.workspace import close_workspaces

VICTIM = "rot15"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "a"


def store_with(folder: Path, rounds: range, client: str = "photo", run: str = "a" * 16) -> ClientStore:
    """A store in which every round left a version."""
    store = ClientStore(folder, client, run)
    for round in rounds:
        store.open_round(round)
        store.put_number("risk", float(round))
        assert store.commit() == 1
    return store


def test_a_foreign_folder_is_refused_by_name(folder):
    store_with(folder, range(1, 3))
    others = r"a holds the state of 'photo' in run 'a+'.*use another state folder"
    for names, owner, said in (
        ({"client": "sketch"}, None, others),
        ({"run": "b" * 16}, None, others),
        ({}, "{", "unreadable owner"),
        ({}, "", "an unknown client"),
    ):
        if owner is not None:
            (folder / "owner.json").write_text(owner) if owner else (folder / "owner.json").unlink()
        with pytest.raises(UserError, match=said) as error:
            store_with(folder, range(3), **names)
        assert "\n" not in str(error.value)


def test_a_folder_that_becomes_foreign_is_noticed_by_the_second_writer(folder):
    first, second = (ClientStore(folder, "photo", run) for run in ("a", "b"))
    for store in (first, second):
        store.open_round(1)
    first.put_number("risk", 1.0)
    first.commit()
    with pytest.raises(UserError, match="in run 'a', not that of 'photo' in run 'b'"):
        second.open_round(2)


def test_a_client_without_state_leaves_no_folder(folder):
    store = ClientStore(folder, "photo", "a")
    store.open_round(5, counted=-1, saved=4)
    assert store.commit() == 0
    assert not folder.exists()


@pytest.mark.parametrize(("counted", "found"), [(4, 4.0), (3, 3.0), (None, 4.0), (-1, None)])
def test_state_of_replies_that_the_server_did_not_take_is_dropped(folder, counted, found):
    """When the reply of round 4 is late or refused, its state is removed too, in memory and on disk."""
    store = store_with(folder, range(1, 5))
    store.open_round(5, counted=counted)
    assert store.get_number("risk") == found
    assert ClientStore(folder, "photo", "a" * 16).get_number("risk") == found


def test_stale_missing_and_damaged_state_is_refused(folder, tmp_path):
    """A restored backup, an emptied folder, a store in the memory of a new process, a file without its content."""
    store = store_with(folder, range(1, 3))
    with pytest.raises(UserError, match=r"'photo' is of round 2 in .*a, but the server counts on that of round 4"):
        store.open_round(5, counted=4)
    for place in (tmp_path / "b", None):
        with pytest.raises(UserError, match=r"'photo' is missing.*of round 4"):
            ClientStore(place, "photo", "a").open_round(5, counted=4)
    (folder / "risk-000002.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"risk-000002.safetensors is not a readable state file"):
        ClientStore(folder, "photo", "a" * 16)


def test_versions_are_kept_as_long_as_a_resumed_run_may_need_them(folder):
    """The newest version of a saved round, the one before this round and this one are kept."""
    store = ClientStore(folder, "photo", "a")
    for round, saved in ((1, -1), (2, -1), (3, -1), (4, 3), (5, 3), (6, 3), (9, 8)):
        store.open_round(round, saved=saved)
        store.put("risk", {"value": torch.tensor(float(round))})
        store.commit()
        kept = sorted(int(path.stem[-6:]) for path in folder.glob("risk-*"))
        assert kept == {1: [1], 2: [1, 2], 3: [2, 3], 4: [3, 4], 5: [3, 4, 5], 6: [3, 5, 6], 9: [6, 9]}[round]


def fedbn(output, rounds=3, **run):
    return tiny_experiment(output, "fedbn", rounds, run=run)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an unbroken run."""
    return run_small(fedbn(tmp_path_factory.mktemp("whole")))[0]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The output of a run that was stopped after round 2."""
    return interrupted(fedbn(tmp_path_factory.mktemp("stopped")), 2)


def interrupted(experiment, after_round: int) -> Path:
    with pytest.raises(KeyboardInterrupt):
        run_small(experiment, Interrupt(after_round))
    close_workspaces()  # a run is resumed in a new process
    return Path(experiment.run.output)


@pytest.fixture
def output(stopped, tmp_path):
    """A copy of that output, in another place."""
    return shutil.copytree(stopped, tmp_path / "moved")


def state_of(output) -> Path:
    return run_folder(fedbn(output)) / "state" / VICTIM


@pytest.mark.parametrize("every", [1, 2])
def test_a_run_that_is_moved_resumes_with_the_right_state(whole, output, tmp_path, every):
    """Also with rare checkpoints and a longer timeout: rounds are repeated from the state that the clients had then."""
    if every == 2:
        output = interrupted(fedbn(tmp_path / "rare", checkpoint_every=2), 3)
    resumed, _ = run_small(fedbn(output, checkpoint_every=every, timeout=7200.0))
    for file in ("clients.csv", "rounds.csv"):
        assert numbers(resumed / file).equals(numbers(whole / file))


def restore_backup(state):
    for file in state.glob("personal-*"):
        file.rename(state / "personal-000001.safetensors")


def exchange_kits(state):
    shutil.rmtree(state)
    shutil.copytree(state.parent / "rot0", state)
    assert json.loads((state / "owner.json").read_text())["client"] == "rot0"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (restore_backup, f"client {VICTIM}: the state of client '{VICTIM}' is of round 1 in .*round 2"),
        (exchange_kits, "rot15 holds the state of 'rot0'"),
    ],
)
def test_another_state_stops_the_run_in_one_line(output, change, said):
    change(state_of(output))
    with pytest.raises(UserError, match=said) as error:
        run_small(fedbn(output))
    assert "\n" not in str(error.value)


def statuses(folder):
    return numbers(folder / "clients.csv").query("client == @VICTIM").set_index("round")["status"]


def test_an_emptied_folder_loses_one_client_when_asked(output):
    """The other clients go on, and every round records why this one does not."""
    shutil.rmtree(state_of(output))
    folder, _ = run_small(fedbn(output, on_client_failure="continue"))
    assert list(statuses(folder).loc[:2]) == ["ok"] * 2
    assert re.search("is missing in .* the server counts on that of round 2", statuses(folder).loc[3])
    assert numbers(folder / "rounds.csv")["clients"].iloc[3] == 2


def test_what_a_refused_reply_left_behind_is_no_obstacle(tmp_path):
    """The client has trained and stored its state, but the server refused the reply: the run continues to its end."""

    def lose(message, reply):
        config = message.content.config_records["config"]
        hit = message.metadata.message_type == "train" and (config["client"], config["round"]) == (VICTIM, 2)
        return Message(Error(2, "lost on the way"), reply_to=message) if hit else reply

    folder, _ = run_small(fedbn(tmp_path, on_client_failure="continue"), tamper=lose)
    assert list(statuses(folder)) == ["ok", "error 2: lost on the way", "ok"]
    assert (folder / "last.safetensors").is_file()
