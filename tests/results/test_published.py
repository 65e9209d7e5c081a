"""Published numbers stand beside ours only where the setting is the paper's."""

import pytest

from fedsim.results import compare
from fedsim.results.published import published_rows, setting

from .invented import PACS, pacs_experiment
from .test_compare import table_of_runs


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


def test_comparison_marks_published_rows():
    accuracies = {("fedavg", target, 0): 0.8 for target in PACS}
    comparison = compare(table_of_runs(accuracies))
    text = comparison.render("markdown")
    assert "_FedAvg (CSAC Table I, published)_" in text
    assert "Published rows are from elsewhere" in text
    assert compare(table_of_runs(accuracies), published=False).published.empty
