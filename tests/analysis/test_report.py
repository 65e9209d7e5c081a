"""The report: one valid page that loads nothing and contains everything; its commands repeat the runs."""

import json
import shlex
import shutil
import socket
import struct
import threading
from html.parser import HTMLParser
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest
from invented import embedded, one_each, pacs_experiment, write_run

from fedsim.analysis import compare
from fedsim.analysis.report import (
    class_accuracies,
    costs_table,
    premise,
    report_page,
    segmentation,
    settings_apart,
    write_report,
)  # fmt: skip
from fedsim.analysis.report_data import command_line, override_text
from fedsim.analysis.statistics import interval
from fedsim.commands.live import STALE_SECONDS, Server, cells_of, state_html
from fedsim.commands.results import method_notes
from fedsim.common.tables import MISSING, Column, Row, Table
from fedsim.common.tables import Cell as TableCell
from fedsim.records import read_runs
from fedsim.records.cases import Cases
from fedsim.records.predictions import Predictions
from fedsim.runs.claim import claim
from fedsim.settings.experiment import parse_experiment, parse_override
from fedsim.studies.plan import Cell
from fedsim.studies.view import STATE, SweepView

VOID = {"meta", "img", "br", "link", "input"}


class Page(HTMLParser):
    """Checks that tags close in order and collects what the tests ask about."""

    def __init__(self, file):
        super().__init__()
        self.open, self.images, self.links, self.texts, self.tags = [], [], [], [], []
        self.feed(file.read_text(encoding="utf-8"))
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append(tag)
        self.images += [values] if tag == "img" else []
        self.links += [values[key] for key in ("src", "href") if key in values]
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_is_complete_and_fetches_nothing(own_grid):
    for folder in own_grid.glob("*/sketch"):
        shutil.rmtree(folder)
    report = write_report(own_grid, {"csac": {"discloses": "feature statistics <per layer>", "paper": "CSAC"}})
    assert report == own_grid / "report.html"
    page = Page(report)
    assert page.tags.count("section") == 1
    assert page.images == []
    assert all(link.startswith("#run=") for link in page.links)
    assert report.stat().st_size < 2.5e6
    assert "link" not in page.tags
    text = " ".join(page.texts)
    for part in (
        "± ", "Wilcoxon", "ORACLE (upper bound)", "feature statistics <per layer>", "2.12.0", "train.rounds",
        "No published number of CSAC next to fedavg, csac", "arrays up", "prefers-color-scheme",
    ):  # fmt: skip
        assert part in text, part
    assert text.count("fedsim run ") == 4


def test_the_charts_have_the_numbers_of_compare(own_grid):
    """Those of the cells, differences, costs and missing cells; a page of each run with its curves, clients, recipe."""
    shutil.rmtree(own_grid / "csac" / "sketch" / "seed1")
    clients = own_grid / "csac" / "photo" / "seed0" / "clients.csv"
    clients.write_text(clients.read_text().replace(",ok,", ",lost its way,", 1))
    runs = read_runs(own_grid)
    table = compare(runs, baseline="fedavg")
    text = write_report(own_grid, {"csac": {"group": "clients"}}).read_text()
    assert "Worst</th>" in text
    data = embedded(text)
    (experiment,), pages = data["experiments"], {run["run"]: run for run in data["runs"]}
    csac, fedavg = sorted(experiment["methods"], key=lambda method: method["label"])
    row = table.methods.set_index("label").loc["csac"]
    assert (csac["group"], csac["ranked"], fedavg["differences"]) == ("clients", "", {})
    mean, low, high, pairs = csac["differences"]["average"]
    assert (mean, pairs) == (pytest.approx(100 * row["difference"], rel=1e-4), row["pairs"] == 3 and 3)
    assert low < mean < high
    assert csac["differences"]["sketch"][1:] == [None, None, 1]
    cells = table.cells.set_index(["label", "target"])["mean"]
    assert {target: own[0] for target, own in csac["cells"].items()} == pytest.approx(
        (100 * cells["csac"]).to_dict(), rel=1e-4
    )
    assert experiment["missing"] == {"csac": {"sketch": "seed 1"}}
    assert csac["costs"]["gigabytes"] == pytest.approx(4 * 6 * 44.8e6 / 1e9, rel=1e-4)
    assert csac["costs"]["steps"] is None
    assert [(target, data["runs"][run]["seed"]) for target, run in csac["runs"]] == [
        ("photo", 0), ("photo", 1), ("sketch", 0)]  # fmt: skip
    page = pages["csac/photo/seed0"]
    own = runs.rounds[runs.rounds["run"] == "csac/photo/seed0"]
    assert page["curves"]["target_accuracy"] == pytest.approx((100 * own["target_accuracy"]).tolist(), rel=1e-4)
    assert page["failures"] == ["round 1: art_painting: lost its way"]
    assert page["messages"][1] == ["art_painting", 4.0, *[4 * 44.8e6] * 4]
    assert page["clients"]["weight"]["sketch"][0] == [1, 2, 3, 4]
    assert {"art_painting", "layer1"} <= set(page["details"]["alpha"])
    assert page["command"].startswith("fedsim run pacs --method csac --target photo --seed 0")


def test_pooled_training_has_no_bytes_of_single_records_either(own_grid):
    runs = read_runs(own_grid)
    runs.summary["pooled"] = runs.summary["method"] == "csac"
    table = costs_table(runs, compare(runs), {})
    texts = {}
    for row in table.rows:
        label, *sizes, _ = row.full_cells
        texts[label.text] = [size.text for size in sizes]
    assert texts["csac §"] == [MISSING] * 4  # down, up, and the arrays of both
    assert MISSING not in texts["fedavg"]


def test_intervals_and_escaped_cells_by_hand():
    """1, 2 and 3: mean 2, s = 1, t of 2 degrees of freedom 4.30265, so 2 ± 4.30265 / sqrt(3)."""
    assert interval(np.array([1.0, 2, 3])) == pytest.approx((2, 2 - 2.48414, 2 + 2.48414), abs=1e-5)
    assert np.isnan(interval(np.array([1.0]))[1:]).all()
    cells = [
        "<script>",
        TableCell("1.5 kB", value=1500.0),
        TableCell("-", value=float("nan")),
        TableCell("<a>", link="#run=3"),
    ]
    text = Table([Column("a & b")], [Row([cell]) for cell in cells]).html()
    for cell in ("a &amp; b", "<td>&lt;script&gt;</td>", '<td data-order="1500" data-search="1500">1.5 kB</td>',
                 '<td data-order="" data-search="">-<', '<td><a href="#run=3">&lt;a&gt;</a></td>'):  # fmt: skip
        assert cell in text


def test_every_experiment_has_a_section_and_its_own_settings(tmp_path, unrendered):
    """Settings in which methods or their runs differ, as FADA's share of the target, are not among the shared ones."""
    write_run(tmp_path, pacs_experiment(name="p<x>", train={"rounds": 1, "lr": 0.5}))
    write_run(tmp_path, pacs_experiment("csac", "sketch", train={"rounds": 1}), finish=False)
    for method, share, own in (("fada", 0.5, {}), ("fedprox", 0.0, {"mu": 0.1}), ("fedprox", 0.0, {"mu": 1.0})):
        experiment = pacs_experiment(method, method={"proximal": own} if own else {}, data={"adapt_share": share})
        write_run(tmp_path / "own" / str(own), experiment, finish=False)
    apart, shared = settings_apart(read_runs(tmp_path / "own", unfinished=True))
    assert apart["data.adapt_share"] == "0.0 | 0.5"
    assert "data.adapt_share" not in shared
    assert apart["fedprox: method.proximal.mu"] == "0.1 | 1.0"
    shutil.rmtree(tmp_path / "own")
    write_run(tmp_path, pacs_experiment(train={"rounds": 1}))
    page = Page(write_report(tmp_path))
    assert page.tags.count("section") == 2
    assert any("Unfinished" in text and "sketch" in text for text in page.texts)


def test_the_command_repeats_the_run(tmp_path, monkeypatch):
    """From a shipped experiment it sets what differs, else it takes the run's own file."""
    for value in ("true", "nan", "two words", "5", "", "a=b", 0.1, 1e-5, 3, True, ["a", "b"], "quote'\"", "-x"):
        assert parse_override(f"key={override_text(value)}")[1] == value
    monkeypatch.setattr("fedsim.settings.experiment.config_folders", lambda: [tmp_path])
    shipped = pacs_experiment("fedavg", "photo", 0)
    (tmp_path / "pacs.toml").write_text(shipped.toml())
    own = {"train": {"rounds": 5, "lr": 1e-5}, "method": {"guiding_head": {"weight": 0.25}}}
    wanted = pacs_experiment("gperxan", "sketch", 2, **own)
    line = command_line(wanted, tmp_path / "experiment.toml")
    assert line == (
        "fedsim run pacs --method gperxan --target sketch --seed 2 "
        "--set train.rounds=5 --set train.lr=1e-05 --set method.guiding_head.weight=0.25"
    )
    options = ["method.name=gperxan", "run.target=sketch", "run.seed=2", *shlex.split(line)[10::2]]
    assert parse_experiment((tmp_path / "pacs.toml").read_text(), options) == wanted
    assert "--set" not in command_line(shipped, tmp_path)
    # Overrides cannot take back what the shipped file sets.
    (tmp_path / "pacs.toml").write_text(pacs_experiment(method={"weights": "uniform"}).toml())
    assert command_line(pacs_experiment(), tmp_path / "own.toml").split()[2].endswith("own.toml")


def test_averages_are_over_the_targets_that_every_method_has():
    """Otherwise a method without the hard target would win."""

    def case(dice):
        return [Cases(np.arange(3), np.full((3, 1), dice), np.full((3, 1), 1 - dice), *[None] * 4, ("disc",))]

    def guess(right):
        rows = np.repeat([[1, 0], [0, 1]], [right, 10 - right], axis=0).astype(np.float32)
        return Predictions(np.arange(10), np.zeros(10, int), rows, ("a", "b"))

    for table in (
        segmentation({"fedavg": {"easy": case(0.9), "hard": case(0.1)}, "fedprox": {"easy": case(0.8)}}),
        class_accuracies({"fedavg": {"easy": guess(9), "hard": guess(1)}, "fedprox": {"easy": guess(8)}}),
    ):
        text = table.html()
        assert ">90.0<" in text
        assert "only easy, which every method has" in text
    text = segmentation({"fedavg": {"hard": case(0.1)}, "fedprox": {"easy": case(0.8)}}).html()
    assert ">80.0<" not in text
    assert "no target that every method has" in text
    text = class_accuracies({"fedavg": {"easy": guess(9)}, "fedprox": {"easy": guess(8)}}).html()
    assert "every method has" not in text


def test_what_is_said_of_training_on_the_target_and_of_what_parts_disclose():
    """The notes contain the row's text, that of a bank, and that of a part that was added."""
    runs = one_each("fedavg", "fada")
    assert "measured on a domain that no client held" in premise(runs)
    runs.summary["uses_target_unlabelled"] = ["False", "True"]
    assert "measured on a domain that no client held" not in premise(runs)
    assert "methods with ‡ trained on other examples of that domain, without labels" in premise(runs)
    added = pacs_experiment("fedavg", name="added", method={"add": ["style_bank"], "augment": "cross_client_style"})
    notes = method_notes([pacs_experiment("ccst"), pacs_experiment("deepall"), added, pacs_experiment("no-such")])
    assert (set(notes), notes["deepall"]["discloses"]) == ({"ccst", "deepall", "fedavg"}, "all raw data")
    for method in ("ccst", "fedavg"):
        assert notes[method]["discloses"].startswith("model updates; once, to all clients: channel means")


@pytest.fixture
def cells(tmp_path):
    """A finished run, one that runs, one that has failed, one that waits, as a sweep has noted them."""
    states = {"photo": "finished", "sketch": "running", "cartoon": "failed", "art_painting": "waiting"}
    found = []
    for target, state in states.items():
        experiment = pacs_experiment("fedavg", target, train={"rounds": 3})
        folder = tmp_path / "pacs" / "fedavg" / target / "seed0"
        if state in ("finished", "running"):
            write_run(tmp_path, experiment, finish=state == "finished")
        reason = "no images of <dog>" if state == "failed" else ""
        found.append(Cell(experiment, folder, state, reason=reason))
    return found


def test_the_state_of_every_cell(cells, tmp_path):
    view = SweepView(cells, 1)
    view._note(600.0)
    folder = tmp_path / "pacs"
    with claim(cells[1].folder):
        text = state_html(folder, lambda: "site <a>")
    assert "1 finished, 1 running, 1 failed, 1 waiting; about 10 min left, until " in text
    assert "no images of &lt;dog&gt;" in text
    assert "<td>3 of 3</td>" in text
    assert "site &lt;a&gt;" in text
    assert state_html(tmp_path, lambda: "").count("waiting") == 2  # outputs/, as well
    # Nobody holds the lock now, and the sweep has died: only its failure is still true.
    noted = json.loads((folder / STATE).read_text())
    (folder / STATE).write_text(json.dumps(noted | {"time": noted["time"] - STALE_SECONDS - 1, "left": 1.0}))
    assert [cell["state"] for cell in cells_of(folder)] == ["failed", "finished", "interrupted"]
    assert "left" not in state_html(folder, lambda: "").partition("<table")[0]
    # After its end a sweep leaves only what has failed, and nothing where all is well.
    cells[1].state = cells[3].state = "finished"
    view._note(None, ended=True)
    assert [cell["state"] for cell in json.loads((folder / STATE).read_text())["cells"]] == ["failed"]
    cells[2].state = "finished"
    view._note(None, ended=True)
    assert not (folder / STATE).exists()


def test_the_page_is_served_to_this_machine_alone(cells, tmp_path, capsys):
    """Also after a browser has left before the page was sent, of which nothing is said."""
    folder = tmp_path / "pacs"
    with Server(0, folder, lambda state: report_page(read_runs(folder), {}, live=state), lambda: "") as server:
        assert server.server_address[0] == "127.0.0.1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        try:
            with socket.create_connection(server.server_address) as browser:
                browser.sendall(f"GET / HTTP/1.0\r\nHost: localhost:{server.server_port}\r\n\r\n".encode())
                browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            page = urlopen(f"{address}/").read().decode()
            state = json.load(urlopen(f"{address}/state"))
            with pytest.raises(HTTPError):
                urlopen(f"{address}/../pacs")
            (folder / "fedavg" / "photo" / "seed0" / "summary.csv").unlink()
            empty = urlopen(f"{address}/").read().decode()
        finally:
            server.shutdown()
            thread.join()
    assert '<section id="live" data-finished="1"><h2>Now</h2>' in page
    assert "connect-src 'self'" in page
    assert (state["finished"], "1 interrupted" in state["html"]) == (1, True)
    assert "no finished run" in empty
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("hosts", [
    [], ["evil.example:PORT"], ["127.0.0.1"], ["localhost:1"], ["127.0.0.1:PORT.evil.example"], ["[::1]:PORT"], [""],
    ["127.0.0.1:PORT", "127.0.0.1:PORT"], ["127.0.0.1:PORT", "evil.example:PORT"], ["127.0.0.1:PORT, evil.example"],
])  # fmt: skip
def test_a_page_of_another_name_that_leads_to_this_machine_reads_nothing(hosts, tmp_path):
    """DNS rebinding: a browser takes the report for a part of the page that it shows, whose name stands in Host."""
    with Server(0, tmp_path, lambda state: "secret", lambda: "secret") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()

        def ask(path, own, method="GET"):
            lines = [f"Host: {host}".replace("PORT", str(server.server_port)) for host in own]
            with socket.create_connection(server.server_address) as browser:
                browser.sendall("\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode())
                return browser.makefile("rb").read().decode()

        try:
            said = [ask(path, hosts, method) for path, method in (("/", "GET"), ("/state", "GET"), ("/", "POST"))]
            fine = [ask(path, [name]) for path in ("/", "/state") for name in ("127.0.0.1:PORT", "LOCALHOST:PORT")]
        finally:
            server.shutdown()
            thread.join()
    for answer in said:
        head, _, body = answer.partition("\r\n\r\n")
        assert (head.split()[1], body) == ("421", f"open http://127.0.0.1:{server.server_port}/\n")
    assert all("200 OK" in answer and "secret" in answer for answer in fine)
