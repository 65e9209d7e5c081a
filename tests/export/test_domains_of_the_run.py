"""A network with something for each client is built for the clients of the run, whatever the data set has now."""

import pytest
from image_trees import write_tree
from untrained_run import untrained_run

from fedsim.export.features import domain_features
from fedsim.results.reading import read_settings

TINY = {"backbone": "tiny-clip", "head": "text", "train": "head"}


@pytest.mark.parametrize("method", ["fedapt", "plan"])
def test_features_after_a_new_domain_came(tmp_path, method):
    """It is shown beside the others; it was no client of the run."""
    images = write_tree(tmp_path / "images", ["a", "b", "t"], ["cat", "dog"], 2)
    data = {"dataset": "folder", "root": str(images), "cache": str(tmp_path / "cache"), "image_size": 16}
    run = untrained_run(tmp_path / "seed0", method, data=data, model=TINY, run={"target": "t"})
    write_tree(images, ["c"], ["cat", "dog"], 2)
    features, _, domains = domain_features(read_settings(run), run / "best.safetensors", 2)
    assert sorted(set(domains)) == [0, 1, 2, 3]
    assert features.shape == (8, 16)
