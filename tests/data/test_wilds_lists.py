"""FedDG_Benchmark's split lists, which have the form of WILDS, are read as they are."""

import pandas as pd
import pytest
from published_trees import image

from fedsim.data import load_client
from fedsim.runtime.launch import launch
from fedsim.settings.experiment import read_experiment

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
CLASSES = ("dog", "elephant")
WORDS = {"art_painting": "val", "photo": "test"}  # of domains that are a part as a whole


@pytest.fixture
def experiment(tmp_path):
    """Ten images of each class and domain: of a source 6 train, 2 are id_val and 2 id_test."""
    lines = [",split,domain_remapped,domain,category,y,path"]
    for place, domain in enumerate(DOMAINS):
        for label, name in enumerate(CLASSES):
            for number in range(10):
                path = f"{domain}/{name}/pic_{number:03d}.png"
                image(tmp_path / path, 1000 * place + 100 * label + number)
                word = WORDS.get(domain) or ("train" if number < 6 else "id_val" if number < 8 else "id_test")
                lines.append(f"{len(lines) - 1},{word},{place},{domain},{name},{label},{path}")
    table = tmp_path / "cs-a-p.csv"
    table.write_text("\n".join(lines) + "\n")
    changes = [
        "data.dataset=table",
        f"data.root={table}",
        "data.columns={label='category'}",
        "data.split=lists",
        "data.source_test=list",
        "data.image_size=16",
        f"data.cache={tmp_path / 'cache'}",
        "model.backbone=small-cnn",
        "train.rounds=1",
        "train.batch_size=4",
        "run.target=photo",
        "run.validation_domain=art_painting",
        "run.device=cpu",
        f"run.output={tmp_path / 'out'}",
    ]
    return read_experiment("digits", changes)


def test_the_parts_of_a_source(experiment):
    client = load_client(experiment.data, "cartoon")
    assert (len(client.train), len(client.validation)) == (12, 4)


def test_a_run_has_the_benchmarks_validation_domain_and_test_domain(experiment):
    """Cartoon and sketch train and have test images of their own; art selects, and all of photo is tested."""
    folder = launch(experiment)
    clients = pd.read_csv(folder / "clients.csv")
    rounds = pd.read_csv(folder / "rounds.csv")
    assert set(clients["client"]) == {"cartoon", "sketch"}
    assert clients["examples"].tolist() == [12, 12]
    assert clients["validation_examples"].tolist() == [4, 4]
    assert rounds["validation_domain_accuracy"].notna().all()
    assert rounds["mean_source_test_accuracy"].iloc[1] >= 0
    assert (rounds["target_accuracy"] * 20 % 1).abs().max() < 1e-9
