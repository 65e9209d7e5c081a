"""Odd answers of sites, damaged files, full disks, and odd names on the operator's and the site's machine."""

import json
import os
import platform
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from conftest import TOML
from rich.console import Console
from test_gate import NODES, World

from fedsim.commands import progress
from fedsim.common import console
from fedsim.common.edge import complain
from fedsim.common.errors import UserError, printable
from fedsim.deploy import warm_client
from fedsim.deploy.certificates import write_site_key
from fedsim.deploy.check import judge, table
from fedsim.deploy.check_app import installed_versions
from fedsim.deploy.contacts import CONTACTS, Contacts, read_contacts
from fedsim.deploy.control import add_public_key
from fedsim.deploy.federation import read_federation
from fedsim.deploy.progress import Progress
from fedsim.deploy.renewal import renew
from fedsim.deploy.status import ago, status_table
from fedsim.deploy.supernode import ContactFile
from strategies.wire.membership import impostor

SITES = ("alpha", "beta", "gamma", "delta")


@pytest.fixture
def run_folder(federation):
    """The folder in the server's kit in which the gate and the run write."""
    folder = federation.kit("server") / "run"
    folder.mkdir()
    return folder


def text_of(shown):
    paper = Console(width=400, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    paper.print(shown)
    return paper.export_text()


# --- what sites say ---------------------------------------------------------------------------------------------------


def found(federation, **changes):
    """(the problems of alpha, the table) when alpha's answer has these changes; None takes a key out."""
    nodes = {site: number for number, site in enumerate(SITES)}
    own = {**installed_versions(), "python": platform.python_version(), "device": "cpu", "problem": ""}
    answers = [
        {**own, "node": nodes[s.name], "site": s.name, "domain": s.domain, "role": s.role} for s in federation.sites
    ]
    answers[0] = {key: value for key, value in {**answers[0], **changes}.items() if value is not None}
    findings, _ = judge(federation, None, nodes, dict.fromkeys(nodes.values(), True), answers)
    return findings[0].problems, text_of(table(federation, findings, "sites"))


@pytest.mark.parametrize("field", ["device", "torch", "problem"])
def test_markup_and_escape_codes_in_an_answer_are_shown_as_they_are(federation, field):
    """Rich would take `[/x]` for markup and raise; a terminal would obey the escape codes."""
    _, shown = found(federation, **{field: "[/x]\x1b[2J\x07 well"})
    assert "[/x][2J well" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"site": ""}, "its answer is empty"),
        ({"site": None, "domain": None, "problem": None}, "its answer is empty"),
        ({"site": "beta"}, "says SITE='beta', and its key is that of 'alpha'"),
        ({"problem": " "}, "no reason"),
        ({"classes": ["a"], "counts": [-5]}, "its answer is not valid: counts"),
    ],
)
def test_an_answer_that_says_nothing_or_names_another_site_is_a_problem(federation, changes, said):
    problems, shown = found(federation, **changes)
    assert len(problems) == 1
    assert said in problems[0]
    assert said in shown


def test_the_status_shows_what_sites_sent_as_it_is(federation, run_folder):
    contacts = Contacts(run_folder / "contacts.json")
    contacts.seen("alpha", "10.0.0.1", "pull-messages", 0.0, "[/red]")
    contacts.refused("alpha", "a [/x] request\x1b[2J is too large")
    shown = text_of(status_table(federation))
    assert "[/red]" in shown
    assert "a [/x] request[2J is too large" in shown


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(("contacts.json", bad) for bad in ("[]", "{", '{"alpha": 3}', '{"alpha": {"last": "x"}}')),
        *(("progress.json", bad) for bad in ("[]", "{", '{"name": "x"}')),
    ],
)
def test_a_damaged_file_is_one_line(federation, run_folder, file, content):
    (run_folder / file).write_text(content)
    with pytest.raises(UserError, match=f"{file} is damaged; remove it"):
        status_table(federation)
    assert Contacts(run_folder / "contacts.json").sites == {}  # the gate starts all the same


def test_no_escape_code_reaches_the_terminal(capsys):
    """Neither in an error with a client's traceback nor in a line or a note; accents and line ends stay."""
    complain("Traceback\n\x1b[2J\x1b]0;x\x07 all is \u202ewéll\t!\r\n end", 1)
    assert capsys.readouterr().err == "fedsim: Traceback\n[2J]0;x all is wéll !\n end\n"
    console.say("a \x1b[2Jline")
    bar = progress.ProgressBar()
    bar.note("client a: \x1b[2Jfine")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("a [2Jline\n", "client a: [2Jfine\n")
    assert printable("a\udcffb") == "a\udcffb"  # a name that is not UTF-8, which is written as an escape


def test_a_long_name_is_cut_in_messages():
    who, why = impostor(13, "x" * 3_000_000, "source", lambda node: None)
    assert len(who) < 200
    member = read_member()
    assert all(len(text) < 500 for text in impostor(13, "x" * 3_000_000, "y" * 3_000_000, lambda node: member))
    assert why


def read_member():
    """A registered site that serves nobody."""

    class Member:
        site, domain, role = "alpha", "rot0", "source"

        def serves(self, client, role):
            return False

    return Member()


# --- files and disks --------------------------------------------------------------------------------------------------


def test_a_full_disk_ends_neither_the_polling_nor_the_run(federation, tmp_path, run_folder, monkeypatch):
    """The contact file keeps its time, although nothing can be written into it."""
    (tmp_path / "contact").symlink_to("/dev/full")
    ContactFile(tmp_path / "contact").note("working")
    file = tmp_path / "kept"
    file.write_text("polling\n")
    os.utime(file, (1, 1))
    monkeypatch.setattr(Path, "write_text", full)
    ContactFile(file).note("working")
    assert file.stat().st_mtime > 1
    monkeypatch.setattr("fedsim.deploy.progress.atomic_write", full)
    progress = Progress(str(federation.kit("server") / "federation.toml"))
    progress.known = {"round": 1}
    progress.on_end({})


def full(*words, **named):
    raise OSError(28, "No space left on device")


def test_a_broken_federation_file_keeps_the_sites_that_were_known(federation, run_folder, caplog):
    """While the operator edits it, the gate answers; then the new file counts."""
    kit = federation.kit("server")
    (kit / "state" / "nodes").mkdir(parents=True)
    for site, node in NODES.items():
        record = {"node": node, "key": (kit / "sites" / f"{site}.pub").read_text()}
        (kit / "state" / "nodes" / f"{site}.json").write_text(json.dumps(record))
    world, file = World(federation, kit), kit / "federation.toml"
    good = file.read_text()
    assert world.ask()[0] == 200
    for text, status in ((good + "\n[[sites]\n", 200), (None, 200), (good.replace('"alpha"', '"omega"'), 401)):
        file.unlink() if text is None else file.write_text(text)
        os.utime(kit, (time.time(), time.time()))
        world.gate.registry._looked -= 2  # seconds
        assert world.ask()[0] == status
    assert "not valid TOML" in caplog.text


# --- names and numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["with space", "it's", "dollar $HOME", "back`id`", 'quote"d', "back\\slash"])
def test_the_program_of_the_client_process_runs_in_any_folder(tmp_path, monkeypatch, name):
    folder = tmp_path / name
    (folder / "run" / "bin").mkdir(parents=True)
    monkeypatch.setattr(warm_client.sys, "executable", "/bin/echo")
    warm_client.write_program(folder, folder)
    done = subprocess.run(
        [folder / "run" / "bin" / "flwr-clientapp", "task"], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith(f"{folder} {folder}/run/bin task\n")


@pytest.mark.parametrize("name", ["it's", "dollar $HOME", "back`id`", 'quote"d', "back\\slash", "two\nlines"])
@pytest.mark.parametrize("place", ["kit", "DATA_DIR", "STATE_DIR"])
def test_a_folder_that_flower_cannot_take_is_refused_by_start(federation, name, place):
    """Otherwise the node config ends there, and what follows (the site's privacy) is left out."""
    kit = federation.kit("alpha")
    if place == "kit":
        kit = kit.rename(kit.with_name(name))
    else:
        with (kit / "site.env").open("a") as file:
            file.write(f"{place}={warm_client.shlex.quote('/data/' + name)}\n")
    done = subprocess.run([kit / "start.sh", "--unit"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "which Flower cannot take" in done.stderr
    assert not done.stdout


def test_start_takes_other_names(federation):
    kit = federation.kit("alpha")
    with (kit / "site.env").open("a") as file:
        file.write("DATA_DIR='/data/of [beta] 50% ümlaut'\n")
    done = subprocess.run([kit / "start.sh", "--unit"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_contact_in_the_future_is_no_connection(federation):
    """The clock was set back after it: neither start.sh nor the status table calls the site connected."""
    kit = federation.kit("alpha")
    (kit / "run").mkdir()
    (kit / ".venv" / "bin").mkdir(parents=True)
    for tool in ("fedsim", "flower-supernode"):
        (kit / ".venv" / "bin" / tool).symlink_to("/bin/true")
    (kit / "run" / "contact").touch()
    os.utime(kit / "run" / "contact", (time.time() + 3600,) * 2)
    done = subprocess.run(["flock", "run/lock", "./start.sh"], cwd=kit, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "in the future: this machine's clock was set back" in done.stderr
    assert ago(4600.0, 1000.0).startswith("in the future")
    contacts = Contacts(federation.kit("server") / CONTACTS)
    contacts.file.parent.mkdir()
    contacts.seen("alpha", "10.0.0.1", "pull-messages", 0.0, "1.41.0")
    assert "connected" not in text_of(status_table(federation, time.time() - 3600))
    assert read_contacts(contacts.file)["alpha"].address == "10.0.0.1"


def test_the_key_of_another_site_is_not_written(federation, tmp_path):
    """The SuperLink takes a key once; the server's start.sh would fail from then on."""
    sites = federation.kit("server") / "sites"
    (sites / "beta.pub").unlink()
    copy = tmp_path / "key.pub"
    copy.write_text((sites / "alpha.pub").read_text().replace("alpha", "from a mail"))
    with pytest.raises(UserError, match="holds the key of site 'alpha'; site 'beta' needs one of its own"):
        add_public_key(federation, "beta", copy)
    assert not (sites / "beta.pub").exists()
    write_site_key("beta", tmp_path / "own", tmp_path / "own.pub")
    add_public_key(federation, "beta", tmp_path / "own.pub")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"rot15"', '"ROT0"', "two sites have the domain 'rot0'"),
        *(('name = "demo"', f'name = "demo"\ncontrol = "{bad}"', "with a port from 1 to 65535")
          for bad in ("127.0.0.1:99999", "127.0.0.1:0", "a b;c:1", ":9093", "127.0.0.1", "::1:9093x", "[x]:1")),
    ],
)  # fmt: skip
def test_domains_and_control_addresses(tmp_path, old, new, said):
    file = tmp_path / "federation.toml"
    file.write_text(TOML.replace(old, new, 1))
    with pytest.raises(UserError, match=said):
        read_federation(file)
    for good in ("localhost:1", "[::1]:9093", "0.0.0.0:65535"):
        file.write_text(TOML.replace('name = "demo"', f'name = "demo"\ncontrol = "{good}"', 1))
        assert read_federation(file).control_address == good


@pytest.mark.parametrize("days", [-1, 3651, 3_000_000, 99_999_999])
def test_days_out_of_range_are_one_line(federation, days):
    with pytest.raises(UserError, match=f"--days {days}: a certificate is valid for 1 to 3650 days"):
        renew(federation, days)


def test_days_that_the_ca_cuts_are_said(federation, monkeypatch):
    from typer.testing import CliRunner

    from fedsim.deploy.cli import app

    def answer(days):
        monkeypatch.setattr("fedsim.deploy.renewal.renew", lambda *words: datetime.now(UTC) + timedelta(days=days))
        file = federation.kit("server") / "federation.toml"
        return CliRunner().invoke(app, ["renew", str(file), "--days", "300"]).output

    assert "because the CA's certificate ends then" in " ".join(answer(200).split())
    assert "CA" not in answer(300)
