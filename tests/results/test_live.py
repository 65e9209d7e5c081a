"""`fedsim report --live`: the states of cells on disk and of a sweep, the page and its state on loopback."""

import json
import threading
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from invented import pacs_experiment, write_run
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.commands.live import STALE_SECONDS, Server, cells_of, state_html
from fedsim.results import read_runs
from fedsim.results.report import report_page
from fedsim.run.claim import claim
from fedsim.sweep.plan import Cell
from fedsim.sweep.view import STATE, SweepView


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


def test_the_page_is_served_to_this_machine_alone(cells, tmp_path):
    folder = tmp_path / "pacs"
    with Server(0, folder, lambda state: report_page(read_runs(folder), {}, live=state), lambda: "") as server:
        assert server.server_address[0] == "127.0.0.1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        try:
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


def test_options_without_live_are_refused(tmp_path):
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--port", "8000"])
    assert str(result.exception) == "--port and --federation belong to --live"
