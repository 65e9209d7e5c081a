"""Figures of many clients, of clients that are not always drawn, and of names in other letters."""

import logging
import re
import warnings

import numpy as np
import pytest
from crowd import write_crowd

from fedsim.results import plot_all, read_runs, write_report
from fedsim.results import report as report_module
from fedsim.results.figure_style import look, width_of, written
from fedsim.results.figures import client_key, metric_over_rounds
from fedsim.results.fonts import fonts_for, missing_text
from fedsim.results.plots import draw, names_in

DOMAINS = ("art", "cartoon", "photo")


def lines_of(figure, name):
    """y values of the lines with that label, in the first panel that has it."""
    for axes in figure.axes:
        for line in axes.get_lines():
            if line.get_label() == name:
                return line
    raise AssertionError(name)


def test_lines_break_where_a_client_was_not_drawn(tmp_path):
    folder = write_crowd(tmp_path, ["fedavg"], DOMAINS, rounds=12, clients=2, drawn=2)
    runs = read_runs(folder / "fedavg" / "0")
    figure = dict(draw(runs, "crowd"))["client-weight"]
    rounds = runs.clients.groupby("client")["round"].agg(set)
    gaps_of = {client: set(range(min(own), max(own))) - own for client, own in rounds.items()}
    client, gaps = next((client, gaps) for client, gaps in gaps_of.items() if gaps)
    line = lines_of(figure, client)
    values = dict(zip(line.get_xdata(), line.get_ydata()))
    assert {round_ for round_, value in values.items() if np.isnan(value)} == gaps
    assert line.get_markevery() == 1  # a value without neighbours is a marker


def test_lines_do_not_break_where_nobody_was_measured():
    """If validation happens in every second round, the lines of the clients have no gaps."""
    import pandas as pd

    frame = pd.DataFrame({"round": [2, 4, 6], "client": "art", "gap": [0.1, 0.2, 0.3], "label": "a", "target": "b"})
    figure = metric_over_rounds(frame.assign(run="x", seed=0), "gap", "crowd")
    assert list(lines_of(figure, "art").get_ydata()) == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(("clients", "names"), [(4, 12), (100, 3)])
def test_legends_of_many_clients_stay_short(tmp_path, clients, names):
    runs = read_runs(write_crowd(tmp_path, ["fedavg"], DOMAINS, rounds=2, clients=clients))
    figure = dict(draw(runs, "crowd"))["client-weight"]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(texts) == names
    own = runs.clients[(runs.clients["run"] == "fedavg/0/seed0") & (runs.clients["round"] == 1)]
    if clients == 100:
        assert texts == list(DOMAINS)
        mean = own[own["domain"] == "cartoon"]["weight"].mean()
        assert lines_of(figure, "cartoon").get_ydata()[0] == pytest.approx(mean)
        assert "mean ± std over clients" in figure.get_suptitle()
    assert figure.get_figheight() < 6


def test_a_line_for_all_where_domains_are_too_many():
    import pandas as pd

    many = pd.DataFrame({"client": [f"d{number}/{part}" for number in range(40) for part in range(2)]})
    frame, key, words = client_key(many, 2)
    assert set(frame[key]) == {"all clients"}
    assert "all clients" in words


def test_rows_of_domains_are_not_called_rows_of_clients():
    """The records of more than 200 clients have one row per domain, with the sum of its clients' weights."""
    import pandas as pd

    rows = pd.DataFrame({"client": ["rot0/*", "rot15/*"], "weight": [0.5, 0.5]})
    assert client_key(rows, 2)[1:] == ("client", "of each domain's clients together (mean ± std over seeds")
    assert client_key(rows, 1)[2] == "of each domain's clients together (one seed"


def test_long_names_are_shortened_and_dollars_are_not_mathematics():
    assert written("photo") == "photo"
    assert written("a_very_long_method_name(lr=0.01, weight=0.25)") == "a_very_long_method…ht=0.25)"
    assert len(written("x" * 100, 18)) <= 18
    assert written("$x$") == r"\$x\$"
    assert (width_of("photo"), width_of("写真")) == (5, 4)


def test_foreign_names_have_a_font_or_are_said(tmp_path, monkeypatch, caplog):
    folder = write_crowd(tmp_path, ["fedavg"], ["写真", "a$b^$", "[red]x[/y]"], rounds=1, name="crowd")
    runs = read_runs(folder)
    assert {"写真", "a$b^$", "fedavg", "crowd"} <= set(names_in(runs))
    families, missing = fonts_for(names_in(runs))
    assert (len(families) > 1) == (not missing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plot_all(runs, tmp_path / "plots")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    monkeypatch.setattr("fedsim.results.fonts.installed", dict)
    assert fonts_for(["写真 photo"])[1] == "写真"
    assert missing_text("写真").startswith("no installed font has 写真; the figures show boxes")
    assert missing_text("") == ""
    page = write_report(folder).read_text()
    assert "no installed font has 写真" in page
    assert "[red]x[/y]" in page


def test_figures_settings_end_with_the_block():
    import matplotlib as mpl

    with look(["x"]):
        assert mpl.rcParams["axes.grid"]
    assert not mpl.rcParams["axes.grid"]


def test_bytes_of_the_parts_add_up_to_the_total(tmp_path):
    """This holds with a record of round 0 (CSAC's first models) and with a record that is sent in only one round."""
    folder = write_crowd(tmp_path, ["csac"], DOMAINS, rounds=4)
    for file in folder.rglob("clients.csv"):
        lines = file.read_text().splitlines()
        header = lines[0].split(",")
        down, arrays = header.index("bytes_down"), header.index("bytes_down_arrays")
        first = lines[1].split(",")
        first[0] = "0"
        first[down] = first[arrays] = "900000000"
        file.write_text("\n".join([lines[0], ",".join(first), *lines[1:]]) + "\n")
    runs = read_runs(folder)
    found = report_module._record_bytes(runs, ["bytes_down_arrays"])
    assert found == {("csac", "bytes_down_arrays"): pytest.approx(runs.summary["bytes_down_per_round"].iloc[0])}


def test_narrow_screens_cut_no_figure(tmp_path, unrendered):
    page = write_report(write_crowd(tmp_path, ["fedavg"], DOMAINS, rounds=1)).read_text()
    (rule,) = re.findall(r"figure img \{([^}]*)\}", page)
    assert "max-width: 100%" in rule
    assert "min-width" not in rule
