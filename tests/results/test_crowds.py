"""Figures of many clients, of clients that are not always drawn, and of names in other letters."""

import logging
import warnings

import numpy as np
import pandas as pd
import pytest
from invented import write_crowd

from fedsim.results import read_runs, report_costs, write_report
from fedsim.results.client_rows import client_key
from fedsim.results.figure_style import width_of, written
from fedsim.results.figures import metric_over_rounds
from fedsim.results.fonts import fonts_for, missing_text
from fedsim.results.plots import names_in

DOMAINS = ("art", "cartoon", "photo")


def weights_of(runs):
    clients = runs.clients.assign(label=runs.clients["method"])
    return clients, metric_over_rounds(clients, "weight", "crowd")


def line_of(figure, name):
    """The line with that label, in the first panel that has it."""
    return next(line for axes in figure.axes for line in axes.get_lines() if line.get_label() == name)


def test_lines_break_where_a_client_was_not_drawn_and_not_where_nobody_was(tmp_path):
    folder = write_crowd(tmp_path, DOMAINS, rounds=12, clients=2, drawn=2)
    clients, figure = weights_of(read_runs(folder / "fedavg" / "art"))
    rounds = clients.groupby("client")["round"].agg(set)
    gaps_of = {client: set(range(min(own), max(own))) - own for client, own in rounds.items()}
    client, gaps = next((client, gaps) for client, gaps in gaps_of.items() if gaps)
    line = line_of(figure, client)
    assert {round_ for round_, value in zip(line.get_xdata(), line.get_ydata()) if np.isnan(value)} == gaps
    assert line.get_markevery() == 1  # a value without neighbours is a marker
    frame = pd.DataFrame({"round": [2, 4, 6], "client": "art", "gap": [0.1, 0.2, 0.3], "label": "a", "target": "b"})
    figure = metric_over_rounds(frame.assign(run="x", seed=0), "gap", "crowd")
    assert list(line_of(figure, "art").get_ydata()) == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(("clients", "names"), [(4, 12), (100, 3)])
def test_legends_of_many_clients_stay_short(tmp_path, clients, names):
    rows, figure = weights_of(read_runs(write_crowd(tmp_path, DOMAINS, rounds=1, clients=clients)))
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert (len(texts), figure.get_figheight() < 6) == (names, True)
    if clients == 100:
        assert texts == list(DOMAINS)
        own = rows[(rows["target"] == "art") & (rows["domain"] == "cartoon")]["weight"]
        assert line_of(figure, "cartoon").get_ydata()[0] == pytest.approx(own.mean())
        assert "mean ± std over clients" in figure.get_suptitle()


def test_whose_lines_they_are():
    """One line for all where domains are too many; rows of domains, from records of many clients, are none of clients.

    Each holds the sum of its clients' weights.
    """
    many = pd.DataFrame({"client": [f"d{number}/{part}" for number in range(40) for part in range(2)]})
    frame, key, words = client_key(many, 2)
    assert set(frame[key]) == {"all clients"}
    assert "all clients" in words
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
    write_crowd(tmp_path, ["写真", "a$b^$", "[red]x[/y]"], rounds=1)
    folder = tmp_path / "crowd" / "fedavg" / "写真"
    names = names_in(read_runs(folder))
    assert {"写真", "a$b^$", "fedavg", "crowd"} <= set(names)
    families, missing = fonts_for(names)
    assert (len(families) > 1) == (not missing)
    monkeypatch.setattr("fedsim.results.fonts.installed", dict)
    assert fonts_for(["写真 photo"])[1] == "写真"
    assert missing_text("") == ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = write_report(folder).read_text()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert "写真" in page


def test_bytes_of_the_parts_add_up_to_the_total(tmp_path):
    """This holds with a record of round 0 (CSAC's first models) and with a record that is sent in only one round."""
    folder = write_crowd(tmp_path, DOMAINS, rounds=4, method="csac")
    for file in folder.rglob("clients.csv"):
        clients = pd.read_csv(file)
        first = clients.iloc[:1].assign(round=0, bytes_down=900_000_000, bytes_down_arrays=900_000_000)
        pd.concat([first, clients]).to_csv(file, index=False)
    runs = read_runs(folder)
    found = report_costs._record_bytes(runs, ["bytes_down_arrays"], runs.labels())
    assert found == {("csac", "bytes_down_arrays"): pytest.approx(runs.summary["bytes_down_per_round"].iloc[0])}
