"""Groups of images (patients, slides, sequences): which images validate, and that no group is in two parts."""

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import run_small, small_experiment

from fedsim.common.errors import UserError
from fedsim.data import benchmark, check_partitions, client_names, load_client, load_target, load_unlabelled
from fedsim.data.client_data import domain_of
from fedsim.data.fingerprint import fingerprints
from fedsim.data.groups import (
    Groups,
    adapting_groups,
    groups_of,
    partition_groups,
    split_groups,
    subset_of_groups,
)
from fedsim.data.inspect import inspect
from fedsim.data.reader import reader
from fedsim.data.splits import cut_by_shares, shuffled
from fedsim.runs.plan import resolve
from fedsim.settings import DataSettings
from fedsim.settings.experiment import read_experiment

quick = settings(max_examples=40, deadline=None)
labelled = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=12, max_size=150)


def test_groups_have_sizes_and_the_class_of_most_images():
    groups = groups_of(np.array([7, 3, 7, 7, 3, 9]), np.array([1, 2, 0, 1, 0, 3]))
    assert groups.numbers.tolist() == [1, 0, 1, 1, 0, 2]
    assert groups.sizes.tolist() == [2, 3, 1]
    assert groups.labels.tolist() == [0, 1, 3]  # the group 3 has one image of 0 and one of 2: the first class
    assert groups.images(np.array([2, 0])).tolist() == [1, 4, 5]


def test_a_share_is_met_by_the_groups_that_come_nearest():
    groups = Groups(np.repeat(np.arange(4), [4, 2, 6, 8]), np.array([4, 2, 6, 8]), np.zeros(4, int))
    order = np.array([2, 0, 1, 3])  # 6, 10, 12 and 20 images
    for images, count in ((0.5, 1), (7, 1), (8, 1), (9, 2), (11, 2), (11.5, 3), (20, 4)):
        assert len(groups.first(order, images)) == count


def test_validation_has_the_first_groups_of_the_seeded_order():
    """Ten groups of 3 images: floor(0.25 * 30) = 7 images are nearest to two groups."""
    numbers = np.repeat(np.arange(10), 3)
    labels = numbers % 2
    train, validation = split_groups(groups_of(numbers, labels), 0.25, 5, False, "photo")
    first = sorted(shuffled(10, 5)[:2])
    assert validation.tolist() == [3 * group + place for group in first for place in range(3)]
    assert sorted([*train, *validation]) == list(range(30))
    _, validation = split_groups(groups_of(numbers, labels), 0.25, 5, True, "photo")  # floor(0.25 * 15) = 3 of a class
    order = shuffled(10, 5).tolist()
    each = [next(group for group in order if group % 2 == label) for label in (0, 1)]
    assert sorted({*numbers[validation]}) == sorted(each)
    assert len(validation) == 6


def test_the_last_group_of_a_class_trains_and_one_group_is_refused():
    numbers, labels = np.array([0, 0, 0, 0, 1, 1]), np.array([0, 0, 0, 0, 1, 1])
    for stratified in (False, True):
        train, validation = split_groups(groups_of(numbers, labels), 0.9, 0, stratified, "photo")
        assert {len(train), len(validation)} == {2, 4}
        with pytest.raises(UserError, match=r"\Aphoto: its 6 images are one group, which is never split"):
            split_groups(groups_of(numbers * 0, labels), 0.5, 0, stratified, "photo")


def test_a_group_goes_to_the_part_in_which_its_middle_image_lies():
    """Groups of 2, 6, 2 and 10 images have their middles at 1, 5, 9 and 15 of 20."""
    cut = cut_by_shares(np.array([4, 5, 6, 7]), np.array([0.2, 0.3, 0.5]), np.array([2, 6, 2, 10]))
    assert [part.tolist() for part in cut] == [[4], [5, 6], [7]]


@quick
@given(labelled, st.integers(0, 99), st.floats(0.02, 0.9), st.booleans())
def test_no_group_is_in_training_and_in_validation(pairs, seed, share, stratified):
    numbers, labels = np.array(pairs).T
    groups = groups_of(numbers, labels)
    if len(groups.sizes) < 2:
        return
    train, validation = split_groups(groups, share, seed, stratified, "photo")
    assert sorted([*train, *validation]) == list(range(len(labels)))
    assert len(train)
    assert len(validation)
    assert not set(numbers[train]) & set(numbers[validation])
    for drawn in (subset_of_groups(groups, share, seed), adapting_groups(groups, 5, share, seed, "photo")):
        rest = np.delete(numbers, drawn)
        assert len(drawn)
        assert not set(numbers[drawn]) & set(rest)
    assert set(subset_of_groups(groups, share / 2, seed)) <= set(subset_of_groups(groups, share, seed))


@quick
@given(labelled, st.integers(0, 99), st.integers(2, 3), st.sampled_from(["iid", "dirichlet"]))
def test_no_group_is_at_two_clients(pairs, seed, clients, kind):
    numbers, labels = np.array(pairs).T
    groups = groups_of(numbers, labels)
    if len(groups.sizes) < 2 * clients:
        with pytest.raises(UserError, match=rf"groups of a domain are too few for {clients} clients"):
            partition_groups(groups, kind, clients, 1.0, seed)
        return
    try:
        parts = partition_groups(groups, kind, clients, 1.0, seed)
    except UserError:
        assert kind == "dirichlet"  # which may not find a draw that gives every client two groups
        return
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))
    of_clients = [set(numbers[part]) for part in parts]
    assert sum(map(len, of_clients)) == len(groups.sizes)
    assert min(map(len, of_clients)) >= 2


def of_groups(data, target):
    """{(domain, group): the parts in which its images are} over all clients of a run."""
    bench = benchmark(data)
    places = {}
    for client in client_names(data, target):
        own = load_client(data, client, target)
        domain = domain_of(client)
        groups = reader(data, bench).groups(domain)
        for part in ("train", "validation"):
            for group in groups[getattr(own, part)]:
                places.setdefault((domain, int(group)), set()).add((client, part))
    return places


@pytest.fixture
def table(tmp_path):
    """Function (settings) -> settings of a table of 3 hospitals with 40 patients of 5 rows, all of them one label."""
    rng = np.random.default_rng(3)
    rows = []
    for hospital in ("north", "south", "west"):
        for patient in range(40):
            label, place = int(rng.integers(2)), rng.normal(size=3)
            for _ in range(5):
                x, y, z = place + 0.01 * rng.normal(size=3)
                rows.append(
                    {"hospital": hospital, "patient": f"{hospital}{patient}", "ill": label, "x": x, "y": y, "z": z}
                )
    frame = pd.DataFrame(rows)
    frame.to_csv(tmp_path / "visits.csv", index=False)

    def make(grouped=True, **changes):
        columns = {"label": "ill", "domain": "hospital", "features": ["x", "y", "z"]}
        columns |= {"group": "patient"} if grouped else {}
        root = str(tmp_path / "visits.csv")
        return DataSettings(dataset="arrays", root=root, columns=columns, scale="none", holdout=0.2, **changes)

    return make


def accuracy_of_nearest(data):
    """Validation accuracy of the nearest training row, over all sources."""
    hits = []
    for client in client_names(data, "west"):
        own = load_client(data, client)
        distances = np.linalg.norm(own.images[own.validation][:, None] - own.images[own.train][None], axis=2)
        hits.append(own.labels[own.train][distances.argmin(axis=1)] == own.labels[own.validation])
    return np.concatenate(hits).mean()


def test_a_coin_flip_per_patient_is_not_learned_when_patients_are_kept_together(table):
    """The features say who the patient is and nothing about the label: 100 % by row, about 50 % by patient."""
    assert accuracy_of_nearest(table(grouped=False)) > 0.99
    assert 0.3 < np.mean([accuracy_of_nearest(table(split_seed=seed)) for seed in range(5)]) < 0.7


@pytest.mark.parametrize("changes", [
    {}, {"split": "stratified"}, {"clients_per_domain": 3}, {"clients_per_domain": 3, "partition": "dirichlet"},
    {"fraction": 0.5, "clients_per_domain": 2}, {"mix": 0.5, "clients_per_domain": 2},
    {"mix": 0.4, "partition": "dirichlet", "clients_per_domain": 2},
])  # fmt: skip
def test_a_patient_is_at_one_client_and_in_one_part(table, changes):
    data = table(**changes)
    check_partitions(data, "west")
    if not data.mix:
        places = of_groups(data, "west")
        assert all(len(where) == 1 for where in places.values())
        assert len(places) == (80 if data.fraction == 1 else 39)  # half of 19 and 21 patients of a class: 9 and 10
        return
    where = {}
    for client in client_names(data, "west"):
        own = load_client(data, client, "west")
        for part in ("train", "validation"):
            for values in own.images[getattr(own, part)]:
                where.setdefault(values.tobytes(), set()).add((client, part))
    frame = pd.read_csv(data.root)
    values = frame[["x", "y", "z"]].to_numpy(np.float32)
    for _, rows in frame[frame["hospital"] != "west"].groupby("patient"):
        assert len(set().union(*(where[values[row].tobytes()] for row in rows.index))) == 1


def test_the_unseen_domain_is_tested_and_adapted_to_by_patients(table):
    data = table(adapt_share=0.3, test_split="in", fraction=0.5)
    groups = reader(data, benchmark(data)).groups("west")
    adapted = load_unlabelled(data, "west").train
    tested = load_target(data, "west")[2]
    for drawn in (adapted, tested):
        assert not set(groups[drawn]) & set(np.delete(groups, drawn))
    assert not set(groups[adapted]) & set(groups[tested])
    assert len(adapted) == 30  # 0.3 of 200 rows, and half of these
    whole = load_target(data.model_copy(update={"test_split": "all", "adapt_share": 0.0, "fraction": 1.0}), "west")[2]
    assert len(whole) == 200


def test_groups_are_no_features_and_belong_to_the_fingerprint(table):
    data, plain = table(), table(grouped=False)
    assert benchmark(data).features == ("x", "y", "z")
    every = {name: value for name, value in data.columns.items() if name != "features"}
    assert benchmark(data.model_copy(update={"columns": every})).features == ("x", "y", "z")
    assert fingerprints(data)["north"]["content"] != fingerprints(plain)["north"]["content"]


def test_rows_without_a_group_and_one_group_are_one_clear_line(table, tmp_path):
    frame = pd.read_csv(tmp_path / "visits.csv")
    frame.loc[7, "patient"] = None
    frame.to_csv(tmp_path / "visits.csv", index=False)
    with pytest.raises(UserError, match=r"visits.csv, column 'patient', row 9: the group is empty"):
        benchmark(table())
    frame.assign(patient="p").to_csv(tmp_path / "visits.csv", index=False)
    with pytest.raises(UserError, match=r"\Anorth: its 200 images are one group"):
        check_partitions(table(), "west")
    with pytest.raises(UserError, match=r"1 groups of a domain are too few for 2 clients"):
        check_partitions(table(clients_per_domain=2), "west")
    with pytest.raises(UserError, match=r"has no column 'pat' \(data.columns.group\)"):
        benchmark(table().model_copy(update={"columns": {**table().columns, "group": "pat"}}))
    with pytest.raises(UserError, match=r"has no groups that data.group = 'folder' could name"):
        check_partitions(table(grouped=False, group="folder"), "west")


def test_an_npz_file_names_groups(tmp_path):
    patients = np.repeat(np.arange(6), 4)
    domains = np.tile(["a", "b"], 12)
    np.savez(tmp_path / "x.npz", x=np.random.rand(24, 2, 5), label=patients % 2, domain=domains, who=patients)
    data = DataSettings(dataset="arrays", root=str(tmp_path / "x.npz"), columns={"group": "who"})
    assert reader(data, benchmark(data)).groups("b").tolist() == np.repeat(np.arange(6), 2).tolist()
    with pytest.raises(UserError, match=r"has no array 'patient' \(data.columns.group\); it has: x, label"):
        benchmark(data.model_copy(update={"columns": {"group": "patient"}}))


@pytest.fixture
def patients(tree_settings, make_tree, tmp_path):
    """Function (settings) -> settings of a tree DOMAIN/CLASS/PATIENT/IMAGE: 3 patients with 4 images of each class."""
    make_tree(per_class=12)
    for folder in sorted((tmp_path / "images").glob("*/*")):
        for number, file in enumerate(sorted(folder.glob("*.png"))):
            below = folder / f"p{number // 4}"
            below.mkdir(exist_ok=True)
            file.rename(below / file.name)
    return tree_settings


def test_folders_below_the_class_are_groups(patients, tmp_path):
    """The patient p0 has cats 0 to 3 and dogs 12 to 15, p1 cats 4 to 7, and so on; one of the three validates."""
    data = patients(group="folder", holdout=0.3)
    own = load_client(data, "photo")
    assert reader(data, benchmark(data)).groups("photo").tolist() == np.tile(np.repeat([0, 1, 2], 4), 2).tolist()
    first = own.validation[0]
    assert first in (0, 4, 8)
    assert own.validation.tolist() == [*range(first, first + 4), *range(first + 12, first + 16)]
    with pytest.raises(UserError, match=r"3 groups of a domain are too few for 2 clients"):
        check_partitions(data.model_copy(update={"clients_per_domain": 2}), "sketch")
    file = next((tmp_path / "images" / "photo" / "cat" / "p1").glob("*.png"))
    file.rename(file.parents[1] / file.name)
    with pytest.raises(UserError, match=r"photo/cat/\d+.png lies in no folder below its class"):
        load_client(data, "photo")


def test_folders_below_the_class_without_the_setting_are_remarked(patients, tmp_path):
    text = "images of art, photo, sketch lie in 9 folders below their classes, such as 'p0', and are drawn one by one"
    data = patients(levels="domain/class")  # every patient has both classes, so that the class could be below
    read = reader(data, benchmark(data))
    assert read.groups("photo") is None
    assert [(finding.text, finding.count, finding.is_grave) for finding in read.findings()] == [(text, 9, False)]
    assert any(text in problem for problem in inspect(tmp_path / "images", ["data.levels=domain/class"]).problems)
    data = patients(group="folder")
    assert reader(data, benchmark(data)).findings() == []


def test_a_run_says_and_records_that_images_seem_to_be_in_groups(patients, tmp_path):
    """Whoever names the groups hears nothing; the setting stands in experiment.toml."""
    for group, count in (("", 1), ("folder", 0)):
        levels = "" if group else "domain/class"
        data = patients(group=group, levels=levels, holdout=0.3).model_dump()
        sections = {"data": {**data, "image_size": 16}, "train": {"rounds": 1}, "run": {"target": "sketch"}}
        folder, _ = run_small(small_experiment(tmp_path / f"out{group}", **sections))
        remarks = json.loads((folder / "environment.json").read_text()).get("data_remarks", [])
        assert sum("lie in 9 folders below their classes" in remark for remark in remarks) == count
        assert f'group = "{group}"' in (folder / "experiment.toml").read_text()
    hashes = {read_experiment("digits", [f"data.group={group!r}"]).settings_hash() for group in ("", "folder")}
    assert len(hashes) == 2


def test_groups_that_two_settings_name_are_refused(tmp_path):
    rows = [f"{place}.png,{'uv'[place % 2]},{'abc'[place // 4]},{place // 2}" for place in range(12)]
    (tmp_path / "t.csv").write_text("\n".join(["path,label,domain,patient", *rows]))
    changes = ["data.group=folder", "data.columns.group=patient", "data.domains=[]", "run.target=c"]
    with pytest.raises(UserError, match=r"data.group and data.columns.group both say which images stay together"):
        resolve(read_experiment("digits", ["data.dataset=table", f"data.root={tmp_path / 't.csv'}", *changes]))


def test_lists_that_tear_a_group_are_refused(patients, tmp_path):
    lists = tmp_path / "lists"
    lists.mkdir()
    names = [f"photo/cat/p{number // 4}/{number:03d}.png" for number in range(12)]
    (lists / "photo_train.txt").write_text("\n".join(names[:8]))
    data = patients(group="folder", split="lists", lists="../lists", holdout=0.4)
    own = load_client(data, "photo")  # without a validation list, one of the two listed patients validates
    assert sorted([own.train.tolist(), own.validation.tolist()]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    (lists / "photo_val.txt").write_text("\n".join(names[8:]))
    assert load_client(data, "photo").validation.tolist() == [8, 9, 10, 11]
    (lists / "photo_train.txt").write_text("\n".join(names[:9]))
    (lists / "photo_val.txt").write_text("\n".join(names[9:]))
    with pytest.raises(UserError, match=r"photo: 1 groups have images in the training list and in the validation"):
        load_client(data, "photo")


def test_a_table_of_images_names_its_groups(patients, tmp_path):
    patients()
    files = sorted((tmp_path / "images").glob("*/*/*/*.png"))
    rows = [(str(file), file.parts[-4], file.parts[-3], f"{file.parts[-4]}-{file.parts[-2]}") for file in files]
    frame = pd.DataFrame(rows, columns=["path", "domain", "label", "who"])
    frame.to_csv(tmp_path / "mine.csv", index=False)
    places = {"root": str(tmp_path / "mine.csv"), "cache": str(tmp_path / "c"), "image_size": 8}
    data = DataSettings(dataset="table", columns={"group": "who"}, holdout=0.3, **places)
    own, by_folder = load_client(data, "photo"), load_client(patients(group="folder", holdout=0.3), "photo")
    assert own.validation.tolist() == by_folder.validation.tolist()
    plain = DataSettings(dataset="table", **places)
    assert fingerprints(plain)["photo"] != fingerprints(data)["photo"]
    assert fingerprints(plain)["photo"] == fingerprints(plain.model_copy(update={"columns": {"path": "path"}}))["photo"]
    frame.assign(who=frame["who"].where(frame.index != 30)).to_csv(tmp_path / "mine.csv", index=False)
    with pytest.raises(UserError, match=r"mine.csv, row 32: the column 'who' is empty"):
        load_client(data, "photo")


def test_a_hugging_face_data_set_names_its_groups(tmp_path):
    datasets = pytest.importorskip("datasets")
    patients = [number // 5 for number in range(60)]
    cells = {"label": [number % 2 for number in range(60)], "domain": ["a" if p % 2 else "b" for p in patients]}
    images = [{"bytes": b"x", "path": None}] * 60
    features = datasets.Features({
        "image": datasets.Image(), "label": datasets.Value("int64"), "domain": datasets.Value("string"),
        "patient": datasets.Value("int64"),
    })  # fmt: skip
    rows = datasets.Dataset.from_dict({"image": images, **cells, "patient": patients}, features=features)
    rows.save_to_disk(str(tmp_path / "saved"))
    places = {"root": str(tmp_path / "saved"), "cache": str(tmp_path / "c")}
    data = DataSettings(dataset="hugging-face", columns={"group": "patient"}, **places)
    read = reader(data, benchmark(data))
    assert read.groups("a").tolist() == np.repeat([0, 2, 3, 4, 5, 1], 5).tolist()  # texts in order: 1, 11, 3, ...
    check_partitions(data.model_copy(update={"clients_per_domain": 3}), "b")
    wrong = data.model_copy(update={"columns": {"group": "patients"}})
    with pytest.raises(UserError, match=r"has no column 'patients' \(data.columns.group\); did you mean 'patient'"):
        check_partitions(wrong, "b")
