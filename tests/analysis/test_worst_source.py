"""`compare --select worst`: the round whose validation is best on the source domain where it is worst."""

import numpy as np
import pandas as pd
import pytest
from support import run_small, small_experiment, tiny_experiment

from fedsim.analysis import compare
from fedsim.analysis.worst_source import with_worst_source, worst_validations
from fedsim.commands.results import chosen_runs
from fedsim.common.errors import UserError
from fedsim.records import read_runs


def clients(**columns):
    """Three rounds of the domains a (clients a/0 with 10 examples and a/1 with 30) and b (20 examples)."""
    rows = {
        "run": "r",
        "round": [1, 1, 1, 2, 2, 2, 3, 3, 3],
        "domain": ["a", "a", "b"] * 3,
        "validation_examples": [10, 30, 20] * 3,
    }
    return pd.DataFrame({**rows, **columns})


def test_the_worst_source_by_hand():
    """Of a: (10 .8 + 30 .4)/40 = .5, (10 .2 + 30 .6)/40 = .5, (10 .6 + 30 .6)/40 = .6; of b: .9, .45, .55."""
    accuracy = [0.8, 0.4, 0.9, 0.2, 0.6, 0.45, 0.6, 0.6, 0.55]
    worst = worst_validations(clients(validation_accuracy=accuracy), "validation_accuracy")
    assert worst.to_dict() == pytest.approx({1: 0.5, 2: 0.45, 3: 0.55})


def test_of_a_loss_the_largest_is_the_worst():
    loss = [1.0, 2.0, 0.5, 1.0, 1.0, 3.0, 0.2, 0.2, 0.1]  # a: 1.75, 1, .2; b: .5, 3, .1
    worst = worst_validations(clients(validation_loss=loss), "validation_loss")
    assert worst.to_dict() == pytest.approx({1: 1.75, 2: 3.0, 3: 0.2})


def test_a_round_without_one_of_the_sources_has_no_worst():
    """In round 2 b was not validated; in round 3 one of a's clients was not, and a's other one stands for it."""
    accuracy = [0.8, 0.4, 0.9, 0.9, 0.9, np.nan, 0.7, np.nan, 0.9]
    worst = worst_validations(clients(validation_accuracy=accuracy), "validation_accuracy")
    assert worst.to_dict() == pytest.approx({1: 0.5, 2: np.nan, 3: 0.7}, nan_ok=True)


def test_a_source_that_no_round_validated_could_be_the_worst():
    accuracy = [0.8, 0.4, np.nan, 0.9, 0.9, np.nan, 0.7, 0.6, np.nan]
    assert worst_validations(clients(validation_accuracy=accuracy), "validation_accuracy").isna().all()


def test_a_run_with_a_source_that_no_round_validated_has_no_worst(tmp_path):
    """Otherwise the worst of two sources would stand next to the worst of three. A note names the source."""
    run, _ = run_small(tiny_experiment(tmp_path, run={"on_client_failure": "continue"}), tamper=no_validation)
    assert pd.read_csv(run / "clients.csv").query("domain == 'rot15'")["validation_accuracy"].isna().all()
    run_small(tiny_experiment(tmp_path, run={"on_client_failure": "continue", "seed": 1}))
    comparison = compare(read_runs(tmp_path / "small"), "worst")
    assert comparison.table.set_index("seed")["accuracy"].isna().to_dict() == {0: True, 1: False}
    (note,) = [text for text in comparison.notes if "worst source" in text]
    assert note.startswith("The worst source domain is unknown, because no round validated one of them, in ")
    assert note.endswith("seed0 (rot15).")


def no_validation(message, reply):
    """The reply of a client, whose validation says of rot15 that it has no examples."""
    config = message.content["config"]
    if message.metadata.message_type.startswith("evaluate") and config["client"] == "rot15":
        reply.content["metrics"]["num-examples"] = 0
    return reply


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs of three rounds, whose records are then written by hand."""
    output = tmp_path_factory.mktemp("out")
    for seed in (0, 1):
        run, _ = run_small(small_experiment(output, run={"seed": seed}))
        rounds = pd.read_csv(run / "rounds.csv")
        rounds["target_accuracy"] = [0.1, 0.2, 0.3, 0.4 + seed / 10]
        rounds["mean_validation_accuracy"] = [0.1, 0.9, 0.5, 0.4]
        rounds.to_csv(run / "rounds.csv", index=False)
        rows = pd.read_csv(run / "clients.csv")
        at = {1: (0.9, 0.9, 0.1), 2: (0.3, 0.4, 0.8), 3: (0.3, 0.4, 0.35)}  # the worst: .1, .3, .3
        if seed:
            at[3] = (0.5, 0.4, 0.35)  # the worst: .35
        for number, values in at.items():
            rows.loc[rows["round"] == number, "validation_accuracy"] = values
        site = pd.DataFrame({"round": [1, 2, 3], "client": "rot45", "domain": "rot45", "evaluation_seconds": 1.0})
        pd.concat([rows, site]).to_csv(run / "clients.csv", index=False)  # of a target on a site of its own
    return output / "small"


def test_the_round_is_the_first_of_the_best_worst(folder):
    """Seed 0: rounds 2 and 3 have .3, the first counts, .3 on the target; seed 1: round 3, .5 on the target."""
    summary = with_worst_source(read_runs(folder)).summary.set_index("seed")
    assert summary["worst_round"].to_dict() == {0: 2, 1: 3}
    comparison = compare(chosen_runs(folder, "", "", "", ["summary", "rounds", "clients"]), "worst")
    assert comparison.cells["mean"].tolist() == pytest.approx([0.4, 0.4])  # the target, the average
    assert comparison.title == "small: best validation on the source domain where it is worst"
    assert not any("ORACLE" in note for note in comparison.notes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"select": "wurst"}, "did you mean 'worst'"),
        ({"select": "worst", "metric": "auroc"}, "predictions were not kept: leave auroc out"),
    ],
)
def test_what_the_rule_cannot_do_is_refused(folder, arguments, message):
    with pytest.raises(UserError, match=message):
        compare(read_runs(folder), **arguments)


def test_records_that_were_not_read_are_missed(folder):
    with pytest.raises(UserError, match=r"needs rounds\.csv and clients\.csv"):
        compare(read_runs(folder, only=["summary"]), "worst")


@pytest.mark.parametrize(
    ("method", "data", "reason"),
    [
        ("deepall", {}, "pooled data"),
        ("fedavg", {"mix": 0.5}, "data.mix = 0.5"),
        ("fedavg", {"clients": 2}, "data.clients = 2"),
    ],
)
def test_where_a_client_validates_on_several_domains_together_no_source_is_the_worst(tmp_path, method, data, reason):
    """Its one number is a mean over domains. Runs with one domain for each client keep their worst source."""
    run_small(small_experiment(tmp_path, method, data=data))
    comparison = compare(read_runs(tmp_path / "small"), "worst")
    assert comparison.cells["mean"].isna().all()
    (note,) = [text for text in comparison.notes if "worst source" in text]
    assert note.startswith("The worst source domain is unknown, because clients validate on several together, in ")
    assert note.endswith(f"({reason}).")


def test_as_many_clients_as_domains_have_a_worst_source(tmp_path):
    run_small(small_experiment(tmp_path, data={"clients": 3}))
    assert compare(read_runs(tmp_path / "small"), "worst").cells["mean"].notna().all()
