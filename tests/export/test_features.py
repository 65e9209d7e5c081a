"""Pictures of a run (t-SNE of its features, grids of a method), and the card of a model."""

import numpy as np
import pandas as pd
import pytest
import torch
from image_trees import write_tree
from matplotlib.image import imread
from PIL import Image
from support import run_small, small_experiment
from untrained_run import untrained_run

import fedsim
from fedsim.analysis.report import feature_pictures
from fedsim.common.errors import UserError
from fedsim.data.loading import load_client
from fedsim.export.card import card
from fedsim.export.cli import export
from fedsim.export.features import domain_features, extractor, plot_features
from fedsim.export.pictures import draw_pictures
from fedsim.export.trained import trained_net
from fedsim.models.infer.base import EvalMode
from fedsim.records import read_runs
from fedsim.runs.plan import resolve
from fedsim.settings.experiment import read_experiment


def test_picture_and_its_place_in_the_report(tmp_path):
    """PNG and SVG have both legends; `fedsim report` embeds the pictures in the run's plots. A source domain needs no
    list of tested images."""
    experiment = small_experiment(tmp_path, train={"rounds": 1})
    run, _ = run_small(experiment)
    domain_features(experiment.replace(data={"test_split": "list"}), run / "best.safetensors", 5)
    files = plot_features(run, run / "plots", 25)
    assert [file.name for file in files] == [f"features-fedavg-rot45-seed0.{kind}" for kind in ("png", "svg")]
    pixels = imread(files[0])
    assert min(pixels.shape[:2]) > 500
    assert 0.005 < float(np.mean(pixels[..., :3].min(axis=2) < 0.9)) < 0.6
    (picture,) = feature_pictures(read_runs(run.parents[2]))
    assert picture.caption == "t-SNE of features by class and by domain: fedavg/rot45/seed0"
    assert picture.source.startswith("data:image/png;base64,")


def test_a_source_has_the_scale_of_its_training_rows(tmp_path):
    """The features of a linear model are its inputs; b trained on some of its rows, and a was unseen."""
    table = pd.DataFrame({"x": np.arange(24.0) ** 2, "label": ["u", "v"] * 12, "site": ["a"] * 12 + ["b"] * 12})
    table.to_csv(tmp_path / "t.csv", index=False)
    given = [
        "data.dataset=arrays", f"data.root={tmp_path / 't.csv'}", "data.columns={features=['x'], domain='site'}",
        "data.scale=site", "model.backbone=linear", "run.target=a", f"run.output={tmp_path}", "train.rounds=1",
    ]  # fmt: skip
    experiment = read_experiment("digits", given)
    run, _ = run_small(experiment)
    features, _, domains = domain_features(experiment, run / "best.safetensors", 12)
    for index, domain in enumerate("ab"):
        values = table["x"][table["site"] == domain].to_numpy()
        rows = load_client(experiment.data, "b", "a").train if domain == "b" else slice(None)
        scaled = (values - values[rows].mean()) / values[rows].std()
        np.testing.assert_allclose(features[domains == index, 0], scaled, rtol=1e-5)


SMALL = {"fraction": 0.03, "domains": ["rot0", "rot15", "rot45"]}


@pytest.mark.parametrize("method", [
    {"name": "ccst", "cross_client_style": {"encoder": "haar", "styles": "single"}},
    {"name": "fisc", "style_contrast": {"content_variance": "unbiased"}}, "elcfs", "fedccrl",
])  # fmt: skip
def test_one_grid_per_source_client(method, tmp_path):
    files = draw_pictures(resolve(small_experiment(tmp_path, method, data=SMALL)), tmp_path, rows=2)
    assert [file.stem.rsplit("-", 1)[1] for file in files] == ["rot0", "rot15"]
    for file in files:
        with Image.open(file) as image:
            assert image.size[0] > 100


def test_a_method_without_pictures_says_so(tmp_path):
    with pytest.raises(UserError, match="does not change images by means of a bank"):
        draw_pictures(resolve(small_experiment(tmp_path)), tmp_path)


SUMMARY = {
    "method": "fedavg", "target": "photo", "seed": 0, "best_validation_round": 1, "oracle_round": 1, "last_round": 2,
    "best_validation_target_accuracy": 0.416, "best_validation_mean_validation_accuracy": 0.2,
    "last_target_accuracy": 0.3, "last_mean_validation_accuracy": 0.25, "oracle_target_accuracy": 0.416,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "seed0"


def records(folder, column, **changes):
    """Records of two rounds, of which the first is selected by `column`."""
    rows = {"round": [0, 1, 2], "target_accuracy": [0.1, 0.416, 0.3], "mean_validation_accuracy": [0.1, 0.2, 0.25]}
    pd.DataFrame({**rows, column: [0.1, 0.875, 0.5]}).to_csv(folder / "rounds.csv", index=False)
    pd.DataFrame([SUMMARY | changes]).to_csv(folder / "summary.csv", index=False)


@pytest.mark.filterwarnings("ignore:best.safetensors and summary.csv")
@pytest.mark.parametrize(("run", "column", "said"), [
    # its value stands in the table, and not that of the sources, which selected nothing
    ({"target": "tv", "validation_domain": "photo"}, "validation_domain_accuracy", [
        "| selection | round | accuracy on the unseen domain | validation accuracy on photo |",
        "| best on photo (`best`) | 1 | 41.6 % | 87.5 % |\n| last round (`last`) | 2 | 30.0 % | 50.0 % |",
        "Trained on art, sketch. No image of tv was trained on.",
        "No one trained on photo, which selected the round.", "# lung: fedavg\n",
        "Any folder domain/class/image (your own images)",
    ]),
    ({"target": "tv", "select_on": "local"}, "mean_local_validation_accuracy",
     ["| best validation of the local models (`best`) | 1 | 41.6 % | 87.5 % |"]),
])  # fmt: skip
def test_what_selected_the_round(tmp_path, folder, run, column, said):
    root = write_tree(tmp_path / "data", ("art", "photo", "sketch", "tv"), ("cat", "dog"), 1)
    data = {"dataset": "folder", "root": str(root), "image_size": 16}
    untrained_run(folder, data=data, name="lung", run={"threads": 1, **run})
    records(folder, column)
    text = card(fedsim.load(folder))
    for words in said:
        assert words in text


def test_the_card_says_by_what_a_round_was_selected_and_who_lied(folder):
    untrained_run(folder, run={"threads": 1, "select_by": "loss", "attackers": {"rot0": "sign_flip"}})
    records(folder, "mean_validation_loss")
    text = card(fedsim.load(folder, "last"))
    assert "| best source validation, by loss (`best`) | 1 | 41.6 % | 20.0 % |" in text
    assert "A run with one liar (rot0: sign_flip): it shows what a method makes of them" in text.split("## Limits")[1]


def test_a_rule_that_selected_nothing_has_no_numbers(folder):
    untrained_run(folder)
    records(folder, "mean_validation_accuracy", **{name: None for name in SUMMARY if name.startswith("best")})
    text = card(fedsim.load(folder, "last"))
    assert "| best source validation (`best`) | none | - | - |\n| last round (`last`) | 2 | 30.0 % | 50.0 % |" in text


def test_a_personal_model_has_no_results_of_the_run(folder):
    """Nor the rule that needs the tensors of all clients."""
    untrained_run(folder, {"name": "fedbn", "infer": "ensemble_of_local_bn"})
    (folder / "best.safetensors").rename(folder / "personal-rot0.safetensors")
    text = card(fedsim.load(folder, "personal-rot0"))
    assert "The run did not measure personal-rot0.safetensors" in text
    assert "| selection |" not in text
    assert "inference rule eval_mode" in text


@pytest.mark.parametrize(("method", "said", "unsaid"), [
    # the rule has the name by which a setting chooses it; the model is among what leaves a client, not next to it
    ("fedavg", "inference rule eval_mode.\nClients disclosed: model updates.\n", "pooled"),
    ("fedavg", "No image of rot75", "were trained on without"),
    ("gperxan", "Le et al., CVPR 2024", "pooled"),
    ("gperxan", "Trained from random weights", "ImageNet"),
    ("fada", "50 % of the images of rot75, the unseen domain, were trained on without their labels", "No image of"),
    ("deepall", "trained on the pooled data of all source domains, not federated (deepall)", "by federated"),
])  # fmt: skip
def test_the_method(folder, method, said, unsaid):
    text = card(fedsim.load(untrained_run(folder, method)))
    assert said in text
    assert unsaid not in text


@pytest.mark.parametrize("change", [lambda rounds: rounds[rounds["round"] != 1],
                                    lambda rounds: rounds.drop(columns="mean_validation_accuracy")])  # fmt: skip
def test_nothing_is_exported_when_the_selected_round_is_lost(folder, change):
    """The card, which has its number, is made before the model's file."""
    untrained_run(folder)
    records(folder, "mean_validation_accuracy")
    change(pd.read_csv(folder / "rounds.csv")).to_csv(folder / "rounds.csv", index=False)
    with pytest.raises(UserError, match=r"\A.*rounds\.csv: .*; copy the file again.*\Z"):
        export(folder, "torch", "last")
    assert not list(folder.glob("last.pt2"))


def test_features_are_those_of_the_runs_inference_rule(tmp_path):
    """FedIG-A predicts by its adapters: on these features, and not on those of eval mode, the head gives its logits."""
    experiment = small_experiment(tmp_path, "fedig-a", data=SMALL, train={"rounds": 2, "iterations": 4})
    run, _ = run_small(experiment)
    plan, net = trained_net(run / "best.safetensors")
    images = torch.rand(6, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    extract = extractor(net, plan.recipe.infer)
    with torch.inference_mode():
        features = extract(images)
        assert torch.equal(net.head(features), plan.recipe.infer.begin(net, tuple)(images))
        assert not torch.allclose(features, net.features(images))
        assert torch.equal(extractor(net, EvalMode())(images), net.features(images))
    files = plot_features(run, run / "plots", 10)
    assert all(file.is_file() for file in files)


@pytest.mark.parametrize(("infer", "own"), [("fixed_alpha", True), ("mix_norm", False), ("tsmo_bn", False)])
def test_a_rule_on_a_copy_of_the_network_has_its_own_features(infer, own, tmp_path):
    """Rules that look at all images of a domain, or at several views of one, have none: eval mode's are drawn."""
    run, _ = run_small(small_experiment(tmp_path, {"name": "fedavg", "infer": infer}, data=SMALL, train={"rounds": 1}))
    plan, net = trained_net(run / "best.safetensors")
    images = torch.rand(6, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        differs = not torch.allclose(extractor(net, plan.recipe.infer)(images), net.features(images))
    assert differs == own


def test_a_model_behind_the_clients_statistics(tmp_path):
    """A loaded model normalizes by the mean of what the clients sent; no picture is drawn of wrong features."""
    run, _ = run_small(small_experiment(tmp_path, "fedrdn", data=SMALL, train={"rounds": 1}))
    model = fedsim.load(run, "last")
    images = torch.rand(6, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.stack([entry[name] for entry in model.own]).mean(0) for name in ("mean", "std"))
    with torch.inference_mode():
        expected = model.net((model.normalize(images) - mean[..., None, None]) / std[..., None, None])
        torch.testing.assert_close(model(images), expected)
    with pytest.raises(UserError, match="no picture of features with client_normalization"):
        plot_features(run, run / "plots", 10)
