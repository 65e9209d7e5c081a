"""`fedsim deploy check` without a network: what a site answers, and what the operator makes of the answers."""

import json
import platform
import re

import pytest
from demo import DOMAINS, text_of
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedsim.data.findings import Finding as DataFinding
from fedsim.deploy import check_app
from fedsim.deploy.check import AWAY, Finding, add_contact, compare_sites, refusal, table, with_names
from fedsim.deploy.check_app import answer, installed_versions, lacking
from fedsim.deploy.contacts import Contact
from fedsim.flower.identity import assume_identity
from fedsim.settings.experiment import from_table, read_experiment

NODES = {"alpha": 11, "beta": 12, "gamma": 13, "delta": 14}
ONLINE = dict.fromkeys(NODES.values(), True)
DIGITS = [str(digit) for digit in range(10)]


def on(domains, target="rot45"):
    return from_table({"name": "small", "data": {"dataset": "digits", "domains": domains}, "run": {"target": target}})


EXPERIMENT = on(DOMAINS)


def says(site, changes=()):
    """A site's good answer, with changes; None takes a key out."""
    own = {"python": platform.python_version(), "node": NODES[site.name], "site": site.name, "domain": site.domain}
    data = {"role": site.role, "device": "cpu", "problem": "", "classes": DIGITS, "counts": [100] * 10}
    said = {**installed_versions(), **own, **data, **dict(changes)}
    return {key: value for key, value in said.items() if value is not None}


def compared(federation, experiment=EXPERIMENT, online=ONLINE, said=None, **changes):
    """(findings, problems by site, and those of no site under "") of good answers; `beta={...}` changes one."""
    said = [says(site, changes.get(site.name, ())) for site in federation.sites] if said is None else said
    findings, missing = compare_sites(federation, experiment, NODES, online, said)
    found = {finding.site.name: finding.problems for finding in findings if finding.problems}
    return findings, found | ({"": missing} if missing else {})


def problems(*words, **changes):
    return compared(*words, **changes)[1]


def test_sites_that_are_not_there_are_named_and_a_complete_federation_has_no_problems(federation):
    assert problems(federation) == problems(federation, None) == {}
    sites = tuple(site.model_copy(update={"domain": site.domain.upper()}) for site in federation.sites)
    findings, found = compared(federation.model_copy(update={"sites": sites}))  # in another spelling
    assert (found, [finding.notes for finding in findings]) == ({}, [[]] * 4)
    online = {12: False, 13: True, 14: True}
    assert problems(federation, online=online, said=[says(federation.site("delta"))]) == {
        "alpha": ["its key is not registered: call the server's start.sh"],
        "beta": ["offline: call its start.sh"],
        "gamma": ["it came online during the check: check again"],
    }


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"fedsim": "0.0.9"}, "fedsim 0.0.9 there"),
        ({"domain": "rot75"}, "its site.env says domain 'rot75', the federation 'rot15'"),
        ({"site": "gamma"}, "says SITE='gamma', and its key is that of 'beta'"),
        ({"problem": "PACS photo is incomplete in /data"}, "PACS photo is incomplete in /data"),
        ({"problem": "Node Unavailable"}, f"Node Unavailable{AWAY}"),
        ({"classes": DIGITS[:9], "counts": [1] * 9}, "its classes differ: 9"),
        ({"classes": list("1023456789")}, "its classes differ: another order"),
        ({"classes": ["a"], "counts": [-5]}, "its answer is not valid: counts"),
        ({"site": None, "domain": None, "problem": None}, "its answer is empty"),
        ({"lacking": ["mymethods==1.2 is missing"]}, "1.2 is missing: the experiment's method comes from outside"),
    ],
)
def test_what_does_not_fit_is_that_sites_problem_alone(federation, changes, problem):
    findings, found = compared(federation, beta=changes)
    assert [(site, len(said)) for site, said in found.items()] == [("beta", 1)]
    assert problem in found["beta"][0]
    assert problem in text_of(table(federation, findings, "small"))


GRAVE = json.dumps(DataFinding("alpha", "rot15", 8, "8 images have a fourth channel", is_grave=True).record())


def test_findings_of_a_site_are_told_and_a_grave_one_is_a_problem_until_it_is_accepted(federation):
    """As at the start of a run."""
    line = "rot15: 8 images have a fourth channel; data.accept = ['alpha'] takes the data as they are"
    assert problems(federation, beta={"findings": [GRAVE]}) == {"beta": [line]}
    findings, found = compared(federation, EXPERIMENT.replace(data={"accept": ["alpha"]}), beta={"findings": [GRAVE]})
    assert not found
    assert findings[1].notes == ["rot15: 8 images have a fourth channel"]
    assert "its answer is not valid: a finding" in problems(federation, beta={"findings": ["{}"]})["beta"][0]


def test_a_package_from_outside_is_needed_in_the_operators_version():
    here = pytest.__version__
    needed = ["pytest==0.0.1", "no_such_module", "json", f"pytest=={here}", "no-such-package==1"]
    said = [f"pytest is {here} there, 0.0.1 here", "no_such_module is missing", "no-such-package==1 is missing"]
    assert lacking(needed) == said


def test_a_client_without_a_site_is_a_problem_and_what_the_run_works_without_a_note(federation):
    """A target site does not stand in for a source."""
    for domains, target, missing in (([*DOMAINS, "rot60"], "rot45", "rot60"), (DOMAINS, "rot0", "rot45")):
        said = {"": [f"no site holds '{missing}', which the experiment trains on"]}
        assert problems(federation, on(domains, target)) == said
    findings, found = compared(
        federation, on(DOMAINS[:3], "rot0"), alpha={"problem": "no disk"}, beta={"torch": "2.0.0"}
    )
    assert not found
    assert findings[0].notes == ["takes no part: the unseen domain is 'rot0'", "no disk"]
    assert "torch differs" in findings[1].notes[0]


def test_folder_data_takes_its_domains_from_the_federation_and_classes_are_compared_between_sites(federation):
    experiment = with_names(from_table({"data": {"dataset": "folder"}}), federation)
    assert experiment.data.domains == DOMAINS
    assert experiment.run.target == with_names(read_experiment("digits"), federation).run.target == "rot45"
    same = {site: {"classes": ["cat", "dog"], "counts": [3, 4]} for site in NODES}
    assert problems(federation, experiment, **same) == {}
    other = {**same, "gamma": {"classes": ["cat", "cow"], "counts": [3, 4]}}
    assert problems(federation, experiment, **other) == {"gamma": ["its classes differ: cow, dog"]}


def test_the_table_shows_every_site_and_brackets_and_escape_codes_as_they_are(federation):
    odd = dict.fromkeys(("device", "torch", "problem"), "[/x]\x1b[2J\x07 well")
    text = text_of(table(federation, compared(federation, online=ONLINE | {13: False}, beta=odd)[0], "small"), 220)
    flower = f"flwr {installed_versions()['flwr']}"
    assert all(words in text for words in ("alpha", "rot45 (target)", "1000", "in 10 classes", "offline", flower))
    assert text.count("[/x][2J well") == 3
    assert "\x1b" not in text


def ask(settings, site="a", domain="rot0", **node_config):
    """What a site answers, as JSON carries it."""
    assume_identity(1)
    message = Message(RecordDict({"config": ConfigRecord({"experiment": settings})}), 7, "query.check")
    config = {"site": site, "domain": domain, "role": "source", **node_config}
    reply = answer(message, Context(1, 7, config, RecordDict(), {}))
    return json.loads(json.dumps(dict(reply.content.config_records["site"]), default=str))


def test_a_site_describes_itself_and_its_data_and_says_what_is_broken(tmp_path, monkeypatch):
    said, own = ask(EXPERIMENT.toml(), "beta", "rot15"), {"site": "beta", "domain": "rot15", "role": "source"}
    assert said.items() >= {**own, "problem": "", "fedsim": installed_versions()["fedsim"]}.items()
    assert said["counts"] == [100] * 10
    for name in ("cat", "dog"):  # its own folder, with one domain only; nothing is decoded
        (tmp_path / "photo" / name).mkdir(parents=True)
        (tmp_path / "photo" / name / "1.jpg").write_text("not an image")
    tree = from_table({"data": {"dataset": "folder", "domains": ["photo", "sketch"], "root": "/nowhere"}})
    said = ask(tree.toml(), domain="photo", **{"data-dir": str(tmp_path)})
    assert (said["classes"], said["counts"], said["problem"]) == (["cat", "dog"], [1, 1], "")
    said = ask(tree.toml(), domain="sketch", **{"data-dir": str(tmp_path)})
    assert "sketch" in said["problem"]

    def broken():
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(check_app, "device", broken)
    said = ask("")
    assert said["problem"] == "ImportError: libcudart.so.12: cannot open shared object file"
    assert said["python"] == platform.python_version()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"run": {"target": "rot45"}}, ""),
        ({"run": {"target": "rot45"}, "method": {"name": "deepall"}}, "pools all source data on one machine"),
        ({"data": {"domains": [*DOMAINS, "rot75"]}}, "would take 'rot75', .* set run.target to 'rot45'"),
        ({"data": {"dataset": "folder", "domains": []}}, "the run would be refused: "),
        ({"run": {"target": "rot45"}, "model": {"weights": "own.pt"}}, "every machine of a deployment reads its own"),
    ],
)
def test_what_the_run_would_refuse_is_said_by_the_check(table, said, federation, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.pt").touch()
    settings = {"dataset": "digits", "domains": DOMAINS}
    found = refusal(from_table({**table, "data": {**settings, **table.get("data", {})}}), federation)
    assert re.search(said, found) if said else not found


@pytest.mark.parametrize(("online", "problems", "first"), [
    (True, ["Node Unavailable"], "refused: the clock of this machine is 172800 s ahead"),  # it was online a moment ago
    (False, ["offline: call its start.sh"], "refused: the clock of this machine is 172800 s ahead"),
    (True, [], None),  # what was wrong is over
])  # fmt: skip
def test_the_gates_refusal_comes_before_what_flower_says_of_the_site(federation, online, problems, first):
    now = 1000.0
    finding = Finding(federation.sites[0], online, problems=list(problems))
    contact = Contact(refused="the clock of this machine is 172800 s ahead of the server's", refused_at=now - 1)
    add_contact(finding, contact, now)
    if first is None:
        assert finding.problems == []
    else:
        assert finding.problems[0].startswith(first)
