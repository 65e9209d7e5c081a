"""A search over combinations of parts: its draws, rungs and folds, what is left out, the outer run, and a small whole
search."""

import functools
import shutil
from types import SimpleNamespace

import pandas as pd
import pytest
from image_trees import write_tree
from typer.testing import CliRunner

from fedsim.analysis.combinations import figures, searches, tables
from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.methods.assembly import assemble
from fedsim.methods.recipe import SLOTS
from fedsim.records import read_runs
from fedsim.settings.experiment import parse_override, read_experiment
from fedsim.studies import combinations
from fedsim.studies.arms import command, option_cost, plan_arms, step_cost
from fedsim.studies.candidates import draw, find_options, overrides_of
from fedsim.studies.combinations import Combination, plan_combinations
from fedsim.studies.reports import nested
from fedsim.studies.scores import halve, stages

SMALL = ("data.fraction=0.1", "train.rounds=10", "run.device=cpu", "run.output=/nowhere")
DIGITS = read_experiment("digits", SMALL)
every_option = functools.cache(lambda: find_options(list(SLOTS), DIGITS, lambda options: ""))  # also what is left out


def planned(slots="weights,update,infer", budget=5, **search):
    """A planned search on small digits, of which nothing runs."""
    own = Combination(search.pop("method", ""), ["rot0"], [0], slots.split(","), budget, **search)
    return plan_combinations("digits", own, SMALL, "")


def option(text):
    """The option of digits that is called so."""
    return next(one for one in every_option()[0] if one.text == text)


def test_rungs_by_hand():
    """The best third stays, and the base besides it; equal scores go by their numbers, and no score is never kept."""
    assert [stages(folds) for folds in (1, 2, 3, 5, 6)] == [[1], [1, 2], [1, 2, 3], [1, 3, 5], [1, 3, 6]]
    scores = {0: 0.1, 1: 0.5, 2: 0.9, 3: None, 4: 0.9 + 1e-12, 5: 0.2, 6: 0.3}
    assert halve(scores) == [2, 4, 0]
    assert halve({0: None, 1: None, 2: 0.0}) == [2]


def test_draws_do_not_depend_on_the_budget():
    """Odd candidates change one slot, each another option, the even ones two or three; no two are alike."""
    few, many = planned(budget=8), planned(budget=13)
    assert [own.overrides for own in many.candidates[:8]] == [own.overrides for own in few.candidates]
    assert [len(own.options) for own in many.candidates[1::2]] == [1] * 6
    assert {len(own.options) for own in many.candidates[2::2]} <= {2, 3}
    assert len({own.label for own in many.candidates}) == 13
    options, _ = find_options(["weights"], DIGITS, lambda options: "")
    assert many.most_runs == 13 + 2 * 5 + 2 * 3  # of 13 on one fold 4 and the base on two more, then 2 and the base
    assert draw(options, 0, 1) != draw(options, 0, 3)
    assert len(planned("weights", 60).candidates) == 1 + len(options)


def test_an_option_is_a_part_of_its_row_with_what_it_needs():
    """The overrides give the part of the row, with the row's fields and the data set's own values."""
    options, left_out = every_option()
    assert left_out == {"refine=ensemble_distillation": "it does nothing without method.ensemble_distillation.data"}
    for one in options:
        method = {"name": "fedavg"} | nested(dict(map(parse_override, overrides_of([one], DIGITS)))).get("method", {})
        assert one.parts[0] in [part for _, part in assemble(method, DIGITS.parts).pairs]
    plan = planned("infer,refine", 60)
    texts = {one.text for own in plan.candidates for one in own.options}
    assert "infer=sampled_representation+representation" in texts
    assert "infer=zero_shot_adapter+mix_ig" in texts
    assert "model.head = 'text'" in dict(plan.refused)["refine=own_rows"]


def test_folds_leave_a_source_out_and_never_name_the_unseen_domain():
    plan = planned()
    (unseen,) = plan.unseen
    assert sorted(unseen.folds) == ["rot15", "rot30", "rot45", "rot60", "rot75"]
    cells = plan.cells_of(1, "rot0", unseen.folds)
    assert [cell.experiment.run.target for cell in cells] == unseen.folds
    assert {tuple(cell.experiment.data.domains) for cell in cells} == {tuple(sorted(unseen.folds))}


def test_the_outer_run_costs_the_same():
    """By hand: FedSAM's step costs 2.047 of FedAvg's, and the guiding head's 1.020; the update multiplies the sum."""
    plan = planned()
    sam, head, uniform = option("update=sharpness_aware"), option("terms=guiding_head"), option("weights=uniform")
    costs = {"fedavg": 1.0, "fedsam": 2.047, "mofedsam": 2.072, "gfedavg": 1.02, "gperxan": 1.11}
    assert [option_cost(one, costs) for one in (sam, head, uniform)] == [2.047, 1.02, 1.0]
    assert step_cost("fedavg", [sam, head, uniform], costs) == pytest.approx(1.02 * 2.047)
    assert step_cost("fedavg", [head], {"fedavg": 1.0}) is None
    found = {arm.title: arm for arm in plan_arms(plan.base, "rot0", [sam, uniform])}
    assert list(found) == ["base", "winner", "weights=uniform alone", "update=sharpness_aware alone"]
    assert [arm.rounds for arm in found.values()] == [20, 10, 20, 10]
    assert found["base"].steps == 2 * found["winner"].steps
    assert command(plan.base, "rot0", found["base"], [1, 2]) == (
        "fedsim sweep digits --methods fedavg --targets rot0 --seeds 1,2 --set data.fraction=0.1 --set run.device=cpu "
        "--output /nowhere --grid train.rounds=20"
    )
    found = plan_arms(plan.base, "rot0", [sam, uniform, head], [option("terms=proximal")])
    assert {"without update=sharpness_aware", "terms=proximal: the best single part"} <= {arm.title for arm in found}


@pytest.mark.parametrize(
    ("slots", "said"), [("term", "did you mean 'terms'"), ("unlabelled", "no row of METHODS has another")]
)
def test_what_is_refused(slots, said):
    with pytest.raises(UserError, match=said):
        planned(slots)


def test_a_change_without_effect_is_dropped(monkeypatch):
    """Candidate 2 has the numbers of candidate 1 in every round, and candidate 3 only its score."""
    plan = planned(budget=4)
    curves = {0: (0.1, 0.2), 1: (0.3, 0.4), 2: (0.3, 0.4), 3: (0.2, 0.4)}
    numbers = {own.label: curves[own.number] for own in plan.candidates}
    label = "fedsim.studies.combinations.{}".format
    own = lambda cell: numbers[cell.title.partition(" ")[0].partition("@")[2]]  # noqa: E731
    monkeypatch.setattr(label("all_scores"), own)
    monkeypatch.setattr(label("fold_metric"), lambda cell: own(cell)[-1])
    plan.rank_candidates(0)
    assert plan.unseen[0].left == [1, 0]
    texts = [one.text for one in plan.unseen[0].outcomes]
    assert texts == ["rank 3 of 4, the base", "rank 1 of 4", "the same numbers as candidate 1", "rank 2 of 4"]


def test_a_whole_search_opens_no_image_of_the_unseen_domain(tmp_path, in_this_process):
    """The files of the unseen domain are no images. The same command finds everything finished."""
    root = write_tree(tmp_path / "images", ("art", "cartoon", "photo", "sketch"), ("cat", "dog"), per_class=10)
    for file in (root / "sketch").rglob("*.png"):
        file.write_text("no image")
    settings = ["data.dataset=folder", f"data.root={root}", f"data.cache={tmp_path / 'cache'}", "data.image_size=28",
                "train.rounds=1", "train.batch_size=4", "train.iterations=1"]  # fmt: skip
    words = ["search", "digits", "--slots", "update,fuse", "--targets", "sketch", "--budget", "4"]
    words += ["--output", str(tmp_path), *(word for one in settings for word in ("--set", one))]
    first, second = (CliRunner().invoke(app, words) for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0), first.output
    assert second.output.count(", 0 to run") == 4
    rows = pd.read_csv(tmp_path / "digits" / "combinations.csv")
    assert list(rows["rung"].value_counts().sort_index().loc[1:]) == [4, 2, 2]
    final = rows[rows["rung"] == 3].set_index("candidate")
    assert final["outcome"].str.startswith("winner").sum() == 1
    folds = final["folds"].iloc[0].split(",")
    runs = [pd.read_csv(file) for file in tmp_path.glob("digits-without-sketch/fedavg/*/seed0/summary.csv")]
    accuracy = {run["target"][0]: run["best_validation_target_accuracy"][0] for run in runs}
    assert folds == sorted(folds, key=accuracy.__getitem__)  # the hardest for the base comes first
    assert final["score"][0] == pytest.approx(sum(accuracy[fold] for fold in folds) / 3)
    assert (tmp_path / "digits" / "plots" / "combinations-1.svg").is_file()
    shutil.copy(tmp_path / "digits" / "combinations.csv", tmp_path / "digits-without-sketch")  # next to some runs
    (table,) = tables(read_runs(tmp_path / "digits-without-sketch"))
    assert "winner: rank 1 of 2" in table.html()


def test_a_domain_that_is_called_like_a_missing_value_or_a_number_keeps_its_name(tmp_path):
    head = "method,search,target,rung,candidate,changes,slots,folds,score,outcome"
    row = "fedavg,s,NA,1,0,none: the base,,15,0.5,winner: rank 1 of 1"
    (tmp_path / "combinations.csv").write_text(f"{head}\n{row}\n")
    ((_, rows),) = searches(tmp_path)
    assert rows[["target", "folds"]].to_numpy().tolist() == [["NA", "15"]]
    ((_, figure),) = figures(searches(tmp_path), "digits")
    (panel,) = figure.axes
    assert (panel.get_title(), len(panel.get_lines())) == ("without NA", 1)
    assert [text.get_text() for text in panel.get_xticklabels()] == ["rung 1\nfolds: 1"]


def test_the_end_is_said_where_no_candidate_has_a_score():
    """The search then ends after its first rung, as a client has failed in every run."""
    shown = []
    study = SimpleNamespace(step=1, rungs=[1, 2, 3], unseen=[SimpleNamespace(left=[])])
    study.rank_candidates, study.show_winners = (lambda rung: None), (lambda: shown.append(study.step))
    combinations.CombinationSearch.tell(study, [])
    study.step, study.unseen = 2, [SimpleNamespace(left=[]), SimpleNamespace(left=[0])]
    combinations.CombinationSearch.tell(study, [])
    assert shown == [1]


def test_a_single_part_without_a_score_is_not_the_best_one(monkeypatch):
    """A part whose cells failed has no score; it was named where no single part had one."""
    given = []
    monkeypatch.setattr(combinations, "plan_arms", lambda base, target, winner, single: given.append(single) or [])
    monkeypatch.setattr(combinations, "compare_command", lambda *arguments: "")
    study = SimpleNamespace(base=None, fresh_seeds=[1])
    one, other = ("a",), ("b",)
    for scores in ((None, None), (None, 0.5)):
        outcomes = [SimpleNamespace(candidate=SimpleNamespace(options=options), score=score)
                    for options, score in zip((one, other), scores)]  # fmt: skip
        unseen = SimpleNamespace(target="t", last=dict(enumerate(outcomes)))
        combinations.show_arms(study, unseen, SimpleNamespace(options=("a", "b")))
    assert given == [(), other]
