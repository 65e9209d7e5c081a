"""Comparisons of runs whose settings differ, and of runs that stand for the same cell."""

import pandas as pd
import pytest
from invented import pacs_experiment, write_run
from made_up_runs import table_of_runs, two_methods

from fedsim.common.errors import UserError
from fedsim.results import compare, read_runs
from fedsim.results.plots import rows_by


def mixed(first, second):
    return table_of_runs(
        {("fedavg", "photo", 0): 0.5, ("csac", "photo", 0): 0.6},
        {("fedavg", "photo", 0): first, ("csac", "photo", 0): second},
    )


def test_runs_with_different_settings_are_not_mixed():
    runs = mixed(pacs_experiment("fedavg"), pacs_experiment("csac", train={"lr": 0.1, "epochs": 5}))
    with pytest.raises(UserError, match=r"train\.epochs \(1 \| 5\), train\.lr \(0\.01 \| 0\.1\)") as caught:
        compare(runs)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"train\.epochs"):
        compare(runs, by=["train.lr"])
    comparison = compare(runs, by=["train.lr", "train.epochs"])
    assert list(comparison.methods["label"]) == ["csac (lr=0.1, epochs=5)", "fedavg (lr=0.01, epochs=1)"]
    assert list(comparison.methods["train.lr"]) == ["0.1", "0.01"]


@pytest.mark.parametrize(
    "change",
    [
        {"run": {"device": "cpu"}},
        {"run": {"runtime": "ray", "threads": 2}},
        {"data": {"root": "elsewhere", "cache": "there"}},
        {"name": "other"},
    ],
)
def test_where_it_ran_is_no_difference(change):
    other = pacs_experiment("csac", **change)
    assert len(compare(mixed(pacs_experiment("fedavg"), other)).methods) == 2


def test_select_on_is_a_difference():
    with pytest.raises(UserError, match=r"run\.select_on"):
        compare(mixed(pacs_experiment("fedavg"), pacs_experiment("csac", run={"select_on": "local"})))


def test_what_a_method_changes_in_its_row_stands_in_its_label():
    weight = {"guiding_head": {"weight": 0.25}}
    runs = table_of_runs(
        {("fedavg", "photo", 0): 0.5, ("a", "photo", 0): 0.6, ("b", "photo", 0): 0.7},
        {("a", "photo", 0): pacs_experiment("gperxan"), ("b", "photo", 0): pacs_experiment("gperxan", method=weight)},
    )
    labels = list(compare(runs).methods["label"])
    assert labels == ["gperxan@guiding_head.weight=0.25", "gperxan", "fedavg"]
    apart = mixed(pacs_experiment("fedavg"), pacs_experiment("gperxan", method=weight))
    assert len(compare(apart).methods) == 2


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match=r"did you mean 'train\.lr'"):
        compare(two_methods(), by=["train.rl"])
    with pytest.raises(UserError, match="there are: fedavg, csac"):
        compare(two_methods(), baseline="fedprox")
    with pytest.raises(UserError, match="did you mean 'last'"):
        compare(two_methods(), select="lats")
    with pytest.raises(UserError, match="known: table, csv, markdown, latex"):
        compare(two_methods()).render("html")


def test_a_cell_may_not_be_filled_twice():
    first = pacs_experiment("fedavg")
    with pytest.raises(UserError, match="more than once: fedavg/photo/seed0, csac/photo/seed0"):
        compare(mixed(first, first))


def test_two_methods_with_one_label_stay_two_rows():
    runs = table_of_runs({("fedavg", "photo", 0): 0.5, ("csac", "photo", 0): 0.6}, labels={"fedavg": "X", "csac": "X"})
    assert list(compare(runs).methods["label"]) == ["X [csac]", "X [fedavg]"]


def test_transductive_methods_are_marked():
    text = compare(table_of_runs({("fedavg", "photo", 0): 0.5, ("fedig-a", "photo", 0): 0.6})).render("markdown")
    assert "| fedig-a † |" in text
    assert "transductive" in text


def test_runs_with_another_answer_to_failures_are_compared_and_failures_are_said(tmp_path):
    """It may change between the calls of a run; what matters is whether a client has failed."""
    for seed, answer in enumerate(("stop", "continue")):
        folder = write_run(tmp_path, pacs_experiment("fedavg", "photo", seed, run={"on_client_failure": answer}))
    assert not [note for note in compare(read_runs(tmp_path)).notes if "failed" in note]
    rounds = pd.read_csv(folder / "rounds.csv")
    rounds.loc[rounds["round"].isin([2, 5]), "failed"] = 1
    rounds.to_csv(folder / "rounds.csv", index=False)
    (note,) = [note for note in compare(read_runs(tmp_path)).notes if "failed" in note]
    assert "pacs/fedavg/photo/seed1 (2 rounds)" in note


def compared_shares(*shares):
    """A run for each (method, share of the target's images that are not tested)."""
    keys = [(method, "photo", seed) for seed, (method, _) in enumerate(shares)]
    settings = {key: pacs_experiment(*key, data={"adapt_share": share}) for key, (_, share) in zip(keys, shares)}
    return table_of_runs(dict.fromkeys(keys, 0.5), settings)


def test_one_method_is_not_tested_on_different_shares_of_the_target():
    """Two methods may differ: one that adapts is tested on what it does not train on, and a note says so."""
    with pytest.raises(UserError, match=r"data\.adapt_share \(0\.0 \| 0\.9\); say .* --by data\.adapt_share"):
        compare(compared_shares(("fedavg", 0.0), ("fedavg", 0.9)))
    comparison = compare(compared_shares(("fedavg", 0.2), ("fedavg", 0.5)), by=["data.adapt_share"])
    assert set(comparison.methods["label"]) == {"fedavg (adapt_share=0.2)", "fedavg (adapt_share=0.5)"}
    assert set(compare(compared_shares(("fada", 0.5), ("fedavg", 0.0))).methods["label"]) == {"fada", "fedavg"}


def test_any_setting_of_the_run_tells_runs_apart():
    """A sweep's grid may be over a setting of [run] on which numbers seldom depend."""
    settings = {
        (str(limit), "photo", 0): pacs_experiment(run={"update_limit": limit, "label": f"update_limit={limit}"})
        for limit in (0, 100)
    }
    runs = table_of_runs(dict.fromkeys(settings, 0.5), settings)
    with pytest.raises(UserError, match=r"more than once: 0/photo/seed0, 100/photo/seed0; .*--by run\.update_limit"):
        compare(runs)
    by_limit, by_label = (compare(runs, by=[key]).methods["label"] for key in ("run.update_limit", "run.label"))
    assert set(by_limit) == {"fedavg (update_limit=0.0)", "fedavg (update_limit=100.0)"}
    assert set(by_label) == {"fedavg (label=update_limit=0)", "fedavg (label=update_limit=100)"}
    assert rows_by(runs) == ["run.update_limit"]  # report and plot have no --by
    for key in ("run.seed", "run.target"):
        with pytest.raises(UserError, match=f"no run has the setting '{key}'"):
            compare(runs, by=[key])


@pytest.mark.parametrize(
    ("run", "title"),
    [
        ({}, "best source validation"),
        ({"select_on": "local"}, "best source validation of the local models"),
        ({"validation_domain": "sketch"}, "best validation on sketch, which no client has"),
    ],
)
def test_the_title_says_what_selected_the_round(run, title):
    comparison = compare(mixed(pacs_experiment("fedavg", run=run), pacs_experiment("csac", run=run)))
    assert (comparison.title, comparison.rule) == (f"pacs: {title}", title)
    assert compare(mixed(pacs_experiment(run=run), pacs_experiment("csac", run=run)), "last").rule == "last round"


def test_the_title_of_rows_with_different_validation_names_none():
    runs = mixed(pacs_experiment(), pacs_experiment("csac", run={"select_on": "local"}))
    assert compare(runs, by=["run.select_on"]).title == "pacs: best validation"
