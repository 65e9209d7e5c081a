"""Published numbers are shown beside ours only if the setting is the paper's."""

import pytest
from invented import PACS, pacs_experiment
from made_up_runs import table_of_runs

from fedsim.methods.assembly import build_recipe
from fedsim.methods.table import METHODS
from fedsim.results import compare
from fedsim.results.published import (
    PROTOCOLS,
    domain_key,
    only_theirs,
    printed_numbers,
    protocol_of,
    published_rows,
    setting,
)
from fedsim.settings.experiment import read_experiment


def test_rows_of_the_same_setting_carry_their_paper():
    rows = published_rows(pacs_experiment(), ["fedavg", "csac"], PACS)
    assert set(rows["source"]) == {"CSAC Table I", "FedIG-A Table 5"}
    fedavg = rows[(rows["method"] == "fedavg") & (rows["source"] == "CSAC Table I")].set_index("target")
    assert fedavg.loc["average", "mean"] == pytest.approx(0.8236)
    assert set(fedavg.index) == {*PACS, "average"}


@pytest.mark.parametrize(
    "change",
    [
        {"data": {"image_size": 64}},
        {"model": {"weights": "none"}},
        {"model": {"backbone": "vit-b-16"}},
        {"data": {"dataset": "terra-incognita"}},
        {"data": {"fraction": 0.1}},
        {"data": {"domains": ["photo", "sketch"]}},
        {"data": {"clients_per_domain": 10}},
        {"model": {"weights": "mine.safetensors"}},
    ],
)
def test_other_settings_match_nothing(change):
    experiment = pacs_experiment(**change)
    assert setting(experiment) is None
    assert published_rows(experiment, ["fedavg"], PACS).empty


def test_resnet50_has_other_rows_than_resnet18():
    rows = published_rows(pacs_experiment(model={"backbone": "resnet50"}), ["fedavg", "feddg-ga", "gperxan"], PACS)
    assert set(rows["source"]) == {"gPerXAN Table 2"}
    assert set(rows["label"]) == {"FedAvg", "FedDG-GA", "gPerXAN"}


def rotated(**data):
    return pacs_experiment(
        data={"dataset": "rotated-mnist", "image_size": 28} | data, model={"backbone": "digits-cnn", "weights": "none"}
    )


def test_rotated_mnist_is_csacs_variant_at_28_pixels():
    rows = published_rows(rotated(), ["csac"], ["0", "15", "30", "45", "60", "75"])
    assert list(rows["target"]) == ["0", "15", "30", "45", "60", "75", "average"]
    assert published_rows(rotated(variant="domainbed"), ["csac"], ["0"]).empty
    assert published_rows(rotated(image_size=224), ["csac"], ["0"]).empty


def test_domain_names_are_matched_across_spellings():
    experiment = pacs_experiment(data={"dataset": "office-home"})
    rows = published_rows(experiment, ["fedavg"], ["Art", "Clipart", "Product", "Real World"])
    assert set(rows["target"]) == {"Art", "Clipart", "Product", "Real World", "average"}


def test_fuller_table_of_one_paper_wins():
    rows = published_rows(
        pacs_experiment(data={"dataset": "vlcs"}), ["fedprox"], ["Caltech101", "LabelMe", "SUN09", "VOC2007"]
    )
    assert set(rows["source"]) == {"FedIG-A Table 7"}
    assert len(rows) == 5


def test_pooled_and_ambiguous_names():
    rows = published_rows(pacs_experiment(), ["mixstyle", "elcfs", "feddg-ga"], PACS)
    assert "CSAC Table I" not in set(rows[rows["method"] == "mixstyle"]["source"])
    assert set(rows[rows["method"] == "elcfs"]["label"]) == {"FedDG (ELCFS)"}
    assert "feddg-ga" not in set(rows["method"])


def test_no_published_average_beside_a_part_of_the_targets():
    rows = published_rows(pacs_experiment(), ["csac"], ["photo"])
    assert set(rows["target"]) == {"photo"}


def shipped(method, target="photo", seed=0, preset="csac", overrides=(), config="pacs"):
    """The settings of a run with a shipped preset."""
    words = [f"method.name={method}", f"run.target={target}", f"run.seed={seed}", *overrides]
    return read_experiment(config, words, preset)


def comparison_of(methods=("fedavg",), labels=None, **settings):
    """Comparison of one run per method and PACS target."""
    experiments = {(method, target, 0): shipped(method, target, **settings) for method in methods for target in PACS}
    return compare(table_of_runs(dict.fromkeys(experiments, 0.8), experiments, labels))


def test_comparison_marks_published_rows():
    comparison = comparison_of(overrides=["data.root=elsewhere", "run.device=cpu", "data.split_seed=3"])
    text = comparison.render("markdown")
    assert "_FedAvg (CSAC Table I, published)_" in text
    assert "FedIG-A Table" not in text.replace("FedIG-A beside", "")
    assert "Published rows are from elsewhere" in text
    (reason,) = (note for note in comparison.notes if note.startswith("No published number"))
    assert reason.startswith("No published number of FedIG-A beside fedavg: not its protocol (")
    experiments = {("fedavg", target, 0): shipped("fedavg", target) for target in PACS}
    runs = table_of_runs(dict.fromkeys(experiments, 0.8), experiments)
    assert compare(runs, published=False).published.empty


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"overrides": ["train.iterations=0", "train.rounds=1"]}, "train.rounds is 1, there 40"),
        ({"preset": ""}, "model.bottleneck is 0, there 256"),
        ({"overrides": ["data.adapt_share=0.5"]}, "data.adapt_share is 0.5, there 0.0"),
        ({"overrides": ["method.guiding_head.weight=1"]}, "method.guiding_head.weight is 1, there default"),
        ({"labels": {"fedavg": "fedavg(pixel)"}}, "the runs are variants (fedavg(pixel))"),
    ],
)
def test_runs_that_are_not_the_papers_get_no_published_number(settings, said):
    comparison = comparison_of(**settings)
    assert "CSAC Table I" not in set(comparison.published["source"])
    reasons = [note for note in comparison.notes if note.startswith("No published number of CSAC beside fedavg")]
    assert said in reasons[0]
    assert "published)" not in "".join(line for line in comparison.render("markdown").splitlines() if "CSAC" in line)


def test_each_method_is_matched_by_itself():
    comparison = comparison_of(["fedavg", "csac"], labels={"csac": "csac(tag)"})
    assert set(comparison.published["label"]) == {"FedAvg"}


@pytest.mark.parametrize(("paper", "configs"), PROTOCOLS.items())
def test_the_presets_of_the_papers_are_shipped(paper, configs):
    for config, backbone in configs:
        assert protocol_of(paper, read_experiment(config, [f"model.backbone={backbone}"])) is not None


def test_ccst_of_pixels_is_not_the_papers():
    """Its label has a tag, so it is not the method's name."""
    experiment = shipped("ccst", preset="gperxan")
    assert build_recipe(experiment).label("ccst") == "ccst(pixel)"
    rows = published_rows(experiment, ["ccst"], PACS)
    assert set(rows["source"]) == {"gPerXAN Table 2"}
    kept, reasons = only_theirs(rows, {"run": experiment}, {"run": "ccst(pixel)"})
    assert kept.empty
    assert reasons == ["No published number of gPerXAN beside ccst: the runs are variants (ccst(pixel))."]
    assert len(only_theirs(rows, {"run": experiment}, {"run": "ccst"})[0]) == 5


def test_a_printed_number_is_the_same_text_in_every_table():
    """The last bit of a division would round half a digit, such as 0.45, either way."""
    experiment, checked = pacs_experiment(), 0
    for source, own in published_rows(experiment, METHODS, PACS).groupby("source"):
        printed = printed_numbers(source, experiment).set_index(["method", "target"])
        for _, row in own.iterrows():
            same = printed.loc[(row["label"].removesuffix(" (ELCFS)"), domain_key(row["target"]))]
            assert (same["mean"], str(same["std"])) == (row["mean"], str(row["std"]))
            checked += 1
    assert checked > 50


def test_each_backbone_of_a_paper_has_its_preset():
    """CSAC trains AlexNet with other settings than ResNet-18."""
    domains = ("Caltech101", "LabelMe", "SUN09", "VOC2007")
    for preset in ("csac-alexnet", "csac"):
        runs = {("csac", one, 0): shipped("csac", one, preset=preset, config="vlcs") for one in domains}
        found = compare(table_of_runs(dict.fromkeys(runs, 0.8), runs))
        assert set(found.published["source"]) == {"CSAC Table II"}, found.notes


def test_each_row_of_our_table_is_judged_by_itself():
    """The row with another learning rate does not take the paper's number from the row with the paper's rate."""
    runs = {
        (f"csac-{rate}", target, 0): shipped("csac", target, overrides=[f"train.lr={rate}"])
        for rate in (0.1, shipped("csac").train.lr)
        for target in PACS
    }
    table = table_of_runs(dict.fromkeys(runs, 0.8), runs)
    assert set(compare(table, by=["train.lr"]).published["source"]) == {"CSAC Table I"}
    other = {cell: experiment for cell, experiment in runs.items() if cell[0] == "csac-0.1"}
    found = compare(table_of_runs(dict.fromkeys(other, 0.8), other))
    assert found.published.empty
    assert any("train.lr is 0.1, there" in note for note in found.notes)


def test_another_setting_than_the_papers_is_said():
    """Without a note one would not know whether a paper has a number."""
    small = {("fedavg", "photo", 0): pacs_experiment(data={"image_size": 64})}
    notes = compare(table_of_runs(dict.fromkeys(small, 0.8), small)).notes
    assert any(
        note.startswith("No published number of PACS: the papers have all images of all domains") for note in notes
    )
    digits = {("fedavg", "photo", 0): pacs_experiment(data={"dataset": "digits"})}
    assert not any("No published" in note for note in compare(table_of_runs(dict.fromkeys(digits, 0.8), digits)).notes)
