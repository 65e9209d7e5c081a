"""A client's stored state that is foreign, old or damaged is refused in one line; other clients are not affected."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support import interrupt, numbers, run_small, tiny_experiment

from clients.store import ClientStore
from fedsim.common.errors import UserError
from fedsim.runs.workspace import close_workspaces

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


FOREIGN = r"^[^\n]*a holds the state of 'photo' in run 'a+'[^\n]*use another state folder[^\n]*$"


@pytest.mark.parametrize(("names", "owner", "said"), [
    ({"client": "sketch"}, None, FOREIGN), ({"run": "b" * 16}, None, FOREIGN),
    ({}, "{", "unreadable owner"), ({}, "", "an unknown client"),
])  # fmt: skip
def test_a_foreign_folder_is_refused_by_name(folder, names, owner, said):
    store_with(folder, range(1, 3))
    if owner is not None:
        (folder / "owner.json").write_text(owner) if owner else (folder / "owner.json").unlink()
    with pytest.raises(UserError, match=said):
        store_with(folder, range(3), **names)


def test_no_folder_without_state_and_versions_as_long_as_needed(folder):
    """The newest version of a saved round, the one before this round and this one are kept."""
    store = ClientStore(folder, "photo", "a")
    store.open_round(5, counted=-1, saved=4)
    assert (store.commit(), folder.exists()) == (0, False)
    store = ClientStore(folder, "photo", "a")
    for round, saved in ((1, -1), (2, -1), (3, -1), (4, 3), (5, 3), (6, 3), (9, 8)):
        store.open_round(round, saved=saved)
        store.put("risk", {"value": torch.tensor(float(round))})
        store.commit()
        kept = sorted(int(path.stem[-6:]) for path in folder.glob("risk-*"))
        assert kept == {1: [1], 2: [1, 2], 3: [2, 3], 4: [3, 4], 5: [3, 4, 5], 6: [3, 5, 6], 9: [6, 9]}[round]


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


def fedbn(output, rounds=3, **run):
    return tiny_experiment(output, "fedbn", rounds, run=run)


def test_another_state_stops_the_run_in_one_line_or_loses_one_client_when_asked(tmp_path):
    """A restored backup; then an emptied folder, without which the other clients go on."""
    folder = interrupt(fedbn(tmp_path), 2)
    close_workspaces()  # a run is resumed in a new process
    state = folder / "state" / VICTIM
    for file in state.glob("personal-*"):
        file.rename(state / "personal-000001.safetensors")
    with pytest.raises(UserError, match=f"^client {VICTIM}: the state of client '{VICTIM}' is of round 1 in .*round 2"):
        run_small(fedbn(tmp_path))
    shutil.rmtree(state)
    close_workspaces()
    folder, _ = run_small(fedbn(tmp_path, on_client_failure="continue"))
    assert list(statuses(folder).loc[:2]) == ["ok"] * 2
    assert re.search("is missing in .* the server counts on that of round 2", statuses(folder).loc[3])
    assert numbers(folder / "rounds.csv")["clients"].iloc[3] == 2


def statuses(folder):
    return numbers(folder / "clients.csv").query("client == @VICTIM").set_index("round")["status"]


def test_leftovers_of_processes_that_are_gone_are_removed(folder):
    """A process that is killed while it writes leaves its own folder; that of a process that is there stays."""
    store_with(folder, range(1, 3))
    gone = subprocess.Popen(["true"])
    gone.wait()
    for process in (gone.pid, os.getpid()):
        (folder / f".{process}.tmp").mkdir()
        (folder / f".{process}.tmp" / ".tmpAb12Cd").write_bytes(b"half of a state")
    (folder / ".notes.tmp").mkdir()
    assert ClientStore(folder, "photo", "a" * 16).get_number("risk") == 2.0
    hidden = {path.name for path in folder.glob(".*")}
    assert hidden == {f".{os.getpid()}.tmp", ".notes.tmp"}


def test_a_kill_while_the_state_is_written_leaves_nothing_once_the_store_is_opened_again(folder):
    store_with(folder, range(1, 2))
    code = (
        "import sys, torch\n"
        "from clients.store import ClientStore\n"
        f"store = ClientStore(__import__('pathlib').Path({str(folder)!r}), 'photo', {'a' * 16!r})\n"
        "store.open_round(2)\n"
        "store.put('personal', {'a': torch.zeros(50_000_000)})\n"
        "print('writes', flush=True)\n"
        "store.commit()\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    writer.stdout.readline()
    while not list(folder.glob(".*.tmp/*")) and writer.poll() is None:
        time.sleep(0.001)
    writer.kill()
    writer.wait()
    assert ClientStore(folder, "photo", "a" * 16).get_number("risk") == 1.0
    assert not list(folder.glob(".*"))


def test_an_owner_of_another_type_is_unreadable(folder):
    store_with(folder, range(1, 3))
    for text in ("[1]", "5", "[" * 100_000):
        (folder / "owner.json").write_text(text)
        with pytest.raises(UserError, match="unreadable owner"):
            store_with(folder, range(3))
