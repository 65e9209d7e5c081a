"""What runs rest on beside their settings: other images are refused, other threads and versions are said."""

import json

import pytest
from invented import pacs_experiment, write_run
from support import run_small, small_experiment

from fedsim.common.errors import UserError
from fedsim.data.fingerprint import fingerprints
from fedsim.methods.assembly import build_recipe
from fedsim.methods.variants import recipe_record
from fedsim.results import Recorder, choose_runs, compare, read_runs
from fedsim.results.differences import differing_parts
from fedsim.results.plots import run_labels
from fedsim.run.conflicts import refuse_other_settings
from fedsim.settings import DataSettings
from fedsim.settings.experiment import read_experiment

PHOTO = {"images": 1670, "content": "aa"}


def two_runs(root, first, second, method="csac", seed=0):
    """Two runs on disk with these environments; the second is of another method, or of another seed."""
    for environment, name, number in ((first, "fedavg", 0), (second, method, seed)):
        folder = write_run(root, pacs_experiment(name, "photo", number))
        Recorder(folder).write_environment(environment)
    return read_runs(root / "pacs")


def notes_of(runs):
    return [note for note in compare(runs).notes if note.startswith("Not the same")]


@pytest.mark.parametrize("record", ["data", "server_data"])
@pytest.mark.parametrize("other", [{"images": 1669, "content": "bb"}, {"images": 1670, "content": "bb"}])
def test_runs_on_other_images_under_the_same_name_are_not_compared(tmp_path, record, other):
    runs = two_runs(tmp_path, {record: {"photo": PHOTO}}, {record: {"photo": other}})
    with pytest.raises(UserError, match="different images under the name 'photo'") as caught:
        compare(runs)
    assert "1,670 in fedavg/photo/seed0" in str(caught.value) or "1,670 in csac/photo/seed0" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "second",
    [
        {"data": {"photo": PHOTO, "sketch": {"images": 3, "content": "cc"}}},  # a domain that only one run has
        {"data": {}},
        {},
    ],
)
def test_the_same_images_or_an_older_record_are_compared_without_a_word(tmp_path, second):
    runs = two_runs(tmp_path, {"data": {"photo": PHOTO}}, second)
    assert len(compare(runs).methods) == 2
    assert notes_of(runs) == []


@pytest.mark.parametrize("runtime", ["inline", "deployment"])
def test_a_folder_that_came_between_two_seeds_is_another_federation(tmp_path, runtime):
    """Where the settings name no domains, all folders in the data root are clients."""
    prints = {"photo": PHOTO, "sketch": {"images": 3929, "content": "cc"}}
    for seed, came in enumerate(({}, {"text": {"images": 3, "content": "dd"}})):
        experiment = pacs_experiment("fedavg", "photo", seed, data={"dataset": "folder"}, run={"runtime": runtime})
        Recorder(write_run(tmp_path, experiment)).write_environment({"data": prints | came})
    if runtime == "deployment":  # its record has only the domains whose sites have answered
        assert len(compare(read_runs(tmp_path)).methods) == 1
        return
    with pytest.raises(UserError, match=r"seed1 did not have the domains of .*seed0 \(new in data.root: text\)"):
        compare(read_runs(tmp_path))


@pytest.mark.parametrize("split_seed", [None, 7])
def test_seeds_on_other_images_are_not_averaged(tmp_path, split_seed):
    """A fingerprint is of all images of a domain, whatever images a seed draws from them."""
    other = {"data": {"photo": {"images": 1670, "content": "bb"}}}
    runs = two_runs(tmp_path, {"data": {"photo": PHOTO}}, other, "fedavg", seed=1)
    if split_seed:
        runs.experiments = {run: one.replace(data={"split_seed": 7}) for run, one in runs.experiments.items()}
    with pytest.raises(UserError, match="different images under the name 'photo'"):
        compare(runs)


def test_a_reader_from_outside_may_draw_the_images_by_the_seed(tmp_path):
    other = {"data": {"photo": {"images": 1670, "content": "bb"}}}
    runs = two_runs(tmp_path, {"data": {"photo": PHOTO}}, other, seed=1)
    mine = {"dataset": "mine:data", "image_size": 224}
    runs.experiments = {run: one.replace(data=mine) for run, one in runs.experiments.items()}
    assert len(compare(runs).methods) == 2


@pytest.mark.parametrize("dataset", ["digits", "digit-masks"])
def test_fingerprints_of_drawn_images_are_the_same_for_every_seed(dataset):
    """Rotated MNIST needs files that are not here; its hash is of all of MNIST, too."""
    found = [fingerprints(DataSettings(dataset=dataset, split_seed=seed)) for seed in (0, 1)]
    assert found[0] == found[1]


def test_threads_versions_and_revisions_that_differ_are_said(tmp_path):
    first = {"threads": 1, "packages": {"torch": "2.12.0", "ray": "2.1"}, "git_commit": "a" * 40, "python": "3.11.7"}
    second = {"threads": 2, "packages": {"torch": "2.13.0", "ray": "2.2"}, "git_commit": "a" * 40, "git_dirty": True}
    (note,) = notes_of(two_runs(tmp_path, first, second))
    for text in (
        "threads 2 (csac/photo/seed0), 1 (fedavg/photo/seed0)",
        "torch 2.13.0 (csac/photo/seed0), 2.12.0 (fedavg/photo/seed0)",
        "revision of fedsim aaaaaaa with changes (csac/photo/seed0), aaaaaaa (fedavg/photo/seed0)",
    ):
        assert text in note
    assert "ray" not in note  # it moves messages and computes nothing
    assert "Python" not in note  # only one run has recorded it


def test_real_runs_record_what_is_compared(tmp_path):
    """Two small runs with other numbers of threads; the same images, the same versions."""
    for name, threads in (("fedavg", 1), ("fedprox", 2)):
        run_small(small_experiment(tmp_path, {"name": name}, train={"rounds": 1}, run={"threads": threads}))
    (note,) = notes_of(read_runs(tmp_path))
    assert note.startswith("Not the same for all runs: threads ")
    assert note.count("threads") == 1
    assert "torch" not in note


def test_a_damaged_record_is_one_line_and_names_the_file(tmp_path):
    """A copy that was cut off must not end in a traceback."""
    runs = two_runs(tmp_path, {}, {})
    (tmp_path / "pacs" / "csac" / "photo" / "seed0" / "environment.json").write_text('{"threads": ')
    with pytest.raises(UserError, match=r"csac/photo/seed0/environment\.json: ") as caught:
        compare(runs)
    assert "\n" not in str(caught.value)


def recipe(**fields):
    return {"recipe": {"terms.proximal": fields}}


def test_one_row_has_one_recipe(tmp_path):
    """A default that changed between versions gives another recipe under the same name; a new field does not."""
    same = two_runs(tmp_path / "a", recipe(mu=0.1), recipe(mu=0.1, new=3), "fedavg", seed=1)
    assert len(compare(same).methods) == 1
    other = two_runs(tmp_path / "b", recipe(mu=0.1), recipe(mu=0.2), "fedavg", seed=1)
    with pytest.raises(UserError, match=r"fedavg was not the same recipe .*: terms\.proximal\.mu \(0\.1 \| 0\.2\)"):
        compare(other)
    more = two_runs(tmp_path / "c", recipe(), {"recipe": {"terms.proximal": {}, "fuse.krum": {}}}, "fedavg", seed=1)
    with pytest.raises(UserError, match=r"fuse\.krum \(not in both\)"):
        compare(more)
    apart = two_runs(tmp_path / "d", recipe(mu=0.1), recipe(mu=0.2))
    assert len(compare(apart).methods) == 2


def test_one_row_and_seed_have_one_set_of_frozen_weights(tmp_path):
    """Another weights file at the same path gives other frozen tensors; drawn weights and other seeds may differ."""

    def compared(name, seeds, **model):
        for (target, content), seed in zip({"photo": "aa", "sketch": "bb"}.items(), seeds):
            folder = write_run(tmp_path / name, pacs_experiment("fedavg", target, seed, model=model))
            Recorder(folder).write_environment({"frozen": content})
        return compare(read_runs(tmp_path / name / "pacs"))

    with pytest.raises(UserError, match=r"fedavg had other frozen weights in fedavg/photo/seed0 than in .*'imagenet'"):
        compared("same", (0, 0))
    assert compared("seeds", (0, 1))
    assert compared("drawn", (0, 0), weights="none")


def test_a_run_of_another_version_s_recipe_is_not_continued(tmp_path):
    """The settings are the same words, but a default has changed since."""
    experiment = small_experiment(tmp_path, "fedprox", train={"rounds": 1})
    folder, _ = run_small(experiment)
    file = folder / "environment.json"
    table = json.loads(file.read_text())
    assert table["recipe"]["terms.proximal"] == {"mu": 0.1}
    refuse_other_settings(folder, experiment, build_recipe(experiment))
    table["recipe"]["terms.proximal"]["mu"] = 0.01
    file.write_text(json.dumps(table))
    with pytest.raises(UserError, match=r"another recipe.*terms\.proximal\.mu \(0\.01 \| 0\.1\)"):
        refuse_other_settings(folder, experiment, build_recipe(experiment))


def test_a_grid_over_a_part_does_not_rename_the_methods_without_it(tmp_path):
    """[parts.X] stands in the settings of every run, but it is no setting of a method whose recipe has no X."""
    key = "parts.semantic_calibration.align"
    for align in ("cross", "logits"):
        parts = {"semantic_calibration": {"align": align}}
        folder = write_run(tmp_path / align, pacs_experiment("csac", "photo").replace(parts=parts))
        Recorder(folder).write_environment({"recipe": {"client.semantic_calibration": {"align": align}}})
    parts = {"semantic_calibration": {"align": "logits"}}
    for seed, environment in enumerate([{"recipe": {"client.supervised_step": {}}}, {}]):  # one is of an older version
        folder = write_run(tmp_path, pacs_experiment("fedavg", "photo", seed).replace(parts=parts))
        Recorder(folder).write_environment(environment)
    runs = read_runs(tmp_path)
    result = compare(runs, baseline="fedavg", by=[key])
    assert sorted(result.methods["label"]) == ["csac (align=cross)", "csac (align=logits)", "fedavg"]
    assert result.baseline == "fedavg"
    assert set(run_labels(runs).values()) == set(result.methods["label"])


@pytest.mark.parametrize(
    ("used", "recorded", "alike"),
    [(False, True, True), (True, True, False), (False, False, False)],
)
def test_runs_may_differ_in_a_part_that_none_of_them_has(tmp_path, used, recorded, alike):
    """A line of [parts] for one more method does not part the runs that were there before; an older record does."""
    for method, parts in (("fedavg", {}), ("fedprox", {"xan": {"stages": [1, 2]}})):
        folder = write_run(tmp_path, pacs_experiment(method, "photo").replace(parts=parts))
        recipe = {"client.supervised_step": {}} | ({"model.xan": {}} if used and method == "fedprox" else {})
        Recorder(folder).write_environment({"recipe": recipe} if recorded or method == "fedavg" else {})
    runs = read_runs(tmp_path)
    if alike:
        assert sorted(compare(runs, baseline="fedavg").methods["label"]) == ["fedavg", "fedprox"]
        return
    with pytest.raises(UserError, match=r"more than method, target and seed: parts\.xan\.stages"):
        compare(runs)


def test_a_setting_that_repeats_a_default_makes_no_row_of_its_own(tmp_path):
    """The recorded recipes tell; without them, or where they differ, the settings stand in the label."""
    words = [{}, {"proximal": {"mu": 0.1}}, {"proximal": {"mu": 0.5}}]
    mus = [0.1, 0.1, 0.5]
    for number, (own, mu) in enumerate(zip(words, mus)):
        experiment = pacs_experiment("fedprox", "photo", number, method={"name": "fedprox", **own})
        Recorder(write_run(tmp_path, experiment)).write_environment(recipe(mu=mu))
    run = "fedprox/photo/seed{}"
    labels = read_runs(tmp_path / "pacs").labels()
    assert [labels[run.format(number)] for number in range(3)] == ["fedprox", "fedprox", "fedprox@proximal.mu=0.5"]
    repeated = choose_runs(read_runs(tmp_path / "pacs"), seeds=[0, 1])
    assert set(repeated.labels().values()) == {"fedprox"}
    result = compare(repeated)
    assert len(result.methods) == 1
    assert result.methods["seeds"].iloc[0] == 2
    (tmp_path / "pacs/fedprox/photo/seed1/environment.json").unlink()
    old = read_runs(tmp_path / "pacs").labels()
    assert old[run.format(1)] == "fedprox@proximal.mu=0.1"


def test_published_numbers_stay_beside_a_repeated_default(tmp_path):
    """A label with settings would be a variant, beside which no paper's number is shown."""
    for number, own in enumerate([{}, {"proximal": {"mu": 0.1}}]):
        settings = {"name": "fedprox", **own}
        experiment = read_experiment("pacs", ["run.target=photo", f"run.seed={number}"], "fedig")
        experiment = experiment.replace(method=settings)
        Recorder(write_run(tmp_path, experiment)).write_environment(recipe(mu=0.1))
    result = compare(read_runs(tmp_path))
    assert set(result.published["method"]) == {"fedprox"}, result.notes


def test_a_value_of_parts_that_repeats_a_default_is_no_difference(tmp_path):
    """The recorded recipe of the run that left it out has it; an older record has none, and the runs differ."""
    for seed, parts in enumerate([{}, {"semantic_calibration": {"align": "cross"}}]):
        folder = write_run(tmp_path, pacs_experiment("csac", "photo", seed).replace(parts=parts))
        Recorder(folder).write_environment({"recipe": {"client.semantic_calibration": {"align": "cross"}}})
    runs = read_runs(tmp_path)
    assert compare(runs).methods["seeds"].tolist() == [2]
    assert compare(runs, by=["parts.semantic_calibration.align"]).methods["label"].tolist() == ["csac (align=cross)"]
    assert set(run_labels(runs).values()) == {"csac"}
    Recorder(tmp_path / "pacs/csac/photo/seed0").write_environment({})
    with pytest.raises(UserError, match=r"parts\.semantic_calibration\.align \(default \| cross\)"):
        compare(read_runs(tmp_path))


def test_a_whole_number_repeats_the_default_too(tmp_path):
    """`mu = 1` is MOON's own 1.0, which the record has."""
    for seed, parts in enumerate([{}, {"model_contrast": {"mu": 1}}]):
        folder = write_run(tmp_path, pacs_experiment("moon", "photo", seed).replace(parts=parts))
        Recorder(folder).write_environment({"recipe": {"terms.model_contrast": {"T": 0.5, "mu": 1.0}}})
    runs = read_runs(tmp_path)
    assert compare(runs).methods["seeds"].tolist() == [2]
    assert compare(runs, by=["parts.model_contrast.mu"]).methods["label"].tolist() == ["moon (mu=1.0)"]


@pytest.mark.parametrize(("align", "recorded", "said"), [
    ("cross", True, ""), ("logits", True, "align is logits, there cross"), ("cross", False, "is cross, there default"),
])  # fmt: skip
def test_published_numbers_stay_beside_a_value_that_repeats_a_default(tmp_path, align, recorded, said):
    """A grid over a part writes its own value too, which no preset writes."""
    words = ["run.target=photo", "method.name=csac", f"parts.semantic_calibration.align={align}"]
    experiment = read_experiment("pacs", words, "csac")
    found = recipe_record(experiment, build_recipe(experiment))
    assert found["defaults"]["parts"]["semantic_calibration"]["align"] == "cross"
    Recorder(write_run(tmp_path, experiment)).write_environment(found if recorded else {"recipe": found["recipe"]})
    result = compare(read_runs(tmp_path))
    assert ("CSAC Table I" in set(result.published["source"])) == (not said), result.notes
    assert said in " ".join(note for note in result.notes if "CSAC beside csac" in note)


def test_a_part_that_computes_something_else_now_is_another_recipe():
    """`recompute` has a field since it pools groups; before, it was a cumulative average over evaluation batches."""
    old, new = {"infer.recompute": {}}, {"infer.recompute": {"batch": 64}}
    assert differing_parts(old, new) == ["infer.recompute (it computes something else than in earlier versions)"]
    assert differing_parts(old, old) == differing_parts(new, new) == []
