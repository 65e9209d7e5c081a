"""`fedsim deploy check` without a network: what a site answers, and what the operator makes of the answers."""

import json
import platform
import re
from io import StringIO

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedsim.deploy import check_app
from fedsim.deploy.check import judge, refusal, table, with_names
from fedsim.deploy.check_app import answer, installed_versions, lacking
from fedsim.deploy.federation import read_federation
from fedsim.flower.identity import assume_identity
from fedsim.settings.experiment import from_table, read_experiment

DOMAINS = ["rot0", "rot15", "rot30", "rot45"]


@pytest.fixture
def federation(federation_file):
    """Three sources and a target."""
    return read_federation(federation_file)


@pytest.fixture
def experiment():
    """Digits with the federation's domains, rot45 unseen."""
    return from_table({"name": "small", "data": {"dataset": "digits", "domains": DOMAINS}, "run": {"target": "rot45"}})


NODES = {"alpha": 11, "beta": 12, "gamma": 13, "delta": 14}
ONLINE = dict.fromkeys(NODES.values(), True)


def says(site, node, **changes):
    """A site's good answer, with changes."""
    return {
        **installed_versions(),
        "python": platform.python_version(),
        "node": node,
        "site": site.name,
        "domain": site.domain,
        "role": site.role,
        "device": "cpu",
        "problem": "",
        "classes": [str(digit) for digit in range(10)],
        "counts": [100] * 10,
        **changes,
    }


def answers(federation, **changes):
    """Good answers of all sites; `beta={...}` changes one."""
    return [says(site, NODES[site.name], **changes.get(site.name, {})) for site in federation.sites]


def problems(federation, experiment, online=ONLINE, nodes=NODES, said=None, **changes):
    """Problems by site, and those of no site under ""."""
    said = answers(federation, **changes) if said is None else said
    findings, missing = judge(federation, experiment, nodes, online, said)
    found = {finding.site.name: finding.problems for finding in findings if finding.problems}
    return found | ({"": missing} if missing else {})


def test_a_complete_federation_has_no_problems(federation, experiment):
    """With and without an experiment."""
    assert problems(federation, experiment) == {}
    assert problems(federation, None) == {}


def test_sites_that_are_not_there_are_named(federation, experiment):
    """Offline, unknown to the SuperLink, online since a moment."""
    found = problems(
        federation,
        experiment,
        online={12: False, 13: True, 14: True},
        said=[says(federation.site("delta"), 14)],
    )
    assert found == {
        "alpha": ["its key is not registered: call the server's start.sh"],
        "beta": ["offline: call its start.sh"],
        "gamma": ["it came online during the check: check again"],
    }


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"fedsim": "0.0.9"}, "fedsim 0.0.9 there"),
        ({"flwr": "1.40.0"}, "flwr 1.40.0 there"),
        ({"domain": "rot75"}, "its site.env says domain 'rot75', the federation 'rot15'"),
        ({"role": "target"}, "its site.env says role 'target', the federation 'source'"),
        ({"problem": "PACS photo is incomplete in /data"}, "PACS photo is incomplete in /data"),
        ({"classes": [str(digit) for digit in range(9)], "counts": [1] * 9}, "its classes differ: 9"),
        ({"classes": list("1023456789")}, "its classes differ: another order"),
        ({"counts": ["many"]}, "its answer is not valid: counts"),
    ],
)
def test_what_does_not_fit_is_named(federation, experiment, changes, problem):
    """One site's problem is that site's, and no other's."""
    found = problems(federation, experiment, beta=changes)
    assert found.keys() == {"beta"}
    assert problem in found["beta"][0]


def test_a_package_that_a_site_lacks_is_named(federation, experiment):
    """A method from outside must be installed at every site, in the operator's version."""
    assert lacking(["pytest==0.0.1", "no_such_module", "json"]) == [
        f"pytest is {pytest.__version__} there, 0.0.1 here",
        "no_such_module is missing",
    ]
    assert lacking([f"pytest=={pytest.__version__}", "no-such-package==1"]) == ["no-such-package==1 is missing"]
    found = problems(federation, experiment, beta={"lacking": ["mymethods==1.2 is missing"]})
    assert found == {"beta": ["mymethods==1.2 is missing: the experiment's method comes from outside, install it"]}


def test_a_client_without_a_site_is_named(federation):
    """The experiment trains on rot60 too."""
    experiment = from_table({"data": {"domains": [*DOMAINS, "rot60"]}, "run": {"target": "rot45"}})
    assert problems(federation, experiment) == {"": ["no site holds 'rot60', which the experiment trains on"]}


def test_a_target_site_does_not_stand_in_for_a_source_site(federation):
    """delta holds rot45 but never trains."""
    experiment = from_table({"data": {"domains": DOMAINS}, "run": {"target": "rot0"}})
    assert problems(federation, experiment) == {"": ["no site holds 'rot45', which the experiment trains on"]}


def test_trouble_of_a_site_that_takes_no_part_is_a_note(federation):
    """alpha holds the unseen domain here."""
    experiment = from_table({"data": {"domains": DOMAINS[:3]}, "run": {"target": "rot0"}})
    findings, missing = judge(federation, experiment, NODES, ONLINE, answers(federation, alpha={"problem": "no disk"}))
    assert not missing
    assert findings[0].problems == []
    assert findings[0].notes == ["takes no part: the unseen domain is 'rot0'", "no disk"]


def test_other_versions_of_torch_are_a_note(federation, experiment):
    """Numbers may differ, the run works."""
    findings, _ = judge(federation, experiment, NODES, ONLINE, answers(federation, beta={"torch": "2.0.0"}))
    assert findings[1].problems == []
    assert "torch differs" in findings[1].notes[0]


def test_folder_data_takes_its_domains_from_the_federation(federation):
    """The operator's machine has no images, so classes are compared between the sites."""
    experiment = with_names(from_table({"data": {"dataset": "folder"}}), federation)
    assert experiment.data.domains == DOMAINS
    assert experiment.run.target == "rot45"
    classes = {"classes": ["cat", "dog"], "counts": [3, 4]}
    same = dict.fromkeys(NODES, classes)
    assert problems(federation, experiment, **same) == {}
    other = {**same, "gamma": {"classes": ["cat", "cow"], "counts": [3, 4]}}
    assert problems(federation, experiment, **other) == {"gamma": ["its classes differ: cow, dog"]}


def test_the_target_defaults_to_the_target_sites_domain(federation):
    """Not to the last domain of the data set."""
    assert with_names(read_experiment("digits"), federation).run.target == "rot45"


def test_the_table_shows_every_site(federation, experiment):
    """Versions, images, verdicts; brackets in messages are no markup."""
    from rich.console import Console

    said = answers(federation, beta={"problem": "no folder [/data]"})
    findings, _ = judge(federation, experiment, NODES, ONLINE | {13: False}, said)
    console = Console(width=220, record=True, file=StringIO())
    console.print(table(federation, findings, "small"))
    text = console.export_text()
    for words in (
        "alpha",
        "rot45 (target)",
        "1000",
        "in 10 classes",
        "no folder [/data]",
        "offline",
        f"flwr {installed_versions()['flwr']}",
    ):
        assert words in text


def ask(settings, **node_config):
    """What a site answers, as JSON carries it."""
    assume_identity(1)
    message = Message(RecordDict({"config": ConfigRecord({"experiment": settings})}), 7, "query.check")
    reply = answer(message, Context(1, 7, node_config, RecordDict(), {}))
    return json.loads(json.dumps(dict(reply.content.config_records["site"]), default=str))


def test_a_site_describes_itself_and_its_data(experiment):
    """Digits need no files."""
    said = ask(experiment.toml(), site="beta", domain="rot15", role="source")
    assert (said["site"], said["domain"], said["role"], said["problem"]) == ("beta", "rot15", "source", "")
    assert said["counts"] == [100] * 10
    assert said["fedsim"] == installed_versions()["fedsim"]


def test_a_site_lists_its_own_folder(tmp_path):
    """An image tree with one domain only is enough; nothing is decoded (these are no images)."""
    for name in ("cat", "dog"):
        (tmp_path / "photo" / name).mkdir(parents=True)
        (tmp_path / "photo" / name / "1.jpg").write_text("not an image")
    experiment = from_table({"data": {"dataset": "folder", "domains": ["photo", "sketch"], "root": "/nowhere"}})
    said = ask(experiment.toml(), site="a", domain="photo", role="source", **{"data-dir": str(tmp_path)})
    assert (said["classes"], said["counts"], said["problem"]) == (["cat", "dog"], [1, 1], "")
    said = ask(experiment.toml(), site="a", domain="sketch", role="source", **{"data-dir": str(tmp_path)})
    assert "sketch" in said["problem"]
    assert said["counts"] == []


def test_a_broken_site_says_what_is_broken(monkeypatch):
    """No exception leaves the app: the reason is what the operator needs."""

    def broken():
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(check_app, "device", broken)
    said = ask("", site="a", domain="rot0", role="source")
    assert said["problem"] == "ImportError: libcudart.so.12: cannot open shared object file"
    assert said["python"] == platform.python_version()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"run": {"target": "rot45"}}, ""),
        ({"run": {"target": "rot45"}, "method": {"name": "deepall"}}, "pools all source data on one machine"),
        ({"data": {"domains": [*DOMAINS, "rot75"]}}, "would take 'rot75', .* set run.target to 'rot45'"),
        ({"data": {"dataset": "folder", "domains": []}}, "the run would be refused: "),
        (
            {"run": {"target": "rot45"}, "model": {"weights": "own.pt"}},
            "every machine of a deployment reads its own file",
        ),
    ],
)
def test_what_the_run_would_refuse_is_said_by_the_check(table, said, federation, tmp_path, monkeypatch):
    """Also that it would leave out another domain than the one of the target's site."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.pt").touch()
    settings = {"dataset": "digits", "domains": DOMAINS}
    found = refusal(from_table({**table, "data": {**settings, **table.get("data", {})}}), federation)
    assert re.search(said, found) if said else not found


def test_domains_are_compared_as_in_a_run(federation):
    """Apart from upper and lower case and separators."""
    domains = {"alpha": "Art_Painting", "beta": "CARTOON", "gamma": "photo", "delta": "Sketch"}
    sites = [site.model_copy(update={"domain": domains[site.name]}) for site in federation.sites]
    spelled = federation.model_copy(update={"sites": tuple(sites)})
    pacs = from_table({"data": {"dataset": "pacs"}, "run": {"target": "sketch"}})
    classes = ["dog", "elephant", "giraffe", "guitar", "horse", "house", "person"]
    said = [says(site, NODES[site.name], classes=classes, counts=[9] * 7) for site in sites]
    findings, missing = judge(spelled, pacs, NODES, ONLINE, said)
    assert not missing
    assert [finding.notes + finding.problems for finding in findings] == [[]] * 4
