"""The protocol: no client trains on validation or test images, seeds choose the data, and changed data are noticed."""

import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.common.errors import UserError
from fedsim.data import client_names, load_client
from fedsim.data.digits import digits_domain
from fedsim.data.fingerprint import difference, fingerprints
from fedsim.methods.assembly import build_recipe
from fedsim.run.conflicts import refuse_other_settings
from fedsim.run.plan import complete
from fedsim.settings import DataSettings
from fedsim.settings.experiment import Experiment


def upright(data: DataSettings, client, indices: np.ndarray) -> set[bytes]:
    """The contents of a client's images: the images with the same indices in the domain without rotation."""
    base = load_client(data, "/".join(["rot0", *client.client.split("/")[1:]])).images
    return {base[index].tobytes() for index in indices}


@settings(max_examples=12)
@given(
    st.fixed_dictionaries({
        "split": st.sampled_from(["random", "stratified"]), "split_seed": st.integers(0, 50),
        "clients_per_domain": st.sampled_from([1, 2, 5]), "partition": st.sampled_from(["iid", "dirichlet"]),
        "fraction": st.sampled_from([1.0, 0.5]), "holdout": st.sampled_from([0.1, 0.2]),
    })
)  # fmt: skip
def test_no_validation_image_of_a_client_trains_another(choices):
    data = DataSettings(dataset="digits", image_size=8, **choices)
    loaded = [load_client(data, name) for name in client_names(data, "rot75")]
    training = set.union(*(upright(data, client, client.train) for client in loaded))
    validation = set.union(*(upright(data, client, client.validation) for client in loaded))
    tested = digits_domain(0, 8, data.split_seed, apart=True)[0]
    assert not training & validation
    assert not (training | validation) & {image.tobytes() for image in tested}


def test_the_seed_of_splits_is_the_runs_unless_it_is_fixed():
    drawn = [Experiment.model_validate({"run": {"seed": seed}}) for seed in (0, 1, 1)]
    parts = [load_client(experiment.data, "rot0") for experiment in drawn]
    assert parts[0].train.tolist() != parts[1].train.tolist() == parts[2].train.tolist()
    assert (parts[0].images != parts[1].images).any()
    assert drawn[0].settings_hash() == drawn[1].settings_hash()  # seeds are repetitions of one setting
    for split_seed, expected in ((7, (7, 7, 7)), (-1, (5, 5, 6))):
        shared = DataSettings(split_seed=split_seed)
        experiment = Experiment.model_validate({"data": shared, "run": {"seed": 5}})
        again, moved = Experiment.model_validate(experiment.model_dump()), experiment.replace(run={"seed": 6})
        assert tuple(each.data.seed_of_splits for each in (experiment, again, moved)) == expected
        assert shared.seed_of_splits == max(split_seed, 0)  # an experiment does not reach into settings it was given


def test_a_fingerprint_knows_the_content_and_not_the_place(tree_settings, tmp_path):
    data = tree_settings()
    before = fingerprints(data)
    load_client(data, "photo")  # now from the cache
    assert fingerprints(data) == before
    assert before["photo"]["images"] == 8
    moved = shutil.copytree(tmp_path / "images", tmp_path / "moved", copy_function=shutil.copyfile)  # other times
    assert fingerprints(data.model_copy(update={"root": str(moved)})) == before
    older = {name: {key: own[key] for key in ("images", "content")} for name, own in before.items()}
    assert difference(older, before) == ""  # records of older versions do not number the domains


def test_a_fingerprint_notices_other_data_of_the_same_size(tree_settings, tmp_path):
    data = tree_settings()
    before = fingerprints(data)
    cat, dog = (tmp_path / "images" / "photo" / name / "000.png" for name in ("cat", "dog"))
    kept, status = cat.read_bytes(), cat.stat()
    cat.write_bytes(kept[:-20] + bytes(20))  # the same size and time
    os.utime(cat, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert difference(before, fingerprints(data)).startswith("photo: 8 images as before, but other")
    cat.write_bytes(dog.read_bytes())  # the same pixels under other labels
    dog.write_bytes(kept)
    assert difference(before, fingerprints(data)).startswith("photo: 8 images as before, but other")
    cat.unlink()
    assert difference(before, fingerprints(data)).startswith("photo: 8 images then, 7 now")


@pytest.fixture
def finished(tree_settings, tmp_path):
    experiment = complete(Experiment.model_validate({"data": tree_settings().model_dump(), "run": {"target": "photo"}}))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "experiment.toml").write_text(experiment.toml())
    (folder / "environment.json").write_text(json.dumps({"data": fingerprints(experiment.data)}))
    return experiment, folder, lambda asked: refuse_other_settings(folder, asked, build_recipe(asked))


def test_a_finished_run_on_other_data_is_not_taken_for_this_one(finished, tmp_path):
    """Another root with the same images is no other data."""
    experiment, _, again = finished
    shutil.copytree(tmp_path / "images", tmp_path / "other")
    moved = experiment.replace(data={"root": str(tmp_path / "other")})
    for asked in (experiment, moved):
        again(asked)
    (tmp_path / "other" / "art" / "cat" / "000.png").unlink()
    with pytest.raises(UserError, match=r"^[^\n]*other data \(art: 8 images then, 7 now\)[^\n]*$"):
        again(moved)
