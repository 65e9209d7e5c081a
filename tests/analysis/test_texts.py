"""What somebody else has written into records comes out without control characters: on the terminal and in files."""

import ast
import io
import json
import re
import shutil
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from invented import embedded, pacs_experiment, write_run
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fedsim.commands.cli import app
from fedsim.commands.live import state_html
from fedsim.common.console import Terminal
from fedsim.common.errors import printable
from fedsim.export.cli import _write
from fedsim.records.predictions import Predictions
from fedsim.records.results import write_results
from fedsim.studies.reproduction import Line, Numbers, Reproduction, render
from fedsim.studies.view import STATE

ROOT = Path(__file__).parents[2]
# Clear the screen, set a title, ring, turn the reading direction, hide, clear as C1 code, delete.
EVIL = "\x1b[2J\x1b]0;title\x07\u202e\u200b\x9b2J\x7f"
PLAIN = "[2J]0;title2J"
STYLES = re.compile(r"\x1b\[[\d;]*m|\x1b\[\?25[lh]")  # of rich itself, and the cursor of a live display


def controls(text):
    return sorted({c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")})


@pytest.fixture
def planted(own_grid):
    """Runs whose records have such characters in every text that is shown."""
    for run in sorted(own_grid.glob("*/*/seed*")):
        summary, clients, settings = (run / name for name in ("summary.csv", "clients.csv", "experiment.toml"))
        method = run.parts[-3]
        head, row = summary.read_text().splitlines()
        cells = dict(zip(head.split(","), row.split(","), strict=True))
        cells |= {"label": f"{method}{EVIL}", f"column{EVIL}": "1"}
        summary.write_text(f"{','.join(cells)}\n{','.join(cells.values())}\n")
        clients.write_text(
            clients.read_text().replace(",ok,", f",lost {EVIL} its way,", 1).replace("cartoon", f"car{EVIL}")
        )
        environment = json.loads((run / "environment.json").read_text())
        environment |= {"platform": f"Linux{EVIL}\r", "python": EVIL, "packages": {f"torch{EVIL}": f"2.12{EVIL}"}}
        environment |= {"threads": f"{EVIL}{run.name}", "git_commit": f"{run}{EVIL}"}
        (run / "environment.json").write_text(json.dumps(environment))
        escaped = EVIL.encode("unicode_escape").decode().replace("\\x", "\\u00")
        text = settings.read_text().replace(f'target = "{run.parent.name}"', f'target = "{run.parent.name}{escaped}"')
        settings.write_text(text)
        for number in (0, 1, 2, 3, 4):
            truth, given = np.array([0, 1, 1]), np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]], dtype=np.float32)
            Predictions(np.arange(3), truth, given, (f"dog{EVIL}", f"cat{EVIL}")).write(run, number)
    write_run(own_grid.parent, pacs_experiment("fedavg", "cartoon", 0, train={"rounds": 4}), finish=False)
    left = own_grid / "fedavg" / "cartoon"
    left.rename(left.with_name(f"cartoon{EVIL}"))
    return own_grid


def added(folder):
    """A file of more papers' numbers, with such characters in the name of a paper."""
    file = folder.parent / "more.csv"
    file.write_text(
        "paper,dataset,backbone,method,target_domain,accuracy_percent,std_percent\n"
        f"Some{EVIL},pacs,resnet18,fedavg,photo,90,1\n"
    )
    return file


@pytest.mark.parametrize("words", [
    [], ["--baseline", f"fedavg{EVIL}"], ["--metric", "balanced_accuracy"], ["--published"], ["--seeds", "0"],
])  # fmt: skip
@pytest.mark.parametrize("format", ["table", "csv", "markdown", "latex"])
def test_compare_in_every_format(words, format, planted, capsys):
    words = [*words, added(planted)] if words == ["--published"] else words
    app(["compare", str(planted), "--format", format, *map(str, words)], standalone_mode=False)
    said = capsys.readouterr()
    assert f"fedavg{PLAIN}" in said.out.replace("\\", "")
    assert (controls(said.out), controls(said.err)) == ([], [])
    for file in planted.glob("*.csv"):
        assert controls(file.read_text()) == [], file


def test_several_data_sets_and_their_figure(planted, tmp_path, capsys):
    other = shutil.copytree(planted, tmp_path / "other")
    for settings in other.rglob("experiment.toml"):
        text = settings.read_text().replace('name = "pacs"', 'name = "other"', 1)
        settings.write_text(text.replace('root = ""', 'root = "/other"', 1))
    for run in other.rglob("environment.json"):
        run.write_text('{"format": 1}')
    for format in ("table", "csv", "markdown", "latex"):
        words = [str(planted), str(other), "--format", format, "--figure", str(tmp_path / "ranks.svg")]
        app(["compare", *words], standalone_mode=False)
    said = capsys.readouterr()
    assert f"fedavg{PLAIN}" in said.out.replace("\\", "")
    for text in (said.out, said.err, *((tmp_path / f"ranks.{kind}").read_text() for kind in ("svg", "csv"))):
        assert controls(text) == []


def test_figures(planted, capsys):
    app(["plot", str(planted)], standalone_mode=False)
    said = capsys.readouterr()
    assert (controls(said.out), controls(said.err)) == ([], [])
    files = list((planted / "plots").iterdir())
    drawn = "".join(file.read_text() for file in files if file.suffix == ".svg")
    assert all(word in drawn for word in (f"fedavg{PLAIN}", "unseen: photo[2J", "car[2J", "dog[2J"))
    for file in files:
        assert controls(file.name) == []
        if file.suffix == ".svg":
            assert controls(file.read_text()) == [], file
            ElementTree.parse(file)  # such a character is no XML


def test_the_report_and_its_live_state(planted, capsys):
    app(["report", str(planted)], standalone_mode=False)
    page = (planted / "report.html").read_text()
    assert controls(page.partition("<script")[0]) == []
    data = json.dumps(embedded(page), ensure_ascii=False)
    assert controls(texts_of(embedded(page))) == []
    for word in (f"fedavg{PLAIN}", f"Linux{PLAIN}"):
        assert word in page
    assert f"lost {PLAIN} its way" in data
    (planted / f"cartoon{EVIL}").mkdir()
    cell = {"title": f"a{EVIL}", "folder": f"{planted}/b", "state": "failed", "round": 1, "rounds": 2, "reason": EVIL}
    (planted / STATE).write_text(json.dumps({"time": 9e9, "left": None, "cells": [cell]}))
    assert controls(state_html(planted, lambda: EVIL)) == []
    said = capsys.readouterr()
    assert (controls(said.out), controls(said.err)) == ([], [])


def texts_of(value):
    """All texts of a JSON value, joined."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return "".join(map(texts_of, value)) if isinstance(value, list) else str(value)


def test_files_that_collect_records(planted, tmp_path):
    write_results(planted)
    assert f"fedavg{PLAIN}" in (planted / "results.csv").read_text()
    assert controls((planted / "results.csv").read_text()) == []
    predictions = Predictions(np.arange(1), np.array([0]), np.array([[0.9, 0.1]]), (f"dog{EVIL}", "cat"))
    _write(predictions.frame(), tmp_path / "predictions.csv")
    assert (tmp_path / "predictions.csv").read_text().startswith(f"index,label,predicted,dog{PLAIN},cat\n")


@pytest.mark.parametrize("form", ["markdown", "latex"])
def test_tables_of_papers(form):
    row = SimpleNamespace(title=f"row{EVIL}")
    line = Line(row, {"average": Numbers(0.5, 0.1, 1)}, {"average": Numbers(0.5)})
    block = SimpleNamespace(published=f"paper{EVIL}")
    result = Reproduction(block, f"title{EVIL}", [f"target{EVIL}"], [line], [f"note{EVIL}"], "oracle")
    text = render([result], form)
    assert controls(text) == []
    assert all(word in text for word in ("row", "paper", "title", "target", "note"))


def test_cards(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fedsim.export.cli._model", lambda *_: None)
    monkeypatch.setattr("fedsim.export.card.card", lambda _: f"# card{EVIL}\n")
    monkeypatch.setattr("fedsim.export.files.export", lambda *_: (0.0, EVIL))
    app(["export", str(tmp_path)], standalone_mode=False)
    assert (tmp_path / "best-card.md").read_text() == f"# card{PLAIN}\n"
    assert controls(capsys.readouterr().out) == []


@pytest.mark.parametrize("terminal", [True, False])
def test_the_terminal_cleans_whatever_is_printed(terminal):
    """Text, markup, tables with titles and heads, panels, errors of rich, and a live display; accents stay."""
    paper = io.StringIO()
    console = Terminal(file=paper, force_terminal=terminal, width=100)
    table = Table(f"head{EVIL}", title=f"title{EVIL}", caption=EVIL)
    table.add_row(f"wéll{EVIL}\r\n§")
    for shown in (f"text{EVIL}", Text(f"text{EVIL}", "bold"), table, Panel(f"panel{EVIL}", title=EVIL), [EVIL]):
        console.print(shown)
    console.print(f"raw{EVIL}\ttab\r", markup=False, highlight=False, soft_wrap=True)
    with Live(table, console=console, transient=True, auto_refresh=False) as live:
        live.console.print(f"above{EVIL}")
    text = paper.getvalue()
    assert "wéll" in text
    assert f"raw{PLAIN}" in text
    text = STYLES.sub("", text)
    if terminal:
        text = re.sub(r"\x1b\[\d*[AK]|\r", "", text)  # how a live display goes up and erases its own lines
    assert controls(text) == []


def test_there_is_no_other_way_to_the_terminal():
    """Only common/console.py makes a console; a print gets a text that is clean or that nobody else has written."""
    allowed = {
        "fedsim/common/exit_codes.py", "fedsim/commands/results.py", "fedsim/commands/data.py",
        "fedsim/runtime/flower.py",
        "fedsim/deploy/bundles.py", "fedsim/deploy/warm_client.py", "fedsim/deploy/supernode.py",
    }  # fmt: skip
    for file in (file for folder in ("fedsim", "strategies", "clients") for file in (ROOT / folder).rglob("*.py")):
        place = file.relative_to(ROOT).as_posix()
        calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        names = {call.id for call in calls if isinstance(call, ast.Name)}
        assert names.isdisjoint({"Console", "RichHandler"}), place
        assert "print" not in names or place in allowed, place


def test_text_is_cleaned_line_by_line():
    assert printable("a\r\nb\x1b\n\tc\u2028d\r") == "a\nb\n cd"
    assert printable("wéll é 日本 ±\n") == "wéll é 日本 ±\n"
