"""Comparisons of runs whose settings differ, and of runs that stand for the same cell."""

import pandas as pd
import pytest
from invented import pacs_experiment as full_size
from invented import write_run
from made_up_runs import notes_of, one_each, table_of_runs, two_methods

from fedsim.common.errors import UserError
from fedsim.results import compare, read_runs


def pacs_experiment(*run, data=None, **sections):
    """Settings with images of a size that no paper has."""
    return full_size(*run, data={"image_size": 64} | (data or {}), **sections)


def labels(runs, *by):
    return list(compare(runs, by=by).methods["label"])


def test_runs_with_different_settings_are_not_mixed():
    runs = one_each(pacs_experiment(), pacs_experiment("csac", train={"lr": 0.1, "epochs": 5}))
    with pytest.raises(UserError, match=r"train\.epochs \(1 \| 5\), train\.lr \(0\.01 \| 0\.1\)"):
        compare(runs)
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
        {"method": {"name": "gperxan", "guiding_head": {"weight": 0.25}}},  # stands in its label
    ],
)
def test_where_it_ran_and_what_its_row_has_is_no_difference(change):
    assert len(labels(one_each(pacs_experiment(), pacs_experiment("csac", **change)))) == 2


@pytest.mark.parametrize(("words", "said"), [
    ({"by": ["train.rl"]}, r"did you mean 'train\.lr'"), ({"baseline": "fedprox"}, "there are: fedavg, csac"),
    ({"select": "lats"}, "did you mean 'last'"),
    ({"baseline": "fedavg", "correction": "bonferroni"}, "known: holm, none"),
    ({"by": ["run.seed"]}, "no run has the setting 'run.seed'"),
])  # fmt: skip
def test_what_cannot_be_compared_is_said(words, said):
    with pytest.raises(UserError, match=said):
        compare(two_methods(), **words)
    with pytest.raises(UserError, match="known: table, csv, markdown, latex"):
        compare(two_methods()).render("html")
    with pytest.raises(UserError, match="more than once: 0/photo/seed0, 1/photo/seed0"):
        compare(one_each(pacs_experiment(), pacs_experiment()))


def test_labels_of_rows():
    assert labels(one_each("fedavg", "csac", labels={"fedavg": "X", "csac": "X"})) == ["X [csac]", "X [fedavg]"]
    weight = {"guiding_head": {"weight": 0.25}}
    runs = one_each(pacs_experiment(), pacs_experiment("gperxan"), pacs_experiment("gperxan", method=weight))
    assert labels(runs) == ["gperxan@guiding_head.weight=0.25", "gperxan", "fedavg"]


def test_runs_with_another_answer_to_failures_are_compared_and_failures_are_said(tmp_path):
    """It may change between the calls of a run; what matters is whether a client has failed."""
    for seed, answer in enumerate(("stop", "continue")):
        folder = write_run(tmp_path, pacs_experiment("fedavg", "photo", seed, run={"on_client_failure": answer}))
    assert "failed" not in " ".join(compare(read_runs(tmp_path)).notes)
    rounds = pd.read_csv(folder / "rounds.csv")
    rounds.loc[rounds["round"].isin([2, 5]), "failed"] = 1
    rounds.to_csv(folder / "rounds.csv", index=False)
    (note,) = [note for note in compare(read_runs(tmp_path)).notes if "failed" in note]
    assert "pacs/fedavg/photo/seed1 (2 rounds)" in note


def compared_shares(*shares):
    """A run for each (method, share of the target's images that are not tested)."""
    own = [pacs_experiment(method, "photo", seed, data={"adapt_share": s}) for seed, (method, s) in enumerate(shares)]
    return table_of_runs({f"{seed}": {"photo": {seed: 0.5}} for seed in (0, 1)}, {f"{i}": e for i, e in enumerate(own)})


def test_one_method_is_not_tested_on_different_shares_of_the_target():
    """Two methods may differ: one that adapts is tested on what it does not train on, and a note says so."""
    with pytest.raises(UserError, match=r"data\.adapt_share \(0\.0 \| 0\.9\); say .* --by data\.adapt_share"):
        compare(compared_shares(("fedavg", 0.0), ("fedavg", 0.9)))
    apart = labels(compared_shares(("fedavg", 0.2), ("fedavg", 0.5)), "data.adapt_share")
    assert set(apart) == {"fedavg (adapt_share=0.2)", "fedavg (adapt_share=0.5)"}
    assert set(labels(compared_shares(("fada", 0.5), ("fedavg", 0.0)))) == {"fada", "fedavg"}


def test_any_setting_of_the_run_tells_runs_apart():
    """A sweep's grid may be over a setting of [run] on which numbers seldom depend."""
    own = [{"update_limit": limit, "label": f"update_limit={limit}"} for limit in (0, 100)]
    runs = one_each(*(pacs_experiment(run=run) for run in own))
    with pytest.raises(UserError, match=r"more than once: 0/photo/seed0, 1/photo/seed0; .*--by run\.update_limit"):
        compare(runs)
    assert set(labels(runs, "run.update_limit")) == {"fedavg (update_limit=0.0)", "fedavg (update_limit=100.0)"}
    assert set(labels(runs, "run.label")) == {"fedavg (label=update_limit=0)", "fedavg (label=update_limit=100)"}


@pytest.mark.parametrize(("run", "title"), [
    ({}, "best source validation"), ({"select_on": "local"}, "best source validation of the local models"),
    ({"validation_domain": "sketch"}, "best validation on sketch, which no client has"),
])  # fmt: skip
def test_the_title_says_what_selected_the_round(run, title):
    runs = one_each(pacs_experiment("fedavg", run=run), pacs_experiment("csac", run=run))
    comparison = compare(runs)
    assert (comparison.title, comparison.rule) == (f"pacs: {title}", title)
    assert bool(notes_of(comparison, "The round was selected on sketch")) == ("validation_domain" in run)
    assert compare(runs, "last").rule == "last round"
    runs = one_each(pacs_experiment(), pacs_experiment("csac", run={"select_on": "local"}))
    with pytest.raises(UserError, match=r"run\.select_on"):
        compare(runs)
    assert compare(runs, by=["run.select_on"]).title == "pacs: best validation"
