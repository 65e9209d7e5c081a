"""The card of a model says how this model was trained, selected and measured."""

from types import SimpleNamespace

import pandas as pd
import pytest
from image_trees import write_tree
from untrained_run import untrained_run

import fedsim
from fedsim.common.errors import UserError
from fedsim.export.card import _weights, card
from fedsim.export.verbs import write_export
from fedsim.settings.experiment import read_experiment


def on_tree(tmp_path):
    root = write_tree(tmp_path / "data", ("art", "photo", "sketch", "tv"), ("cat", "dog"), 1)
    return {"dataset": "folder", "root": str(root), "image_size": 16}


def records(folder, column):
    """Records of two rounds, of which the first is selected by `column`."""
    rows = {"round": [0, 1, 2], "target_accuracy": [0.1, 0.416, 0.3], "mean_validation_accuracy": [0.1, 0.2, 0.25]}
    pd.DataFrame({**rows, column: [0.1, 0.875, 0.5]}).to_csv(folder / "rounds.csv", index=False)
    summary = {"method": "fedavg", "target": "photo", "seed": 0}
    summary |= {"best_validation_round": 1, "best_validation_target_accuracy": 0.416, "last_round": 2,
                "best_validation_mean_validation_accuracy": 0.2, "last_target_accuracy": 0.3,
                "last_mean_validation_accuracy": 0.25, "oracle_round": 1, "oracle_target_accuracy": 0.416}  # fmt: skip
    pd.DataFrame([summary]).to_csv(folder / "summary.csv", index=False)
    return card(fedsim.load(folder))


@pytest.mark.filterwarnings("ignore:best.safetensors and summary.csv")
def test_the_domain_that_selected_the_round(tmp_path):
    """Its value stands in the table, and not that of the sources, which selected nothing."""
    data = on_tree(tmp_path)
    run = untrained_run(tmp_path / "seed0", data=data, run={"target": "tv", "validation_domain": "photo", "threads": 1})
    text = records(run, "validation_domain_accuracy")
    assert "| selection | round | accuracy on the unseen domain | validation accuracy on photo |" in text
    assert "| best on photo (`best`) | 1 | 41.6 % | 87.5 % |\n| last round (`last`) | 2 | 30.0 % | 50.0 % |" in text
    assert "Trained on art, sketch. No image of tv was trained on." in text
    assert "No one trained on photo, which selected the round." in text


def test_selection_by_the_local_models(tmp_path):
    run = untrained_run(tmp_path / "seed0", run={"target": "rot75", "select_on": "local", "threads": 1})
    text = records(run, "mean_local_validation_accuracy")
    assert "| mean validation accuracy of the local models |" in text
    assert "| best validation of the local models (`best`) | 1 | 41.6 % | 87.5 % |" in text


def test_images_of_the_unseen_domain_without_labels(tmp_path):
    text = card(fedsim.load(untrained_run(tmp_path / "seed0", "fada")))
    assert "50 % of the images of rot75, the unseen domain, were trained on without their labels" in text
    assert "No image of" not in text


def test_a_personal_model_has_no_results_of_the_run(tmp_path):
    """Nor the rule that needs the tensors of all clients."""
    run = untrained_run(tmp_path / "seed0", {"name": "fedbn", "infer": "ensemble_of_local_bn"})
    (run / "best.safetensors").rename(run / "personal-rot0.safetensors")
    text = card(fedsim.load(run, "personal-rot0"))
    assert "The run did not measure personal-rot0.safetensors" in text
    assert "| selection |" not in text
    assert "inference rule eval_mode" in text


def test_the_rule_and_what_was_disclosed(tmp_path):
    """The rule has the name by which a setting chooses it; the model is among what leaves a client, not beside it."""
    text = card(fedsim.load(untrained_run(tmp_path / "own", {"name": "fedavg", "infer": "mix_norm"})))
    assert "inference rule mix_norm.\nClients disclosed: model updates" in text
    text = card(fedsim.load(untrained_run(tmp_path / "plain")))
    assert "inference rule eval_mode.\nClients disclosed: model updates.\n" in text


@pytest.mark.parametrize("change", [lambda rounds: rounds[rounds["round"] != 1],
                                    lambda rounds: rounds.drop(columns="mean_validation_accuracy")])  # fmt: skip
def test_nothing_is_exported_when_the_selected_round_is_lost(tmp_path, change):
    """The card, which has its number, is made before the model's file."""
    folder = untrained_run(tmp_path / "seed0")
    records(folder, "mean_validation_accuracy")
    rounds = pd.read_csv(folder / "rounds.csv")
    change(rounds).to_csv(folder / "rounds.csv", index=False)
    with pytest.raises(UserError, match=r"rounds\.csv: .*; copy the file again") as refused:
        write_export(folder, "torch", "last", None)
    assert "\n" not in str(refused.value)
    assert not list(folder.glob("last.pt2"))


def test_a_rule_that_selected_nothing_has_no_numbers(tmp_path):
    """The validation of a diverged run is NaN in every round."""
    folder = untrained_run(tmp_path / "seed0")
    records(folder, "mean_validation_accuracy")
    summary = pd.read_csv(folder / "summary.csv")
    summary.loc[0, [name for name in summary if name.startswith("best_validation")]] = None
    summary.to_csv(folder / "summary.csv", index=False)
    text = card(fedsim.load(folder, "last"))
    assert "| best source validation (`best`) | none | - | - |\n| last round (`last`) | 2 | 30.0 % | 50.0 % |" in text


def test_a_pooled_model_is_not_called_federated(tmp_path):
    text = card(fedsim.load(untrained_run(tmp_path / "pooled", "deepall")))
    assert "trained on the pooled data of all source domains, not federated (deepall)" in text
    assert "by federated" not in text
    assert "by federated domain generalization (fedavg)" in card(fedsim.load(untrained_run(tmp_path / "seed0")))


def test_the_terms_of_the_images_that_weights_come_from():
    """Those of a local file or of CLIP are not ImageNet's."""
    for words, said in (("imagenet", "ImageNet's images have terms"), ("mine.pth", "may have terms of their own")):
        model = SimpleNamespace(experiment=read_experiment("pacs", [f"model.weights={words}"]))
        (line,) = _weights(model)
        assert said in line
        assert ("ImageNet" in line) == (words == "imagenet")


def test_own_images_have_the_name_of_the_experiment(tmp_path):
    text = card(fedsim.load(untrained_run(tmp_path / "seed0", data=on_tree(tmp_path), name="lung")))
    assert text.startswith("# lung: fedavg\n")
    assert "Any folder domain/class/image (your own images)" in text
