"""What runs rest on besides their settings: other images are refused, other threads and versions are said."""

import json
from dataclasses import replace

import pytest
from invented import notes_of, pacs_experiment, table_of_runs, write_run
from support import run_small, tiny_experiment

from fedsim.analysis import compare
from fedsim.analysis.plots import run_labels
from fedsim.analysis.provenance import unit_of
from fedsim.common.errors import UserError
from fedsim.data.fingerprint import fingerprints
from fedsim.methods.assembly import build_recipe
from fedsim.records import Recorder, choose_runs, read_runs
from fedsim.runs.conflicts import refuse_other_settings
from fedsim.settings import DataSettings

PHOTO = {"photo": {"images": 1670, "content": "aa"}}
OTHER = {"photo": {"images": 1669, "content": "bb"}}
SKETCH = {"sketch": {"images": 3929, "content": "cc"}}
SEED_1, CSAC, ON_SKETCH = {"seed": 1}, {"method": "csac"}, {"target": "sketch"}  # what the second of two runs is
FOLDER = {"dataset": "folder"}
IMAGES = r"different images under the name 'photo' \(1,6(70|69) in .*, 1,6(70|69) in "
CODED = {"data": {"dataset": "arrays", "columns": {"categories": ["cp"]}}}  # whose values are those of the sources
ALIGN = "parts.semantic_calibration.align"


def test_what_an_example_is_called_follows_from_the_records():
    rows, signals = ({"tensors": {"features": features}} for features in (["age"], []))
    assert unit_of({"a": rows, "b": rows}) == "rows"
    assert unit_of({"a": signals}) == unit_of({"a": rows, "b": {}}) == "examples"
    assert unit_of({"a": {}}) == unit_of({}) == "images"


def recorded(root, experiment, environment=None):
    folder = write_run(root, experiment.replace(train={"rounds": 1}))
    Recorder(folder).write_environment(environment or {})
    return folder


def two_runs(root, first, second, method="fedavg", target="photo", seed=0, **sections):
    """FedAvg's run on photo with seed 0, and another one, of which these environments alone are on disk."""
    accuracies = {"fedavg": {"photo": {0: 0.5}}}
    accuracies.setdefault(method, {}).setdefault(target, {})[seed] = 0.6
    own = {name: lambda *run, name=name: pacs_experiment(name, *run, **sections) for name in accuracies}
    runs = replace(table_of_runs(accuracies, own), folder=root)
    for run, environment in zip(runs.experiments, (first, second)):
        Recorder(root / run).write_environment(environment)
    return runs


def recipe(**fields):
    return {"recipe": {"terms.proximal": fields}}


def calibration(align):
    return {"semantic_calibration": {"align": align}}


@pytest.mark.parametrize(("first", "second", "other", "said"), [
    ({"data": PHOTO}, {"data": OTHER}, CSAC, IMAGES), ({"server_data": PHOTO}, {"server_data": OTHER}, CSAC, IMAGES),
    # A fingerprint is of all images of a domain, whatever images a seed draws from them.
    ({"data": PHOTO}, {"data": OTHER}, SEED_1, IMAGES),
    ({"data": PHOTO}, {"data": PHOTO | SKETCH}, CSAC, ""), ({"data": PHOTO}, {"data": {}}, CSAC, ""),
    ({"data": PHOTO}, {}, CSAC, ""),
    ({"data": PHOTO}, {"data": OTHER}, ON_SKETCH | CODED, ""),
    ({"data": PHOTO}, {"data": OTHER}, SEED_1 | CODED, IMAGES),
    # Where the settings name no domains, all folders in the data root are clients; of a deployment only the domains
    # are recorded whose sites have answered.
    ({"data": PHOTO}, {"data": PHOTO | SKETCH}, SEED_1 | {"data": FOLDER}, "seed1 did not have .*: sketch"),
    ({"data": PHOTO}, {"data": PHOTO | SKETCH}, SEED_1 | {"data": FOLDER, "run": {"runtime": "deployment"}}, ""),
    # A default that changed between versions gives another recipe under the same name; a new field does not.
    (recipe(mu=0.1), recipe(mu=0.1, new=3), SEED_1, ""),
    (recipe(mu=0.1), recipe(mu=0.2), SEED_1, r"fedavg was not the same recipe .*proximal\.mu \(0\.1 \| 0\.2\)"),
    (recipe(), {"recipe": {"terms.proximal": {}, "fuse.krum": {}}}, SEED_1, r"fuse\.krum \(not in both\)"),
    # Another weights file at the same path gives other frozen tensors; drawn weights and other seeds may differ.
    ({"frozen": "aa"}, {"frozen": "bb"}, ON_SKETCH, "fedavg had other frozen weights in fedavg/.* in .*'imagenet'"),
    ({"frozen": "aa"}, {"frozen": "bb"}, ON_SKETCH | {"model": {"weights": "none"}}, ""),
])  # fmt: skip
def test_what_runs_must_have_in_common(tmp_path, first, second, other, said):
    runs = two_runs(tmp_path, first, second, **other)
    if said:
        with pytest.raises(UserError, match=said):
            compare(runs)
    else:
        comparison = compare(runs)
        assert len(comparison.methods) == 1 + (other == CSAC)
        assert not notes_of(comparison, "Not the same")


def test_drawn_images_differ_with_a_seed_where_a_reader_from_outside_draws_them(tmp_path):
    runs = two_runs(tmp_path, {"data": PHOTO}, {"data": OTHER}, "csac", seed=1)
    mine = {"dataset": "mine:data", "image_size": 224}
    runs.experiments = {run: one.replace(data=mine) for run, one in runs.experiments.items()}
    assert len(compare(runs).methods) == 2
    for dataset in ("digits", "digit-masks"):
        found = [fingerprints(DataSettings(dataset=dataset, split_seed=seed)) for seed in (0, 1)]
        assert found[0] == found[1]


def test_threads_versions_and_revisions_that_differ_are_said(tmp_path):
    """Ray moves messages and computes nothing, and only one run has recorded Python."""
    first = {"threads": 1, "packages": {"torch": "2.12.0", "ray": "2.1"}, "git_commit": "a" * 40, "python": "3.11.7"}
    second = {"threads": 2, "packages": {"torch": "2.13.0", "ray": "2.2"}, "git_commit": "a" * 40, "git_dirty": True}
    (note,) = notes_of(compare(two_runs(tmp_path, first, second, "csac")), "Not the same")
    for text in (
        "threads 1 (fedavg/photo/seed0), 2 (csac/photo/seed0)",
        "torch 2.12.0 (fedavg/photo/seed0), 2.13.0 (csac/photo/seed0)",
        "revision of fedsim aaaaaaa (fedavg/photo/seed0), aaaaaaa with changes (csac/photo/seed0)",
    ):
        assert text in note
    assert "ray" not in note
    assert "Python" not in note


def test_a_real_run_records_what_is_compared_and_another_recipe_is_not_continued(tmp_path):
    """The settings are the same words, but a default has changed between two versions."""
    experiment = tiny_experiment(tmp_path, "fedprox", rounds=1)
    folder, _ = run_small(experiment)
    table = json.loads((folder / "environment.json").read_text())
    assert (table["threads"], table["recipe"]["terms.proximal"]) == (1, {"mu": 0.1})
    assert table["data"] == fingerprints(experiment.data)
    refuse_other_settings(folder, experiment, build_recipe(experiment))
    table["recipe"]["client.supervised_step"] = table["recipe"].pop("step.supervised_step")  # the slot's former name
    (folder / "environment.json").write_text(json.dumps(table))
    refuse_other_settings(folder, experiment, build_recipe(experiment))
    table["recipe"]["terms.proximal"]["mu"] = 0.01
    (folder / "environment.json").write_text(json.dumps(table))
    with pytest.raises(UserError, match=r"another recipe.*terms\.proximal\.mu \(0\.01 \| 0\.1\)"):
        refuse_other_settings(folder, experiment, build_recipe(experiment))


def test_a_grid_over_a_part_does_not_rename_the_methods_without_it(tmp_path):
    """[parts.X] stands in the settings of every run, but it is no setting of a method whose recipe has no X."""
    for align in ("cross", "logits"):
        experiment = pacs_experiment("csac", "photo").replace(parts=calibration(align))
        recorded(tmp_path / align, experiment, {"recipe": {"client.semantic_calibration": {"align": align}}})
    for seed, align in enumerate(["cross", "logits"]):
        own = pacs_experiment("fedavg", "photo", seed).replace(parts=calibration(align))
        recorded(tmp_path, own, {"recipe": {"client.supervised_step": {}}})
    runs = read_runs(tmp_path)
    assert compare(choose_runs(runs, ["fedavg"])).methods["seeds"].tolist() == [2]
    result = compare(runs, baseline="fedavg", by=[ALIGN])
    assert sorted(result.methods["label"]) == ["csac (align=cross)", "csac (align=logits)", "fedavg"]
    assert result.baseline == "fedavg"
    assert set(run_labels(runs, [ALIGN]).values()) == set(result.methods["label"])
