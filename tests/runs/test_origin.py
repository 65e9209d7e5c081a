"""Where weights come from: a copy of a run's model is guarded like the file in the run's folder."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from support import interrupt, run_small, tiny_experiment

from clients.augment.cross_client_style import CrossClientStyle
from fedsim.common.errors import UserError
from fedsim.methods.table import METHODS
from fedsim.runs.checkpoint import FOLDER, write_arrays
from fedsim.runs.origin import Origin, metadata_of, note_of, refuse_seen, round_of, seen_as
from fedsim.settings.run import NO_TARGET

ART = {"images": 10, "content": "aa", "nameless": "bb"}
PHOTO = {"images": 12, "content": "cc", "nameless": "dd"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run on four rotations, of which rot45 was unseen."""
    experiment = tiny_experiment(tmp_path_factory.mktemp("first"), "fedbn", run={"keep_personal": True})
    return run_small(experiment)[0]


@pytest.mark.parametrize("name", ["last", "best", "personal-rot0"])
def test_a_copy_is_guarded_like_the_original(name, trained, tmp_path):
    """Only the metadata of the copied file say what it was trained on."""
    copy = tmp_path / "somewhere" / "else.safetensors"
    copy.parent.mkdir()
    shutil.copyfile(trained / f"{name}.safetensors", copy)
    model = {"weights": str(copy)}
    run_small(tiny_experiment(tmp_path / "same", model=model))  # the same domain is unseen
    words = r"model.weights: .*else.safetensors is of a run that trained on 'rot0', which would be unseen here"
    with pytest.raises(UserError, match=words):
        run_small(tiny_experiment(tmp_path / "other", model=model, run={"target": "rot0"}))


def test_weights_of_a_run_on_all_domains_are_for_such_runs_alone(tmp_path):
    everyone = {"target": NO_TARGET}
    shipped, _ = run_small(tiny_experiment(tmp_path / "all", run=everyone))
    model = {"weights": str(shipped / "last.safetensors")}
    run_small(tiny_experiment(tmp_path / "more", model=model, run=everyone))
    with pytest.raises(UserError, match="of a run that trained on 'rot45', which would be unseen here"):
        run_small(tiny_experiment(tmp_path / "other", model=model))


def test_a_chain_of_runs_keeps_all_origins(trained, tmp_path):
    """The second run has no data of rot0, and its model knows rot0 all the same."""
    weights = {"weights": str(trained / "last.safetensors")}
    data = {"domains": ["rot15", "rot30", "rot45"]}
    second, _ = run_small(tiny_experiment(tmp_path / "second", model=weights, data=data))
    note = note_of(second / "last.safetensors")
    assert [origin.target for origin in note.origins] == ["rot45", "rot45"]
    assert sorted(note.origins[0].domains) == ["rot15", "rot30", "rot45"]
    assert "rot0" in note.origins[1].domains
    shutil.copyfile(second / "last.safetensors", tmp_path / "third.safetensors")
    with pytest.raises(UserError, match="trained on 'rot0'"):
        run_small(
            tiny_experiment(
                tmp_path / "third", model={"weights": str(tmp_path / "third.safetensors")}, run={"target": "rot0"}
            )
        )


@pytest.mark.parametrize("name", ["last", "best", "personal-rot0"])
def test_every_file_of_tensors_says_it(name, trained):
    note = note_of(trained / f"{name}.safetensors")
    (origin,) = note.origins
    assert origin.target == "rot45"
    assert set(origin.domains) == {"rot0", "rot15", "rot30", "rot45"}
    assert note.round in (1, 2)


def test_so_do_the_files_of_a_rule_and_of_a_run_that_was_stopped(tmp_path):
    folder = interrupt(tiny_experiment(tmp_path, "copa", 3), 1)
    files = [folder / "best.safetensors", folder / "inference" / "best.safetensors"]
    files += list((folder / FOLDER).glob("arrays-*.safetensors"))
    assert len(files) == 3
    for file in files:
        assert note_of(file).origins[0].target == "rot45"
        assert round_of(file) == 1


def test_weights_of_parts_are_guarded_too(trained, tmp_path):
    """CCST's encoder is a file of its own; where it comes from is looked at like model.weights."""
    files = dict.fromkeys(("encoder_weights", "decoder_weights"), str(trained / "last.safetensors"))
    experiment = tiny_experiment(tmp_path)
    recipe = replace(METHODS["ccst"], augment=CrossClientStyle(encoder="vgg", **files))
    refuse_seen(experiment, recipe, {})
    words = r"method.cross_client_style.encoder_weights: .* trained on 'rot0'"
    with pytest.raises(UserError, match=words):
        refuse_seen(experiment.replace(run={"target": "rot0"}), recipe, {})


@pytest.mark.parametrize(("target", "unseen", "name"), [
    ("art", None, "art"),  # of a deployment nothing but the name is known
    ("photo", None, ""),
    ("art", ART, "art"),
    ("paintings", {**ART, "content": "zz"}, "art"),  # the same images under another name and with other file names
    ("paintings", {**ART, "nameless": "zz"}, ""),  # rotations of the same digits have one content
    ("art", {**ART, "content": "zz", "nameless": "zz"}, ""),  # other images under the same name
    ("art", PHOTO, ""),  # the unseen domain of both runs
])  # fmt: skip
def test_the_images_decide_where_they_are_known(target, unseen, name):
    origin = Origin(target="photo", domains={"art/0": ART, "photo": PHOTO})
    assert seen_as(origin, target, unseen) == name


def test_equal_models_are_equal_bytes_and_foreign_metadata_are_one_line(tmp_path):
    origin = Origin(target="photo", domains={"photo": PHOTO, "art": ART})
    metadata = metadata_of(3, [origin])
    assert list(metadata) == ["fedsim"]
    files = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for file in files:
        write_arrays(file, {"w": np.zeros(2)}, metadata)
    assert files[0].read_bytes() == files[1].read_bytes()
    write_arrays(files[0], {"w": np.zeros(2)}, {"fedsim": "[]"})
    with pytest.raises(UserError, match="its metadata are not what a run writes"):
        note_of(files[0])
    write_arrays(files[0], {"w": np.zeros(2)}, {"format": "pt"})
    assert note_of(files[0]) is None
