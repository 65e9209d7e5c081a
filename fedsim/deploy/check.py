"""`fedsim deploy check`: which sites are online, with which versions, and whether their data fits an experiment."""

import json
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, Json, ValidationError
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from fedsim.common.console import console
from fedsim.common.errors import UserError, printable
from fedsim.common.lists import first_few
from fedsim.data import benchmark, client_names, domain_of, resolve_target
from fedsim.data.client_data import clients_of
from fedsim.data.findings import read_findings
from fedsim.data.names import matching
from fedsim.deploy.bundles import CHECK
from fedsim.deploy.check_app import installed_versions
from fedsim.deploy.contacts import CONTACTS, Contact, read_contacts
from fedsim.deploy.control import Control, registered_nodes
from fedsim.deploy.federation import CONNECTION, Federation, Site
from fedsim.deploy.renewal import warnings
from fedsim.deploy.site_statistics import HIDDEN, ColumnNumbers, statistics_table
from fedsim.deploy.status import clock_problem
from fedsim.methods.registry import packages_of
from fedsim.runs.admission import place_on_sites
from fedsim.runs.plan import resolve
from fedsim.settings import Settings, data_root
from fedsim.settings.experiment import Experiment
from fedsim.settings.run import NO_TARGET

START_SECONDS = 180.0  # time on a busy machine until the submitted ServerApp asks the sites
POLL_SECONDS = 0.5
STATUS_SECONDS = 10.0
LONGEST_TEXT = 500  # characters of a text in a site's answer
GONE = "Node Unavailable"  # Flower's reason where a node that was online gives no sign any more
AWAY = ": the site gave no sign during the check: it is off, its connection is cut, or its clock is wrong"
REFUSED_SECONDS = 600.0  # a refusal in this time is given as the reason why a site is offline


# A text of a site, as a terminal can show it.
Text = Annotated[str, AfterValidator(lambda text: printable(text)[:LONGEST_TEXT])]


class Answer(Settings):
    """What a node reported about itself; a node that failed reports `problem` only."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=False)  # JSON has no tuples

    node: int
    site: Text = ""
    domain: Text = ""
    role: Text = ""
    fedsim: Text = ""
    flwr: Text = ""
    torch: Text = ""
    python: Text = ""
    device: Text = ""
    problem: Text = ""
    classes: tuple[Text, ...] = ()
    counts: tuple[Annotated[int, Field(ge=HIDDEN)], ...] = ()
    lacking: tuple[Text, ...] = ()
    findings: tuple[str, ...] = ()
    least: Annotated[int, Field(ge=0)] = 0
    columns: Json[tuple[ColumnNumbers, ...]] = ()


@dataclass
class Finding:
    """One site, with its problems (the run would not work) and notes (worth knowing)."""

    site: Site
    online: bool
    answer: Answer | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(
    federation: Federation, experiment: Experiment | None, wait: float, least: int = 0
) -> tuple[list[Finding], list[str]]:
    """Returns one finding per site, and the problems that belong to no site. It takes `wait` and a few minutes at most.

    least: above 0 sites also send statistics of their data, of which no number is about fewer rows

    Raises UserError for statistics without an experiment, and when the sites cannot be asked.
    """
    if least and not experiment:
        raise UserError("--statistics are of the data that an experiment names: fedsim deploy check heart.toml ...")
    control = Control(federation)
    online = control.online()
    refused = ""
    named = None
    if experiment:
        refused = refusal(experiment, federation)
        named = with_names(experiment, federation)
    answers = ask_sites(control, named, wait, least) if any(online.values()) else []
    findings, missing = compare_sites(federation, named, registered_nodes(federation), online, answers)
    contacts = read_contacts(federation.kit("server") / CONTACTS)
    for finding in findings:
        contact = contacts.get(finding.site.name, Contact())
        add_contact(finding, contact, time.time())
    if missing:
        return findings, missing
    if experiment and refused:
        return findings, [names_lacking(experiment, findings) or refused]
    return findings, []


def refusal(experiment: Experiment, federation: Federation) -> str:
    """Returns why `fedsim run` would not run the experiment on the federation as it is checked; "" if it would."""
    deployed = experiment.replace(run={"runtime": "deployment", "federation": federation.name})
    try:
        plan = resolve(deployed)
        target = with_names(experiment, federation).run.target
        target_of_run = plan.experiment.run.target
        if target_of_run != target:
            return (
                f"the run would take {target_of_run!r}, the last domain, as the unseen one; "
                f"set run.target to {target!r}"
            )
        place_on_sites(plan, federation.clients)
    except UserError as error:
        return f"the run would be refused: {error}"
    return ""


def names_lacking(experiment: Experiment, findings: Sequence[Finding]) -> str:
    """Returns what the experiment must name because only the sites have its folder's images; "" if it lacks no name."""
    data = experiment.data
    domains = sorted({domain_of(finding.site.domain) for finding in findings})
    are_here = any((data_root(data) / domain).is_dir() for domain in domains)
    if data.dataset != "folder" or are_here or (data.domains and data.classes):
        return ""
    classes: set[str] = set()
    for finding in findings:
        if finding.answer:
            classes.update(finding.answer.classes)
    names = json.dumps(sorted(classes), ensure_ascii=False) if classes else "[...]"
    return (
        "the images are on the sites and not on this server, so that the experiment must say their names: "
        f"data.domains = {json.dumps(domains, ensure_ascii=False)} and "
        f"data.classes = {names}"
    )


def add_contact(finding: Finding, contact: Contact, now: float) -> None:
    """Adds what the server's gate knows of a site: why it is refused, its clock, a second node with its key."""
    is_refused = now - contact.refused_at < REFUSED_SECONDS
    # A site whose clock was moved counts as online for a minute, and its answer does not come through the gate.
    if is_refused and (not finding.online or finding.problems):
        finding.problems.insert(0, f"refused: {contact.refused}")
    of_clock = clock_problem(contact.offset)
    if finding.online and of_clock:
        finding.notes.append(of_clock)
    if now - contact.double_at < REFUSED_SECONDS:
        finding.notes.append(f"{contact.double}; if that is not you, remove the key (DEPLOY.md, Changes)")


def with_names(experiment: Experiment, federation: Federation) -> Experiment:
    """Returns the experiment with what the operator's machine cannot see.

    This is the target and, of a folder data set, the domains.
    """
    is_folder = experiment.data.dataset == "folder"
    if is_folder and not experiment.data.domains:
        domains = sorted({domain_of(site.domain) for site in federation.sites})
        experiment = experiment.replace(data={"domains": domains})
    target = experiment.run.target
    targets = federation.clients("target")
    if not target and len(targets) == 1:
        target = targets[0]
    if is_folder:
        target = target or sorted(experiment.data.domains)[-1]
    else:
        bench = benchmark(experiment.data)
        target = resolve_target(bench, target) if target else bench.domains[-1]
    return experiment.replace(run={"target": target})


def ask_sites(control: Control, experiment: Experiment | None, wait: float, least: int = 0) -> list[dict[str, Any]]:
    """Returns the answers of the connected nodes, by a run of the check app.

    Raises UserError when this run does not begin or does not end.
    """
    with tempfile.TemporaryDirectory(prefix="fedsim-check-") as name:
        report = Path(name) / "report.json"
        config = {"experiment": "", "report": str(report), "wait": float(wait), "statistics": least, "packages": ""}
        if experiment:
            requirements = [package.requirement for package in packages_of(experiment)]
            config["experiment"] = experiment.toml()
            config["packages"] = " ".join(dict.fromkeys(requirements))
        started = control.submit(Path(name), CHECK, config)
        if "run-id" not in started:
            raise UserError(f"the SuperLink refused the check: {started.get('error-message', started)}")
        run_id = str(started["run-id"])
        try:
            return _await_report(control, report, run_id, wait + START_SECONDS)
        except KeyboardInterrupt:  # an interrupted check must leave nothing running
            control.flwr("stop", run_id, CONNECTION)
            raise


def _await_report(control: Control, report: Path, run_id: str, seconds: float) -> list[dict[str, Any]]:
    """Returns the answers that the check app writes; raises UserError when it fails or takes longer than `seconds`."""
    now = time.monotonic()
    deadline = now + seconds
    next_look = now + STATUS_SECONDS
    while not report.is_file():
        if time.monotonic() > deadline:
            control.flwr("stop", run_id, CONNECTION)
            raise UserError(f"the check (run {run_id}) did not end within {seconds:g} s; is the server overloaded?")
        if time.monotonic() > next_look:
            next_look = time.monotonic() + STATUS_SECONDS
            runs = control.flwr("list", CONNECTION, "--run-id", run_id).get("runs") or [{}]
            status = str(runs[0].get("status", ""))
            if status.startswith("finished") and not report.is_file():
                raise UserError(f"the check (run {run_id}) failed on the server: {runs[0].get('status-details')}")
        time.sleep(POLL_SECONDS)
    return json.loads(report.read_text())


def compare_sites(
    federation: Federation,
    experiment: Experiment | None,
    nodes: dict[str, int],
    online: dict[int, bool],
    answers: list[dict[str, Any]],
) -> tuple[list[Finding], list[str]]:
    """Returns (a finding per site, problems of no site): the answers besides the federation and the experiment."""
    by_node = {answer["node"]: answer for answer in answers}
    findings = []
    for site in federation.sites:
        node = nodes.get(site.name, -1)
        finding = Finding(site, online.get(node, False))
        findings.append(finding)
        if node not in online:
            finding.problems.append("its key is not registered: call the server's start.sh")
        elif not finding.online:
            finding.problems.append("offline: call its start.sh")
        elif node not in by_node:
            finding.problems.append("it came online during the check: check again")
        else:
            _read_answer(finding, by_node[node])
    if not experiment:
        return findings, []
    return findings, _compare_with(experiment, findings)


def _read_answer(finding: Finding, raw: dict[str, Any]) -> None:
    """Adds to a finding what the site's answer says, and where it differs from the federation and this machine."""
    try:
        answer = Answer.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        finding.problems.append(f"its answer is not valid: {first['loc'][0]}: {first['msg']}")
        return
    finding.answer = answer
    if answer.problem:
        finding.problems.append(_reason(answer.problem))
    elif not answer.site:
        finding.problems.append("its answer is empty: install the server's fedsim there")
    if not answer.site:
        return
    if answer.site != finding.site.name:
        finding.problems.append(
            f"its site.env says SITE={answer.site!r}, and its key is that of {finding.site.name!r}: each site has its "
            "own kit"
        )
    finding.problems += [
        f"{package}: the experiment's method comes from outside, install it" for package in answer.lacking
    ]
    for key in ("domain", "role"):
        there, here = getattr(answer, key), getattr(finding.site, key)
        if there != here:
            finding.problems.append(f"its site.env says {key} {there!r}, the federation {here!r}")
    versions = {**installed_versions(), "python": platform.python_version()}
    for package, here in versions.items():
        there = getattr(answer, package)
        if there != here and package in ("fedsim", "flwr"):
            finding.problems.append(f"{package} {there} there, {here} here: install the same")
        elif there != here:
            finding.notes.append(f"{package} differs from {here} here: numbers may differ in the last digits")


def _reason(problem: str) -> str:
    """Returns the last line of what a site reports as its problem, with its causes where it gave no sign."""
    lines = problem.strip().splitlines() or ["no reason"]
    reason = lines[-1]
    return reason + AWAY if GONE in reason else reason


def _compare_with(experiment: Experiment, findings: list[Finding]) -> list[str]:
    """Adds to each finding what the experiment expects; returns the clients that no site provides."""
    named = experiment.data.dataset != "folder"
    target = experiment.run.target
    expected = client_names(experiment.data, target) if named else _folder_clients(experiment)
    classes = benchmark(experiment.data).classes if named else ()
    for finding in findings:
        domains = [target] if finding.site.role == "target" else expected
        if matching(finding.site.domain, domains) is None:
            unseen = "no domain is unseen" if target == NO_TARGET else f"the unseen domain is {target!r}"
            finding.notes.append(f"takes no part: {unseen}")
            finding.notes += finding.problems  # they do not keep this experiment from running
            finding.problems.clear()
            continue
        answer = finding.answer or Answer(node=0)
        _add_data_findings(finding, answer, experiment.data.accept)
        present = answer.classes
        classes = classes or present
        if present and present != classes:
            different = first_few(sorted(set(present) ^ set(classes)), 5)
            finding.problems.append(f"its classes differ: {different or 'another order'}")
    provided = [finding.site.domain for finding in findings if finding.site.role == "source"]
    lacking = [client for client in expected if matching(client, provided) is None]
    return [f"no site holds {client!r}, which the experiment trains on" for client in lacking]


def _add_data_findings(finding: Finding, answer: Answer, accepted: Sequence[str]) -> None:
    """Adds what the names and folders of a site's data show: what would refuse a run is a problem, the rest a note."""
    absent = [name for name, count in zip(answer.classes, answer.counts) if not count]
    if absent:
        finding.notes.append(f"holds no image of {first_few(absent, 5)}")
    try:
        data_findings = read_findings(finding.site.domain, list(answer.findings))
    except ValueError as error:
        finding.problems.append(f"its answer is not valid: {error}")
        return
    for each in data_findings:
        if each.is_grave and each.kind not in accepted:
            finding.problems.append(each.line)
        else:
            finding.notes.append(each.text)


def _folder_clients(experiment: Experiment) -> list[str]:
    """Returns the clients of a folder data set, whose domains but the held-out ones train."""
    data, run = experiment.data, experiment.run
    clients: list[str] = []
    for domain in sorted(data.domains):
        if domain not in (run.target, run.validation_domain):
            clients += clients_of(domain, data.clients_per_domain)
    return clients


def show(federation: Federation, findings: list[Finding], missing: Sequence[str], title: str) -> bool:
    """Prints the findings, certificates that end soon, and what is wrong; returns whether nothing is."""
    console.print(table(federation, findings, title))
    bad = [f"{finding.site.name}: {finding.problems[0]}" for finding in findings if finding.problems]
    bad += missing
    for lines, style in ((warnings(federation), "yellow"), (bad, "red")):
        for line in lines:
            console.print(line, style=style, soft_wrap=True, markup=False, highlight=False)
    return not bad


def table(federation: Federation, findings: list[Finding], title: str) -> Table:
    """Returns the findings as a table for the terminal."""
    # Several lines per site, so that no word is cut in a terminal of 80 columns.
    columns = [Column(name, no_wrap=True, overflow="fold") for name in ("site", "state", "versions", "images")]
    shown = Table(*columns, Column("verdict", overflow="fold"), box=SIMPLE_HEAD)
    shown.title = f"{federation.name}: {title}"
    for finding in findings:
        site = finding.site
        role = " (target)" if site.role == "target" else ""
        name = f"{escape(site.name)}\n{escape(site.domain + role)}"
        state = "online" if finding.online else "offline"
        answer = finding.answer or Answer(node=0)
        shown.add_row(name, state, versions_text(answer), images_text(answer), verdict_text(finding))
    return shown


def versions_text(answer: Answer) -> str:
    """Returns a site's versions of packages and its device, a line each."""
    lines = []
    for key in ("fedsim", "flwr", "torch", "python", "device"):
        text = getattr(answer, key)
        if text:
            lines.append(f"{key} {escape(text)}")
    return "\n".join(lines) or "-"


def images_text(answer: Answer) -> str:
    """Returns how many images a site has, of how many classes."""
    if not answer.classes:
        return "-"
    images = sum(max(count, 0) for count in answer.counts)
    more = "more than " if HIDDEN in answer.counts else ""
    return f"{more}{images}\nin {len(answer.classes)} classes"


def verdict_text(finding: Finding) -> str:
    """Returns a site's problems in red, then its notes; a site without any is ok."""
    lines = [f"[red]{escape(problem)}[/]" for problem in finding.problems]
    lines += [escape(note) for note in finding.notes]
    return "\n".join(lines) or "[green]ok[/]"


def show_statistics(findings: Sequence[Finding]) -> None:
    """Prints what the sites have said of their data, where they were asked."""
    classes: tuple[str, ...] = ()
    counts, columns, least = {}, {}, {}
    for finding in findings:
        answer = finding.answer
        if answer is None or not answer.least:
            continue
        site = finding.site.name
        counts[site] = answer.counts
        columns[site] = answer.columns
        least[site] = answer.least
        classes = classes or answer.classes
    if counts:
        console.print(statistics_table(classes, counts, columns, least))
