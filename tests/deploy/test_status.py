"""The operator's view: contacts, clocks, refusals, progress, and what a run writes into the audit log."""

import json
import os
import re
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console
from support import read_audit, run_small, small_experiment

from fedsim.common.errors import UserError
from fedsim.deploy.audit import AUDIT, Audit
from fedsim.deploy.certificates import write_site_key
from fedsim.deploy.check import Answer, Finding, add_contact, table
from fedsim.deploy.check_app import installed_versions
from fedsim.deploy.contacts import CONTACTS, Contact, Contacts
from fedsim.deploy.control import add_public_key
from fedsim.deploy.progress import Progress
from fedsim.deploy.registry import identities
from fedsim.deploy.status import ago, clock_problem, status_table


def shown(federation, now):
    console = Console(width=400, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(status_table(federation, now))
    return console.export_text()


def test_the_table_tells_who_is_there(federation):
    """Connected or silent, the clock, bytes, the run's round, the last refusal."""
    now, run = time.time(), federation.kit("server") / "run"
    run.mkdir()
    contacts = {
        "alpha": Contact("10.0.0.1", now - 7200, now - 3, 0.1, "1.41.0", 10**6, 2 * 10**6),
        "beta": Contact(
            "10.0.0.2", now - 90, now - 300, 4.0, "1.41.0", refused="its signature is wrong", refused_at=now - 9
        ),
    }
    (federation.kit("server") / CONTACTS).write_text(json.dumps({k: asdict(v) for k, v in contacts.items()}))
    progress = {"name": "fedavg on digits", "round": 3, "rounds": 9, "state": "running", "time": now - 4}
    clients = [{"client": "rot0", "status": "ok"}]
    (run / "progress.json").write_text(json.dumps({**progress, "clients": clients}))
    lines, site = {}, ""
    for line in shown(federation, now).splitlines():
        word = (line.split() or [""])[0].rstrip(":")
        site = word if word in ("alpha", "beta", "gamma", "delta") else site  # a site has several lines
        lines[site] = lines.get(site, "") + line
    assert "fedavg on digits, round 3 of 9, running (4 s ago)" in shown(federation, now)
    for word in ("connected", "2 h ", "3 s ago", "10.0.0.1", "+0.1 s", "1.0 MB", "2.0 MB", "3: ok"):
        assert word in lines["alpha"]
    for word in ("silent", "300 s ago", "+4.0 s", "its signature is wrong (9 s ago)"):
        assert word in lines["beta"].replace("5 min ago", "300 s ago")
    assert "never" in lines["gamma"]


@pytest.mark.parametrize(
    ("offset", "said"), [(0.0, ""), (2.0, ""), (3.4, "3 s ahead of"), (-59, ""), (-90, "90 s behind")]
)
def test_clocks(offset, said):
    """Said before Flower's limits are reached."""
    assert (said in clock_problem(offset)) if said else clock_problem(offset) == ""


def test_a_site_has_two_lines_in_a_terminal_of_80_columns(federation):
    """A site's name, its state and its address are what the operator looks for; what went wrong is below the table."""
    run, now = federation.kit("server") / "run", time.time()
    run.mkdir()
    contact = Contact("192.168.100.100", now - 7200, now - 3, -10.1, "1.41.0", 10**9, 10**9, "its signature is wrong")
    (federation.kit("server") / CONTACTS).write_text(json.dumps(dict.fromkeys(["alpha", "delta"], asdict(contact))))
    clients = [{"client": "rot0", "status": "its reply is not finite"}]
    progress = {"name": "fedavg", "round": 100, "rounds": 100, "state": "running", "time": now - 4, "clients": clients}
    (run / "progress.json").write_text(json.dumps(progress))
    with Path(os.devnull).open("w") as nowhere:
        console = Console(width=80, record=True, file=nowhere)
        console.print(status_table(federation, now))
        text = console.export_text(clear=False)
        findings = [
            Finding(site, True, Answer(node=1, site=site.name, **installed_versions())) for site in federation.sites
        ]
        console.print(table(federation, findings, "sites"))
    lines = [line.rstrip() for line in text.splitlines()]
    first = next(number for number, line in enumerate(lines) if line.split()[:1] == ["alpha"])
    assert [line.split()[:1] for line in lines[first : first + 3]] == [["alpha"], ["rot0"], ["beta"]]
    assert "alpha: round 100: its reply is not finite" in lines
    assert "…" not in console.export_text()
    for word in ("connected", "silent", "192.168.100.100", "1.41.0, -10.1 s", "down 1000.0 MB", "(target)"):
        assert word in text


def test_a_supernode_that_was_started_again_is_no_stranger(federation):
    """Turned away until its dead predecessor is gone, then admitted from the same address; another one stays named."""
    run = federation.kit("server") / "run"
    run.mkdir()
    contacts = Contacts(run / "contacts.json")
    for site, address in (("alpha", "10.0.0.1"), ("beta", "10.0.0.9")):
        contacts.activated(site, "10.0.0.1")
        contacts.second(site, address)
    assert "another SuperNode with its key tried to join (10.0.0.1)" in shown(federation, time.time())
    contacts.activated("alpha", "10.0.0.1")
    contacts.activated("beta", "10.0.0.1")
    text = shown(federation, time.time())
    assert re.search(r"alpha: its SuperNode was started again at \w+ \d+ [\d:]+; admitted at \w+ \d+ [\d:]+\n", text)
    assert "beta: another SuperNode with its key tried to join (10.0.0.9)" in text
    contacts.activated("alpha", "10.0.0.1")
    assert "alpha:" not in shown(federation, time.time())


def test_ago():
    assert [ago(at, 1000.0) for at in (0.0, 999.0, 700.0)] == ["never", "1 s ago", "5 min ago"]


def test_the_check_says_what_the_gate_has_seen(federation):
    """Why a site is away, a clock that is off, a second node with a key."""
    site, now = federation.sites[0], time.time()
    away, here = Finding(site, False, problems=["offline"]), Finding(site, True)
    add_contact(away, Contact(refused="the clock of this machine is 12 s ahead", refused_at=now - 60), now)
    assert away.problems[0] == "refused: the clock of this machine is 12 s ahead"
    add_contact(here, Contact(offset=4.0, double="two SuperNodes use its key", double_at=now), now)
    assert len(here.notes) == 2
    assert not here.problems


def test_a_run_leaves_a_line_per_reply(federation, tmp_path):
    """Size, norm and verdict of every reply, appended; and where the run stands."""
    kit = federation.kit("server")
    Audit(kit / AUDIT).write("admitted", site="alpha")
    run_small(small_experiment(tmp_path), Progress(str(kit / "federation.toml")))
    lines = read_audit(kit / AUDIT)
    replies = [line for line in lines if line["event"] == "reply" and line["round"] == 1]
    assert [line["event"] for line in lines[:2]] == ["admitted", "run"]
    assert {line["client"] for line in replies} == {"rot0", "rot15", "rot30"}
    assert all(line["bytes"] > 0 and line["norm"] > 0 and line["verdict"] == "ok" for line in replies)
    assert json.loads((kit / "run" / "progress.json").read_text())["state"] == "finished"


def test_refusals_do_not_fill_the_disk(tmp_path):
    """The same one once a minute, all together sixty."""
    audit = Audit(tmp_path / "audit.jsonl")
    for number in range(500):
        audit.refuse("", f"10.0.{number // 250}.{number % 250}", "this key is not registered")
        audit.refuse("", "10.9.9.9", "this key is not registered")
    assert len(read_audit(tmp_path / "audit.jsonl")) == 60


def test_keys_are_identities(federation):
    """The kit knows node -> site -> domain and role."""
    kit = federation.kit("server")
    (kit / "state" / "nodes").mkdir(parents=True)
    for node, name in ((11, "alpha"), (12, "delta")):
        key = (kit / "sites" / f"{name}.pub").read_text()
        (kit / "state" / "nodes" / f"{name}.json").write_text(json.dumps({"node": node, "key": key}))
    identify = identities(str(kit / "federation.toml"))
    assert (identify(11).site, identify(12).role, identify(13)) == ("alpha", "target", None)
    assert identify(11).serves("rot0", "source")
    assert not identify(11).serves("rot15", "source")
    assert not identify(12).serves("rot45", "source")


def test_a_key_made_at_the_site_is_taken(federation, tmp_path):
    """Once, and only a key of the right kind."""
    write_site_key("alpha", tmp_path / "key", tmp_path / "key.pub")
    with pytest.raises(UserError, match="has another key already"):
        add_public_key(federation, "alpha", tmp_path / "key.pub")
    file = federation.kit("server") / "sites" / "alpha.pub"
    file.unlink()
    add_public_key(federation, "alpha", tmp_path / "key.pub")
    assert file.read_text() == (tmp_path / "key.pub").read_text()
    with pytest.raises(UserError, match="holds no public key"):
        add_public_key(federation, "alpha", tmp_path / "key")


def test_a_full_disk_stops_neither_the_gate_nor_a_run(tmp_path, caplog):
    """/dev/full takes nothing; what could not be written is in the program's own log."""
    (tmp_path / "audit.jsonl").symlink_to("/dev/full")
    Audit(tmp_path / "audit.jsonl").write("admitted", site="alpha")
    assert "No space left" in caplog.text
    assert "alpha" in caplog.text
    (tmp_path / "contacts.new").symlink_to("/dev/full")
    Contacts(tmp_path / "contacts.json").activated("alpha")
