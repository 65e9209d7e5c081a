"""Published numbers are shown next to ours only if the setting is the paper's."""

import numpy as np
import pandas as pd
import pytest
from invented import PACS, notes_of, one_each, pacs_experiment, table_of_runs

from fedsim.analysis import compare
from fedsim.analysis.agreement import _counts, against_fedavg, agreement, order_notes
from fedsim.analysis.published import (
    PROTOCOLS,
    added_rows,
    domain_key,
    printed_numbers,
    protocol_of,
    published_rows,
    setting,
)
from fedsim.methods.table import METHODS
from fedsim.settings.experiment import read_experiment

VLCS = ("Caltech101", "LabelMe", "SUN09", "VOC2007")
OFFICE_HOME = ("Art", "Clipart", "Product", "Real World")
HOSPITALS = tuple(f"hospital_{number}" for number in range(5))  # 1 to 5 in gPerXAN's table
CAMELYON = {"data": {"dataset": "camelyon17", "image_size": 96}, "model": {"backbone": "densenet121"}}
ROTATED = ("0", "15", "30", "45", "60", "75")


def rows_of(methods, targets=PACS, **sections):
    return published_rows(pacs_experiment(**sections), methods, targets)


def rotated(**data):
    data = {"dataset": "rotated-mnist", "image_size": 28} | data
    return {"data": data, "model": {"backbone": "digits-cnn", "weights": "none"}}


@pytest.mark.parametrize(("methods", "targets", "sections", "sources"), [
    (["fedavg", "csac"], PACS, {}, {"CSAC Table I", "FedIG-A Table 5", "MCSAD Table 1"}),
    (["fedavg", "gperxan"], PACS, {"model": {"backbone": "resnet50"}}, {"gPerXAN Table 2"}),
    (["csac"], ROTATED, rotated(), {"CSAC Table III"}),
    (["fedavg"], OFFICE_HOME, {"data": {"dataset": "office-home"}}, {"FedIG-A Table 8"}),  # in another spelling
    (["fedavg"], HOSPITALS, CAMELYON, {"gPerXAN Table 3"}),
    (["fedprox"], VLCS, {"data": {"dataset": "vlcs"}}, {"FedIG-A Table 7"}),  # the fuller one of two tables
])  # fmt: skip
def test_rows_of_the_same_setting_carry_their_paper(methods, targets, sections, sources):
    rows = rows_of(methods, targets, **sections)
    assert set(rows["source"]) == sources
    assert set(rows["target"]) == {*targets, "average"}
    assert set(rows["method"]) == set(methods)
    assert not rows.duplicated(["method", "source", "target"]).any()


def test_numbers_are_the_printed_ones_as_fractions():
    rows = rows_of(METHODS)
    fedavg = rows[(rows["source"] == "CSAC Table I") & (rows["method"] == "fedavg")].set_index("target")
    assert fedavg.loc["average", "mean"] == pytest.approx(0.8236)
    assert set(rows_of(["csac"], ["photo"])["target"]) == {"photo"}  # no average besides a part of the targets
    assert set(rows[rows["method"] == "elcfs"]["label"]) == {"FedDG (ELCFS)", "ELCFS"}
    assert "CSAC Table I" not in set(rows[rows["method"] == "mixstyle"]["source"])  # which pools the data
    printed = printed_numbers("CSAC Table I", pacs_experiment()).set_index(["method", "target"])["mean"]["FedAvg"]
    assert fedavg["mean"].to_dict() == {target: printed[domain_key(target)] for target in fedavg.index}


@pytest.mark.parametrize("change", [
    {"data": {"image_size": 64}}, {"data": {"dataset": "terra-incognita"}}, {"data": {"fraction": 0.1}},
    {"data": {"domains": ["photo", "sketch"]}}, {"data": {"clients_per_domain": 10}}, {"model": {"weights": "none"}},
    {"model": {"weights": "mine.safetensors"}}, {"model": {"backbone": "vit-b-16"}}, rotated(variant="domainbed"),
    rotated(image_size=224),
])  # fmt: skip
def test_other_settings_match_nothing(change):
    experiment = pacs_experiment(**change)
    assert setting(experiment) is None
    assert published_rows(experiment, ["fedavg", "csac"], [*PACS, *ROTATED]).empty


def test_a_file_of_more_papers_may_have_names_that_are_numbers(tmp_path):
    """Domains and papers are texts, also where a whole column is numbers; a row without a domain is of none."""
    head = "paper,dataset,backbone,method,target_domain,accuracy_percent,std_percent\n"
    line = "2024,rotated-mnist,digits-cnn,FedAvg,{},90,1\n"
    file = tmp_path / "more.csv"
    file.write_text(head + line.format(15) + line.format(30))
    rows, _ = added_rows(file, pacs_experiment(**rotated()), ["fedavg"], ROTATED)
    assert rows[["source", "target"]].to_numpy().tolist() == [["2024", "15"], ["2024", "30"]]
    file.write_text(head + line.format(15) + line.format(""))
    rows, _ = added_rows(file, pacs_experiment(**rotated()), ["fedavg"], ROTATED)
    assert list(rows["target"]) == ["15"]


def shipped(method="fedavg", target="photo", preset="csac", overrides=()):
    return read_experiment("pacs", [f"method.name={method}", f"run.target={target}", *overrides], preset)


def runs_of(labels=None, **settings):
    """FedAvg's run on each target with a shipped preset."""
    own = {"fedavg": lambda target, seed: shipped("fedavg", target, **settings)}
    return table_of_runs({"fedavg": {target: [0.8] for target in PACS}}, own, labels)


def test_comparison_marks_published_rows():
    runs = runs_of(overrides=["data.root=elsewhere", "run.device=cpu", "data.split_seed=3"])
    comparison = compare(runs)
    text = comparison.render("markdown")
    assert "_FedAvg (CSAC Table I, published)_" in text
    assert "(FedIG-A Table" not in text
    assert "Published rows are from elsewhere" in text
    for format in ("table", "csv", "latex"):
        assert "CSAC Table I" in comparison.render(format)
    digits = one_each(pacs_experiment(data={"dataset": "digits"}))  # besides which nobody would look for one
    assert not notes_of(compare(digits), "No published")
    reason, other = notes_of(comparison, "No published number")
    assert reason.startswith("No published number of FedIG-A next to fedavg: not its protocol (")
    assert other == "No published number of MCSAD next to fedavg: its protocol is not shipped for pacs."
    assert compare(runs, published=False).published.empty


@pytest.mark.parametrize(("settings", "said"), [
    ({"overrides": ["train.iterations=0", "train.rounds=1"]}, "train.rounds is 1, there 40"),
    ({"preset": ""}, "model.bottleneck is 0, there 256"),
    ({"overrides": ["data.adapt_share=0.5"]}, "data.adapt_share is 0.5, there 0.0"),
    ({"overrides": ["method.guiding_head.weight=1"]}, "method.guiding_head.weight is 1, there default"),
    ({"labels": {"fedavg": "fedavg(pixel)"}}, "the runs are variants (fedavg(pixel))"),
    ({"labels": {"fedavg": "fedavg@text={}"}}, "the runs are variants (fedavg@text={})"),
])  # fmt: skip
def test_runs_that_are_not_the_papers_get_no_published_number(settings, said):
    comparison = compare(runs_of(**settings))
    assert "CSAC Table I" not in set(comparison.published["source"])
    assert said in notes_of(comparison, "No published number of CSAC next to fedavg")[0]
    assert "published)" not in "".join(line for line in comparison.render("markdown").splitlines() if "CSAC" in line)


def test_the_presets_of_the_papers_are_shipped():
    found = [(paper, *one) for paper, configs in PROTOCOLS.items() for one in configs]
    for paper, config, backbone in found:
        assert protocol_of(paper, read_experiment(config, [f"model.backbone={backbone}"])) is not None, paper


def test_each_row_of_our_table_is_judged_by_itself():
    """The row with another learning rate does not take the paper's number from the row with the paper's rate."""

    def compared(*rates):
        own = {f"{rate}": lambda t, s, rate=rate: shipped("csac", t, overrides=[f"train.lr={rate}"]) for rate in rates}
        return compare(table_of_runs({rate: {target: [0.8] for target in PACS} for rate in own}, own), by=["train.lr"])

    assert set(compared(0.1, shipped("csac").train.lr).published["source"]) == {"CSAC Table I"}
    found = compared(0.1)
    assert found.published.empty
    assert "train.lr is 0.1, there" in " ".join(found.notes)


def test_agreement_of_tables_by_hand():
    """Of 6 pairs among 4 methods one is discordant: tau 2/3. One order of 24 has no discordant pair, 3 have one.

    With q = 1 all orders are equally likely: the same order has 1/24, so that its interval goes below 0.
    """
    tau, low, high = agreement(np.array([1, 2, 3, 4]), np.array([1, 2, 4, 3]))
    assert (tau, low < 0 < high) == (pytest.approx(2 / 3), True)
    assert _counts(4, 0.0)[:2] == pytest.approx([1 / 24, 3 / 24])
    assert agreement(np.arange(4), np.arange(4))[1] < 0 < agreement(np.arange(8), np.arange(8))[1]
    assert agreement(np.arange(9), np.arange(9)[::-1])[1] == pytest.approx(-1, abs=0.01)
    # A method with .1, .2, .3 and one with .3, .2, .1 have the same mean: one of 3 pairs is a tie, and counts half.
    sums = np.array([0.0, 0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1])
    assert sums[1] > sums[2]  # in the last bit
    assert agreement(sums, np.arange(3))[0] == agreement(np.arange(3), sums)[0] == pytest.approx(2 / 3)
    ours = [("fedavg", 0, 0.8), ("csac", 0, 0.83), ("elcfs", 0, 0.82), ("fedavg", 1, 0.4)]  # a seed that only one has
    rows = [(*row, target) for row in ours for target in PACS]
    table = pd.DataFrame(rows, columns=["method", "seed", "accuracy", "target"]).eval("label = method")
    frame = against_fedavg(table, pacs_experiment(model={"backbone": "resnet50"}), PACS)  # with any network
    assert frame.loc["csac"].dropna().to_dict() == pytest.approx(
        {"here": 0.03, "the papers' mean": 0.0256, "CSAC Table I (ResNet-18)": 0.0145}
        | {"FedIG-A Table 5 (ResNet-18)": 0.0523, "MCSAD Table 1 (ResNet-18)": 0.01},
        abs=3e-4,  # the papers round their averages
    )
    (said,) = order_notes(table, pacs_experiment(), PACS)
    assert "here and FedIG-A Table 5 (ResNet-18) 1.00 (-0.53 to 1.00; 3 methods)" in said
    assert "CSAC Table I (ResNet-18) and MCSAD Table 1 (ResNet-18) 0.67 (-0.44 to 0.99; 4 methods)" in said
    assert "the papers' mean and" not in said
    assert (
        order_notes(table[table["method"] != "elcfs"], pacs_experiment(), PACS) == []
    )  # two methods have no order worth a word
    assert against_fedavg(table[table["seed"] == 2], pacs_experiment(), PACS).empty
    assert against_fedavg(table, pacs_experiment(data={"dataset": "terra-incognita"}), PACS).empty
    photo = against_fedavg(table, pacs_experiment(), ["photo"])
    assert photo["FedIG-A Table 5 (ResNet-18)"]["csac"] == pytest.approx(0.0443)
