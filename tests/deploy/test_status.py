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

from fedsim.commands import runs as progress
from fedsim.common import console
from fedsim.common.errors import UserError, printable
from fedsim.common.exit_codes import complain
from fedsim.deploy.audit import AUDIT, Audit
from fedsim.deploy.check import Answer, Finding, add_contact, table
from fedsim.deploy.check_app import installed_versions
from fedsim.deploy.contacts import CONTACTS, Contact, Contacts
from fedsim.deploy.progress import Progress
from fedsim.deploy.status import ago, clock_problem, status_table
from fedsim.deploy.supernode import ContactFile


@pytest.fixture
def kit(federation):
    return register(federation)


@pytest.mark.parametrize("width", [400, 80])
def test_the_table_tells_who_is_there(federation, kit, width):
    """In a terminal of 80 columns a site has two lines; what went wrong is below the table."""
    now = time.time()
    alpha = Contact("192.168.100.100", now - 7200, now - 3, -10.1, "1.41.0", 10**6, 10**9)
    beta = Contact("10.0.0.2", now - 90, now - 300, 4.0, "1.41.0", refused="its signature is wrong", refused_at=now - 9)
    contacts = {"alpha": asdict(alpha), "beta": asdict(beta)}
    (kit / CONTACTS).write_text(json.dumps(contacts))
    clients = [{"client": "rot0", "status": "its reply is not finite"}]
    progress = {"name": "fedavg on digits", "round": 3, "rounds": 9, "state": "running", "time": now - 4}
    (kit / "run" / "progress.json").write_text(json.dumps({**progress, "clients": clients}))
    shown, lines, site = text_of(status_table(federation, now), width), {}, ""
    for line in shown.splitlines():
        word = (line.split() or [""])[0].rstrip(":")
        site = word if word in ("alpha", "beta", "gamma", "delta") else site  # a site has several lines
        lines[site] = lines.get(site, "") + line
    assert "fedavg on digits, round 3 of 9, running (4 s ago)" in shown
    for word in ("connected", "2 h ", "3 s ago", "192.168.100.100", "-10.1 s", "1.0 MB", "1000.0 MB", "not finite"):
        assert word in lines["alpha"]
    for word in ("silent", "5 min ago", "+4.0 s", "its signature is wrong (9 s ago)"):
        assert word in lines["beta"]
    assert "never" in lines["gamma"]
    assert "alpha: round 3: its reply is not finite" in [line.rstrip() for line in shown.splitlines()]
    sites = [Finding(site, True, Answer(node=1, site=site.name, **installed_versions())) for site in federation.sites]
    assert "…" not in shown + text_of(table(federation, sites, "sites"), width)


def test_a_site_has_the_status_of_its_client_however_its_domain_is_spelled(federation, kit):
    """A site may act as a client whose name differs in case and separators alone (`Member.serves`)."""
    progress = {"name": "fedavg", "round": 3, "rounds": 9, "state": "running", "time": time.time()}
    clients = [{"client": "Rot_0", "status": "its reply is not finite"}]
    (kit / "run" / "progress.json").write_text(json.dumps({**progress, "clients": clients}))
    assert "alpha: round 3: its reply is not finite" in text_of(status_table(federation), 400)


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


def test_clocks_are_said_before_flowers_limits_and_times_as_people_say_them(federation, kit):
    for offset, said in ((0.0, ""), (2.0, ""), (3.4, "3 s ahead of"), (-59, ""), (-90, "90 s behind")):
        assert (said in clock_problem(offset)) if said else clock_problem(offset) == ""
    assert [ago(at, 1000.0) for at in (0.0, 999.0, 700.0)] == ["never", "1 s ago", "5 min ago"]
    assert ago(4600.0, 1000.0).startswith("in the future")
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
    folder, _ = run_small(tiny_experiment(tmp_path, rounds=1), Progress(str(kit / "federation.toml"), "7"))
    assert json.loads((folder / "deployment.json").read_text())["run"] == "7"  # the command may have been killed
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
    running = Progress(str(kit / "federation.toml"), "7")
    running.progress = {"round": 1}
    running.on_end({})


@pytest.mark.parametrize(
    ("file", "contents"),
    [("contacts.json", ["[]", '{"alpha": {"last": "x"}}']), ("progress.json", ["{", '{"name": "x"}'])],
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
