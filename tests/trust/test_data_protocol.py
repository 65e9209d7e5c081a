"""The protocol: who trains on which images, also on a deployment's sites, changed data, and names of domains."""

import os
import shutil
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.apps.client import app
from fedsim.common.errors import UserError
from fedsim.data import benchmark, client_names, load_client
from fedsim.data.digits import digits_domain
from fedsim.data.fingerprint import difference, fingerprint, fingerprints
from fedsim.data.names import composed, matching, plain
from fedsim.methods.assembly import build_recipe
from fedsim.methods.recipe import values_of
from fedsim.records import Recorder
from fedsim.runs.conflicts import refuse_other_settings
from fedsim.runs.plan import complete, resolve
from fedsim.runs.workspace import Workspace
from fedsim.runtime.local_grid import InlineGrid
from fedsim.settings import DataSettings
from fedsim.settings.experiment import Experiment, from_table, parse_experiment, parse_override
from strategies.wire.handshake import Roster
from strategies.wire.reply_checks import RejectedReplyError
from strategies.wire.sites import check_names, check_site, read_site


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
    recorder = Recorder(folder)
    recorder.write_experiment(experiment.toml())
    recipe = values_of(build_recipe(experiment))
    recorder.write_environment({"data": fingerprints(experiment.data), "recipe": recipe})
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


DIGITS = DataSettings(dataset="digits", image_size=16)
SAID = {"client": "photo", "role": "source", "examples": 5, "class-counts": [2, 3], "holds": "a site"}
GOOD = {"data-images": 5, "data-content": "0123456789abcdef0123"}


def test_what_a_site_says_about_its_data():
    assert fingerprint(DIGITS, "rot15") == fingerprints(DIGITS)["rot15"]
    site, _ = read_site(7, {**SAID, **GOOD})
    assert site.data == {"images": 5, "content": "0123456789abcdef0123"}
    assert read_site(7, {**SAID, **GOOD, "data-environment": 3})[0].data["environment"] == 3
    assert read_site(7, SAID)[0].data == {}
    check_site(site, 2, "")
    for examples, counts in ((6, [2, 3]), (5, [2, 4])):
        with pytest.raises(UserError, match=f"{examples} examples but {sum(counts)} labels"):
            check_site(read_site(7, {**SAID, "examples": examples, "class-counts": counts})[0], 2, "")


@pytest.mark.parametrize("wrong", [
    {"data-images": 5}, {**GOOD, "data-images": "5"}, {**GOOD, "data-images": True},
    {**GOOD, "data-content": "<script>"}, {**GOOD, "data-content": "0" * 10_000}, {**GOOD, "data-nameless": "<script>"},
    {**GOOD, "data-environment": "3"}, {**GOOD, "data-environment": True},
])  # fmt: skip
def test_nonsense_about_data_is_refused(wrong):
    with pytest.raises(RejectedReplyError, match="describes its data in a wrong form") as error:
        read_site(7, {**SAID, **wrong})
    assert len(str(error.value)) < 300


def roster_of(plan, folder, client, role, frozen, names=None):
    grid = InlineGrid(app, 1)
    (node,) = grid.get_node_ids()
    own = {"domain": client, "site": "a", "role": role, "data-dir": "", "state-dir": str(folder)}
    grid.contexts[node].node_config = own
    config = {"experiment": plan.experiment.toml(), "state-dir": str(folder), "token": "0" * 16, "timeout": 60.0}
    return Roster(grid, ["rot15"], 10, config, client if role == "target" else "", None, frozen, names)


def planned(**sections):
    return resolve(Experiment.model_validate({"data": DIGITS.model_dump(), **sections}))


def frozen_experiment(seed=0):
    return planned(model={"train": "head"}, run={"seed": seed})


@pytest.mark.parametrize("role", ["source", "target"])
def test_a_site_whose_frozen_weights_differ_is_refused_by_name(tmp_path, role):
    plan = frozen_experiment()
    client = "rot15" if role == "source" else plan.experiment.run.target
    assert roster_of(plan, tmp_path, client, role, Workspace(plan).frozen_content).call(60.0, [client]) == []
    other = Workspace(frozen_experiment(seed=1)).frozen_content
    with pytest.raises(UserError, match=f"client '{client}' has other frozen weights than the server"):
        roster_of(plan, tmp_path, client, role, other).call(60.0, [client])
    with pytest.raises(UserError, match="other frozen weights"):  # of a site that says nothing
        check_site(read_site(7, SAID)[0], 2, "0" * 20)


@pytest.mark.parametrize("role", ["source", "target"])
def test_a_site_whose_classes_or_features_differ_is_refused_by_name(tmp_path, role):
    """Their numbers alone were compared, so that class 0 could be a dog at one site and a cat at another."""
    plan = planned()
    client = "rot15" if role == "source" else plan.experiment.run.target
    names = Workspace(plan).hashes_of_names()
    assert roster_of(plan, tmp_path, client, role, "", names).call(60.0, [client]) == []
    with pytest.raises(UserError, match=f"client '{client}' has other classes than the server"):
        roster_of(plan, tmp_path, client, role, "", {"classes": "0" * 20}).call(60.0, [client])
    site = read_site(7, {**SAID, "classes": "a" * 20, "features": "b" * 20})[0]
    check_names(site, {"classes": "a" * 20, "features": ""})
    check_names(read_site(7, SAID)[0], {"classes": "a" * 20, "features": "b" * 20})  # of an earlier version
    with pytest.raises(UserError, match="client 'photo' has other features than the server"):
        check_names(site, {"classes": "a" * 20, "features": "c" * 20})


def test_the_order_of_columns_is_part_of_their_names(tmp_path):
    hashes = []
    for header in ("age,chol,sick", "chol,age,sick"):
        folder = tmp_path / header
        folder.mkdir()
        for domain in "ab":
            (folder / f"{domain}.csv").write_text(f"{header}\n1,2,no\n3,4,yes\n5,6,no\n")
        data = {"dataset": "arrays", "root": str(folder), "columns": {"label": "sick"}}
        plan = resolve(Experiment.model_validate({"data": data, "model": {"backbone": "mlp"}}))
        hashes.append(Workspace(plan).hashes_of_names())
    assert hashes[0]["classes"] == hashes[1]["classes"]
    assert hashes[0]["features"] != hashes[1]["features"]


@pytest.mark.parametrize(("table", "said"), [
    *(({"name": name}, r"name: .*(folder|at least 1)")
      for name in ("../..", ".", "a/b", "/tmp/x", "a\\b", "a\nb", "", "x" * 300, "é" * 150)),
    *(({"run": {"label": label}}, r"run\.label: ") for label in ("../x", "..", "a/../../x", "/x", "a\0b")),
])  # fmt: skip
def test_names_and_labels_stay_in_the_output_folder(table, said):
    with pytest.raises(UserError, match=said):
        from_table(table)


def test_overrides_and_files_keep_texts_and_read_numbers():
    for text, value in (('run.target="20"', "20"), ("run.seed=20", 20), ("data.domains=['1', '2']", ["1", "2"])):
        assert parse_override(text) == (text.split("=")[0], value)
    experiment = parse_experiment('[data]\ndataset = "folder"\ndomains = [100, "200"]\n[run]\ntarget = 100\n')
    assert (experiment.data.domains, experiment.run.target) == (["100", "200"], "100")
    with pytest.raises(UserError, match=r"run\.target"):  # 1.10 would become 1.1
        parse_experiment("[run]\ntarget = 1.10\n")


@given(st.lists(st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=5), min_size=2, max_size=5))
def test_matching_never_confuses_letters(names):
    for name in names:
        assert composed(matching(name, names)) == composed(name)
        assert matching(name, [other for other in names if plain(other) != plain(name)]) is None


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_unicode_forms_of_a_folder_are_one_name(make_tree, tmp_path, form):
    on_disk, asked = unicodedata.normalize(form, "Élan"), unicodedata.normalize("NFD", "Élan")
    classes = [unicodedata.normalize(other, "café") for other in ("NFC", "NFD")]
    root = make_tree((on_disk, "photo"), (classes[0], "dog"))
    (root / "photo" / classes[0]).rename(root / "photo" / classes[1])
    own = {"dataset": "folder", "root": str(root), "cache": str(tmp_path / "c"), "image_size": 8}
    data = DataSettings(**own, domains=[asked, "photo"])
    assert (benchmark(data).domains, benchmark(data).classes) == (("photo", "Élan"), ("café", "dog"))
    assert [len(load_client(data, name).labels) for name in (asked, "photo")] == [8, 8]


def test_two_forms_of_one_name_and_names_that_are_no_text_are_refused(make_tree, tmp_path):
    names = [unicodedata.normalize(form, "Élan") for form in ("NFC", "NFD")]
    root = make_tree((*names, "photo"))
    with pytest.raises(UserError, match="two folders have the name 'Élan'"):
        benchmark(DataSettings(dataset="folder", root=str(root)))
    (root / names[0]).rename(root / "phot\udcff")
    with pytest.raises(UserError, match="is not text in UTF-8"):
        benchmark(DataSettings(dataset="folder", root=str(root)))
