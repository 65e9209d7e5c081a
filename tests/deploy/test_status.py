"""The operator's view: contacts, clocks, refusals, progress, what a run writes into the audit log; full disks."""

import json
import os
import re
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from demo import register, text_of
from support import read_audit, run_small, tiny_experiment

from fedsim.commands import progress
from fedsim.common import console
from fedsim.common.edge import complain
from fedsim.common.errors import UserError, printable
from fedsim.deploy.audit import AUDIT, Audit
from fedsim.deploy.check import Answer, Finding, add_contact, table
from fedsim.deploy.check_app import installed_versions
from fedsim.deploy.contacts import CONTACTS, Contact, Contacts
from fedsim.deploy.progress import Progress
from fedsim.deploy.status import ago, clock_problem, status_table
from fedsim.deploy.supernode import ContactFile
from strategies.wire.membership import impostor


@pytest.fixture
def kit(federation):
    return register(federation)


def shown_of(federation, kit, now, width, contacts, name, round, rounds, status):
    """The table after these contacts, with a run under way whose client rot0 has that status."""
    (kit / CONTACTS).write_text(json.dumps({site: asdict(contact) for site, contact in contacts.items()}))
    state = {"state": "running", "time": now - 4, "clients": [{"client": "rot0", "status": status}]}
    progress = {"name": name, "round": round, "rounds": rounds, **state}
    (kit / "run" / "progress.json").write_text(json.dumps(progress))
    return text_of(status_table(federation, now), width)


def test_the_table_tells_who_is_there(federation, kit):
    now = time.time()
    alpha = Contact("10.0.0.1", now - 7200, now - 3, 0.1, "1.41.0", 10**6, 2 * 10**6)
    beta = Contact("10.0.0.2", now - 90, now - 300, 4.0, "1.41.0", refused="its signature is wrong", refused_at=now - 9)
    contacts, lines, site = {"alpha": alpha, "beta": beta}, {}, ""
    shown = shown_of(federation, kit, now, 400, contacts, "fedavg on digits", 3, 9, "ok")
    for line in shown.splitlines():
        word = (line.split() or [""])[0].rstrip(":")
        site = word if word in ("alpha", "beta", "gamma", "delta") else site  # a site has several lines
        lines[site] = lines.get(site, "") + line
    assert "fedavg on digits, round 3 of 9, running (4 s ago)" in shown
    for word in ("connected", "2 h ", "3 s ago", "10.0.0.1", "+0.1 s", "1.0 MB", "2.0 MB", "3: ok"):
        assert word in lines["alpha"]
    for word in ("silent", "300 s ago", "+4.0 s", "its signature is wrong (9 s ago)"):
        assert word in lines["beta"].replace("5 min ago", "300 s ago")
    assert "never" in lines["gamma"]


def test_a_site_has_two_lines_in_a_terminal_of_80_columns(federation, kit):
    """A site's name, its state and its address are what the operator looks for; what went wrong is below the table."""
    now = time.time()
    contact = Contact("192.168.100.100", now - 7200, now - 3, -10.1, "1.41.0", 10**9, 10**9, "its signature is wrong")
    contacts = dict.fromkeys(("alpha", "delta"), contact)
    text = shown_of(federation, kit, now, 80, contacts, "fedavg", 100, 100, "its reply is not finite")
    lines = [line.rstrip() for line in text.splitlines()]
    first = next(number for number, line in enumerate(lines) if line.split()[:1] == ["alpha"])
    assert [line.split()[:1] for line in lines[first : first + 3]] == [["alpha"], ["rot0"], ["beta"]]
    assert "alpha: round 100: its reply is not finite" in lines
    sites = [Finding(site, True, Answer(node=1, site=site.name, **installed_versions())) for site in federation.sites]
    assert "…" not in text + text_of(table(federation, sites, "sites"), 80)
    for word in ("connected", "silent", "192.168.100.100", "1.41.0, -10.1 s", "down 1000.0 MB", "(target)"):
        assert word in text


def test_a_supernode_that_was_started_again_is_no_stranger(federation, kit):
    """Turned away until its dead predecessor is gone, then admitted from the same address; another one stays named."""
    contacts = Contacts(kit / CONTACTS)
    for site, address in (("alpha", "10.0.0.1"), ("beta", "10.0.0.9")):
        contacts.activated(site, "10.0.0.1")
        contacts.second(site, address)
    assert "another SuperNode with its key tried to join (10.0.0.1)" in text_of(status_table(federation))
    contacts.activated("alpha", "10.0.0.1")
    contacts.activated("beta", "10.0.0.1")
    text = text_of(status_table(federation))
    assert re.search(r"alpha: its SuperNode was started again at \w+ \d+ [\d:]+; admitted at \w+ \d+ [\d:]+\n", text)
    assert "beta: another SuperNode with its key tried to join (10.0.0.9)" in text
    contacts.activated("alpha", "10.0.0.1")
    assert "alpha:" not in text_of(status_table(federation))


@pytest.mark.parametrize(
    ("offset", "said"), [(0.0, ""), (2.0, ""), (3.4, "3 s ahead of"), (-59, ""), (-90, "90 s behind")]
)
def test_clocks_are_said_before_flowers_limits(offset, said):
    assert (said in clock_problem(offset)) if said else clock_problem(offset) == ""


def test_times_are_said_as_people_say_them():
    assert [ago(at, 1000.0) for at in (0.0, 999.0, 700.0)] == ["never", "1 s ago", "5 min ago"]
    assert ago(4600.0, 1000.0).startswith("in the future")


def test_a_contact_in_the_future_is_no_connection(federation, kit):
    Contacts(kit / CONTACTS).seen("alpha", "10.0.0.1", "pull-messages", 0.0, "1.41.0")
    assert "connected" in text_of(status_table(federation))
    assert "connected" not in text_of(status_table(federation, time.time() - 3600))


def test_the_check_says_what_the_gate_has_seen(federation):
    site, now = federation.sites[0], time.time()
    away, here = Finding(site, False, problems=["offline"]), Finding(site, True)
    add_contact(away, Contact(refused="the clock of this machine is 12 s ahead", refused_at=now - 60), now)
    assert away.problems[0] == "refused: the clock of this machine is 12 s ahead"
    add_contact(here, Contact(offset=4.0, double="two SuperNodes use its key", double_at=now), now)
    assert len(here.notes) == 2
    assert not here.problems


def test_a_run_leaves_a_line_per_reply(kit, tmp_path):
    """Size, norm and verdict of every reply, appended; and where the run stands."""
    Audit(kit / AUDIT).write("admitted", site="alpha")
    run_small(tiny_experiment(tmp_path, rounds=1), Progress(str(kit / "federation.toml")))
    lines = read_audit(kit / AUDIT)
    replies = [line for line in lines if line["event"] == "reply" and line["round"] == 1]
    assert [line["event"] for line in lines[:2]] == ["admitted", "run"]
    assert {line["client"] for line in replies} == {"rot0", "rot15", "rot30"}
    assert all(line["bytes"] > 0 and line["norm"] > 0 and line["verdict"] == "ok" for line in replies)
    assert json.loads((kit / "run" / "progress.json").read_text())["state"] == "finished"


def test_refusals_do_not_fill_the_disk(tmp_path):
    """The same one once a minute, all together sixty."""
    audit = Audit(tmp_path / "audit.jsonl")
    for number in range(80):
        audit.refuse("", f"10.0.0.{number}", "this key is not registered")
        audit.refuse("", "10.9.9.9", "this key is not registered")
    assert len(read_audit(tmp_path / "audit.jsonl")) == 60


def full(*words, **named):
    raise OSError(28, "No space left on device")


def test_a_full_disk_ends_neither_gate_nor_polling_nor_run(kit, tmp_path, monkeypatch, caplog):
    """/dev/full takes nothing; what could not be written is in the log, and the contact file keeps its time."""
    for name in ("audit.jsonl", "contacts.new", "contact"):
        (tmp_path / name).symlink_to("/dev/full")
    Audit(tmp_path / "audit.jsonl").write("admitted", site="alpha")
    assert "No space left" in caplog.text
    assert "alpha" in caplog.text
    Contacts(tmp_path / "contacts.json").activated("alpha")
    ContactFile(tmp_path / "contact").note("working")
    kept = tmp_path / "kept"
    kept.write_text("polling\n")
    os.utime(kept, (1, 1))
    monkeypatch.setattr(Path, "write_text", full)
    ContactFile(kept).note("working")
    assert kept.stat().st_mtime > 1
    monkeypatch.setattr("fedsim.deploy.progress.atomic_write", full)
    running = Progress(str(kit / "federation.toml"))
    running.known = {"round": 1}
    running.on_end({})


@pytest.mark.parametrize(
    ("file", "contents"),
    [
        ("contacts.json", ["[]", "{", '{"alpha": 3}', '{"alpha": {"last": "x"}}']),
        ("progress.json", ["[]", "{", '{"name": "x"}']),
    ],
)
def test_a_damaged_file_is_one_line(federation, kit, file, contents):
    for content in contents:
        (kit / "run" / file).write_text(content)
        with pytest.raises(UserError, match=f"{file} is damaged; remove it"):
            status_table(federation)
        assert Contacts(kit / CONTACTS).sites == {}  # the gate starts all the same


def test_no_markup_or_escape_code_of_a_site_reaches_the_terminal(federation, kit, capsys):
    """Neither in the table nor in an error with a client's traceback, a line or a note; accents and line ends stay."""
    contacts = Contacts(kit / CONTACTS)
    contacts.seen("alpha", "10.0.0.1", "pull-messages", 0.0, "[/red]")
    contacts.refused("alpha", "a [/x] request\x1b[2J is too large")
    shown = text_of(status_table(federation))
    assert all(words in shown for words in ("[/red]", "a [/x] request[2J is too large"))
    complain("Traceback\n\x1b[2J\x1b]0;x\x07 all is \u202ewéll\t!\r\n end", 1)
    assert capsys.readouterr().err == "fedsim: Traceback\n[2J]0;x all is wéll !\n end\n"
    console.say("a \x1b[2Jline")
    progress.ProgressBar().note("client a: \x1b[2Jfine")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("a [2Jline\n", "client a: [2Jfine\n")
    assert printable("a\udcffb") == "a\udcffb"  # a name that is not UTF-8, which is written as an escape


def test_a_long_name_is_cut_in_messages():
    class Member:
        site, domain, role = "alpha", "rot0", "source"

        def serves(self, client, role):
            return False

    who, why = impostor(13, "x" * 3_000_000, "source", lambda node: None)
    assert len(who) < 200
    assert why
    assert all(len(text) < 500 for text in impostor(13, "x" * 3_000_000, "y" * 3_000_000, lambda node: Member()))
