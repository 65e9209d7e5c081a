"""Runs that leave no domain out (run.target = no-target): all domains train, and the model is the one to ship."""

import pandas as pd
import pytest
from safetensors.numpy import load_file
from support import run_small, small_experiment, tiny_experiment
from typer.testing import CliRunner

import fedsim
from fedsim.analysis.compare import compare
from fedsim.analysis.figure_style import unseen
from fedsim.analysis.plots import by_experiment
from fedsim.analysis.report import report_page
from fedsim.commands.cli import app
from fedsim.commands.runs import headline, next_commands
from fedsim.common.errors import UserError
from fedsim.export.card import card
from fedsim.export.trained import load_trained
from fedsim.records.reading import read_runs
from fedsim.runs.plan import resolve
from fedsim.settings.experiment import read_experiment
from fedsim.settings.run import NO_TARGET

DOMAINS = ["rot0", "rot15", "rot30", "rot45"]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """The folder of a run on all domains."""
    folder, grid = run_small(small_experiment(tmp_path_factory.mktemp("all"), run={"target": NO_TARGET}))
    return folder, grid


def test_all_domains_train_and_the_round_is_selected_by_their_validation(shipped):
    folder, grid = shipped
    assert folder.parts[-3:] == ("fedavg", "no-target", "seed0")
    trained = {
        message.content["config"]["client"] for message, _ in grid.seen if message.metadata.message_type == "train"
    }
    assert sorted(trained) == DOMAINS
    rounds = pd.read_csv(folder / "rounds.csv").set_index("round")
    assert rounds[["target_accuracy", "target_loss"]].isna().all(axis=None)
    best = rounds.loc[1:, "mean_validation_accuracy"].idxmax()
    summary = pd.read_csv(folder / "summary.csv").iloc[0]
    assert summary["best_validation_round"] == best
    assert pd.isna(summary["best_validation_target_accuracy"])
    assert not list(folder.glob("predictions*"))


def test_it_is_the_same_as_with_an_unseen_domain_that_nobody_looks_at(tmp_path):
    """Three domains of which one is left out, and the other two alone with none left out, give one model."""
    two = {"domains": ["rot0", "rot15"]}
    three = {"domains": ["rot0", "rot15", "rot45"]}
    first, _ = run_small(tiny_experiment(tmp_path / "a", data=two, run={"target": NO_TARGET}))
    second, _ = run_small(tiny_experiment(tmp_path / "b", data=three, run={"target": "rot45"}))
    ours, theirs = (load_file(folder / "last.safetensors") for folder in (first, second))
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    assert ours.keys() == theirs.keys()


def test_what_is_said_of_it(shipped):
    folder, _ = shipped
    text = headline(folder)
    assert text.startswith("fedavg on all domains, of which none is unseen (seed 0): ")
    assert "% accuracy in validation at round" in text
    assert "nan" not in text
    model = load_trained(folder)
    assert "No domain was left out, so that no number here says how the model does on a new one." in card(model)
    assert "All numbers are of domains that the model was trained on." in card(model)
    assert "undefined" not in card(model)
    assert "no-target" not in card(model).split("## Results")[0].replace(str(folder), "").replace("no-target/seed0", "")


def test_the_last_line_names_what_is_done_with_such_a_model(tmp_path):
    words = ["run", "hospitals", "--target", NO_TARGET, "--set", "train.rounds=1", "--output", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    folder = tmp_path / "hospitals" / "fedavg" / NO_TARGET / "seed0"
    assert done.output.splitlines()[-1].startswith(f"next: fedsim export {folder}; fedsim evaluate {folder} --data")


def test_the_commands_of_a_model(shipped, tmp_path):
    folder, _ = shipped
    evaluated = CliRunner().invoke(app, ["evaluate", str(folder)])
    assert isinstance(evaluated.exception, UserError)
    assert "this run left no domain out" in str(evaluated.exception)
    words = ["export", str(folder), "--format", "torch", "--output", str(tmp_path / "m.pt2")]
    exported = CliRunner().invoke(app, words)
    assert exported.exit_code == 0, exported.output
    assert "images of rot0" in exported.output.replace("\n", " ")


def test_a_sweep_shows_its_validation_and_the_means_of_unseen_domains_without_it(tmp_path):
    words = ["sweep", "hospitals", "--methods", "fedavg", "--targets", "no-target,hungary", "--output", str(tmp_path)]
    swept = CliRunner().invoke(app, [*words, "--set", "train.rounds=1", "--jobs", "1"])
    assert swept.exit_code == 0, swept.output
    assert "undefined" not in swept.output
    (line,) = [line for line in swept.output.splitlines() if "no-target" in line and "finished" in line]
    row = pd.read_csv(tmp_path / "hospitals" / "fedavg" / "no-target" / "seed0" / "summary.csv").iloc[0]
    percent = f"{100 * row['best_validation_mean_validation_accuracy']:.1f} %"
    assert line.endswith(f"{percent} in validation at the selected round, {percent} at the last round")
    (row,) = [line for line in swept.output.splitlines() if line.startswith("│ fedavg")]
    assert row.split("│")[2].strip() == "1"
    again = CliRunner().invoke(app, [*words[:5], "no-target", *words[6:], "--set", "train.rounds=1", "--jobs", "1"])
    model = tmp_path / "hospitals" / "fedavg" / "no-target" / "seed0"
    assert again.output.splitlines()[-1] == f"next: fedsim plot {model.parents[2]}; fedsim export {model}"


def test_a_study_of_sources_needs_an_unseen_domain(tmp_path):
    words = ["study", "contribution", "hospitals", "--methods", "fedavg", "--targets", "hungary,no-target"]
    refused = CliRunner().invoke(app, [*words, "--output", str(tmp_path)])
    assert isinstance(refused.exception, UserError)
    assert str(refused.exception) == (
        "contributions are measured on an unseen domain, and with run.target = 'no-target' there is none; name a domain"
    )


def test_comparisons_leave_it_out_with_a_note(shipped):
    folder, _ = shipped
    run_small(small_experiment(folder.parents[3]))
    comparison = compare(read_runs(folder.parents[3]))
    assert comparison.targets == ["rot45"]
    assert (
        "A part of the runs: only those that leave a domain out, which 1 of 2 do not (target no-target)."
        in comparison.notes
    )
    runs = read_runs(folder.parents[3])
    page = report_page(runs, {})
    assert "which 1 of 2 do not" in page
    (part, shown), *_ = by_experiment(runs, "best_validation", ()).values()
    assert [experiment.run.target for experiment in part.experiments.values()] == ["rot45"]
    assert shown.targets == ["rot45"]


def test_runs_of_which_none_leaves_a_domain_out_are_not_compared(shipped):
    """Their curves are drawn, and nothing is said of an unseen domain."""
    folder, _ = shipped
    reason = "seed0: 1 finished run, and none leaves a domain out \\(target no-target\\), .*: fedsim sweep CONFIG"
    runs = read_runs(folder)
    for call in (lambda: compare(runs), lambda: report_page(runs, {})):
        with pytest.raises(UserError, match=reason):
            call()
    ((part, comparison),) = by_experiment(runs, "best_validation", ()).values()
    assert part.experiments
    assert comparison is None
    assert unseen(NO_TARGET) == "no unseen domain"


def test_a_run_on_all_domains_ends_with_what_writes_its_model(shipped):
    folder, _ = shipped
    plan = resolve(small_experiment(folder.parents[3], run={"target": NO_TARGET}))
    assert next_commands(plan) == f"fedsim export {folder}; fedsim evaluate {folder} --data NEW"


@pytest.mark.parametrize(("method", "run", "reason"), [
    ("fada", {}, "fada trains on unlabelled images of the unseen domain, and there is none"),
    ("fedavg", {"validation_domain": NO_TARGET}, "has no domain 'no-target'"),
])  # fmt: skip
def test_what_is_refused(method, run, reason, tmp_path):
    with pytest.raises(UserError, match=reason):
        resolve(small_experiment(tmp_path, method, run={"target": NO_TARGET, **run}))


def test_a_domain_may_select_the_round_and_does_not_train():
    settings = [f"run.target={NO_TARGET}", "run.validation_domain=cleveland"]
    plan = resolve(read_experiment("hospitals", settings))
    assert plan.clients == ("hungary", "switzerland", "va_long_beach")


def test_by_python_and_a_table_of_hospitals(tmp_path):
    result = fedsim.run("fedavg", "hospitals", target=NO_TARGET, rounds=2, output=str(tmp_path), progress=False)
    clients = result.clients["client"].dropna().unique()
    assert sorted(clients) == ["cleveland", "hungary", "switzerland", "va_long_beach"]


def test_settings_of_an_unseen_domain_are_said_to_have_no_effect(tmp_path, caplog):
    data = {"test_split": "in", "adapt_share": 0.3}
    method = {"name": "fedavg", "infer": "t3a"}
    run_small(small_experiment(tmp_path, method, data=data, train={"rounds": 1}, run={"target": NO_TARGET}))
    for name in data:
        assert f"data.{name} has no effect here, only with an unseen domain (run.target)" in caplog.text
    assert "method.infer has no effect on the numbers of this run: t3a predicts on an unseen domain" in caplog.text
    caplog.clear()
    run_small(small_experiment(tmp_path, method, data=data, train={"rounds": 1}))
    assert "no effect" not in caplog.text
