"""Clients of mixed domains: how many images of each domain a client gets, and that no image is used twice."""

import json

import numpy as np
import pytest

from fedsim.analysis.published import setting
from fedsim.common.errors import UserError
from fedsim.data import benchmark, check_partitions, client_names, load_client, load_pooled
from fedsim.data.mixing import _shares, clients_by_size, domains_by_size
from fedsim.data.reader import reader
from fedsim.data.splits import dirichlet_deal
from fedsim.runs.plan import resolve
from fedsim.runtime.launch import carry_out
from fedsim.settings import DataSettings
from fedsim.settings.experiment import read_experiment
from fedsim.testing.contract import small_plan

DIGITS = DataSettings(dataset="digits", image_size=8, split_seed=0)


def clients_of(data, target="sketch"):
    return [load_client(data, name, target) for name in client_names(data, target)]


def test_shares_are_those_of_the_formula():
    """5 domains with 900 training and 100 validation images each, 5 clients, mix 0.5: 90 of every domain by the first
    term and 450 of the own one by the second; of the validation images 10 and 50."""
    for place, client in enumerate(clients_of(DIGITS.model_copy(update={"mix": 0.5}), "rot75")):
        own = np.arange(5) == place
        found = [np.bincount(client.domain_index[part]).tolist() for part in (client.train, client.validation)]
        assert found == [(90 + 450 * own).tolist(), (10 + 50 * own).tolist()]


@pytest.mark.parametrize(("mix", "partition"), [(0.3, "dirichlet"), (1.0, "iid")])
def test_every_image_is_at_one_client_and_in_one_part(tree_settings, make_tree, mix, partition):
    make_tree(per_class=40)
    data = tree_settings(mix=mix, clients_per_domain=2, partition=partition, split_seed=0, holdout=0.2)
    found = clients_of(data)
    everywhere = [bytes(image) for client in found for image in client.images]
    assert len(everywhere) == len(set(everywhere)) == 160  # all of art and photo, none of sketch
    for client in found:
        assert sorted([*client.train, *client.validation]) == list(range(len(client.images)))
    pooled = load_pooled(data, "sketch")
    assert pooled.held == tuple(client.examples for client in found)
    for part in ("train", "validation"):
        one_by_one = [bytes(image) for client in found for image in client.images[getattr(client, part)]]
        assert sorted(one_by_one) == sorted(map(bytes, pooled.images[getattr(pooled, part)]))
    labels = np.concatenate([client.labels for client in found])
    assert np.bincount(labels).tolist() == [80, 80]


def test_clients_of_each_domain_may_share_it_by_dirichlet():
    given = ["run.target=rot75", "data.clients.rot0=3", "data.partition=dirichlet", "data.alpha=0.3"]
    plan = resolve(read_experiment("digits", given))
    assert [name for name in plan.clients if name.startswith("rot0")] == ["rot0/0", "rot0/1", "rot0/2"]


def test_shared_images_validate_once_and_masks_go_with_their_images():
    """The domains of digits have the same images: every client that has an image uses it for the same purpose."""
    data = DIGITS.model_copy(update={"mix": 0.4, "clients_per_domain": 2})
    labels = np.arange(1000) % 10
    roles = {"train": set(), "validation": set()}
    domains = ["rot0", "rot15", "rot30"]
    for domain in domains:
        for train, validation in _shares(reader(data, benchmark(data)), domains, domain, labels):
            roles["train"] |= set(train)
            roles["validation"] |= set(validation)
    assert (len(roles["train"]), len(roles["validation"])) == (900, 100)
    assert not roles["train"] & roles["validation"]
    data = DataSettings(dataset="digit-masks", image_size=32, mix=0.5, split_seed=0)
    mixed, pure = load_client(data, "shaded", "noise"), load_client(data.model_copy(update={"mix": 0.0}), "shaded")
    own = np.flatnonzero(mixed.domain_index == 1)  # inverted, shaded, textured
    by_image = {bytes(image): bytes(mask) for image, mask in zip(pure.images, pure.masks)}
    assert len(own) > 100
    assert all(by_image[bytes(mixed.images[place])] == bytes(mixed.masks[place]) for place in own)


def test_dirichlet_clients_want_the_same_classes_in_all_domains():
    data = DIGITS.model_copy(update={"mix": 1.0, "partition": "dirichlet", "alpha": 0.1})
    client = load_client(data, "rot0", "rot75")
    counts = [np.bincount(client.labels[client.train][client.domain_index[client.train] == d], minlength=10)
              for d in range(5)]  # fmt: skip
    assert all((row == counts[0]).all() for row in counts[1:])
    assert counts[0].max() > 3 * max(counts[0].min(), 1)  # and they are far from even
    order = np.arange(100)
    parts = dirichlet_deal(order, order % 4, 4, 3, 0.5, seed=1)
    assert sorted(np.concatenate(parts)) == order.tolist()


def test_what_cannot_be_mixed_is_refused_or_has_no_published_numbers(tree_settings):
    with pytest.raises(UserError, match=r"client 'art/1' has 3 training and 0 validation images"):
        check_partitions(tree_settings(mix=0.5, clients_per_domain=4, holdout=0.2), "sketch")
    with pytest.raises(UserError, match="the client is called 'rot0'"):
        load_client(DIGITS.model_copy(update={"mix": 0.5}), "rot0/1", "rot75")
    with pytest.raises(UserError, match=r"data.mix gives images of all domains"):
        resolve(read_experiment("digits", ["data.mix=0.5", "run.runtime=deployment"]))
    whole = read_experiment("pacs", ["model.backbone=resnet18"])
    assert (setting(whole), setting(whole.replace(data={"mix": 0.1}))) == (("PACS", "ResNet-18"), None)


def test_clients_go_where_a_client_has_most_images():
    """FedDG_Benchmark's rule: 1 + 3 clients of 100 + 300 images. PACS: 47 + 53 of 100, and 7 + 9 + 14 of 30."""
    assert clients_by_size([100, 300], 4) == [1, 3]
    assert clients_by_size([1853, 2125], 100) == [47, 53]
    assert clients_by_size([2048, 2344, 3929], 30) == [7, 9, 14]
    assert clients_by_size([5, 5], 3) == [2, 1]  # of equal ones the first
    assert domains_by_size({"a": 3, "b": 9, "c": 4, "d": 2}, 2) == {"a": [0], "b": [1], "c": [0], "d": [0]}
    assert domains_by_size({"a": 9, "b": 1}, 2) == {"a": [0], "b": [1]}


def sized_tree(make_tree, tree_settings, **settings):
    """art has 100 training images, photo 300; a tenth more of each validates."""
    make_tree(domains=("sketch",), per_class=2)
    make_tree(domains=("art",), per_class=55)
    make_tree(domains=("photo",), per_class=165)
    return tree_settings(split_seed=0, holdout=1 / 11, **settings)


def test_number_of_clients_with_lambda(make_tree, tree_settings):
    """n = 100, 300 and C = 4: with lambda .1 art's client has (92.5, 7.5) images, each of photo's (2.5, 97.5)."""
    data = sized_tree(make_tree, tree_settings, clients=4, mix=0.1)
    assert client_names(data, "sketch") == ["art", "photo/0", "photo/1", "photo/2"]
    found = clients_of(data)
    counts = np.array([np.bincount(client.domain_index[client.train], minlength=2) for client in found])
    assert counts.sum(axis=0).tolist() == [100, 300]
    expected = np.array([[92.5, 7.5], *[[2.5, 97.5]] * 3])
    assert (np.abs(counts - expected) <= 1).all(), counts
    pure = data.model_copy(update={"mix": 0.0})
    counts = [np.bincount(client.domain_index[client.train], minlength=2).tolist() for client in clients_of(pure)]
    assert counts == [[100, 0], [0, 100], [0, 100], [0, 100]]
    pooled = load_pooled(data, "sketch")
    assert pooled.held == tuple(client.examples for client in found)
    check_partitions(data, "sketch")
    with pytest.raises(
        UserError, match=r"no client 'art/0': with data.clients = 4 the clients are art, photo/0, photo/1"
    ):
        load_client(data, "art/0", "sketch")


def test_clients_by_domain_as_a_table(make_tree, tree_settings):
    """photo's 300 training and 30 validation images on three clients; art, which the table leaves out, has one.

    The unseen sketch may be named, because one table serves all unseen domains.
    """
    data = sized_tree(make_tree, tree_settings, clients={"photo": 3, "sketch": 5})
    assert client_names(data, "sketch") == ["art", "photo/0", "photo/1", "photo/2"]
    assert [client.examples for client in clients_of(data)] == [100, 100, 100, 100]
    assert [len(client.validation) for client in clients_of(data)] == [10, 10, 10, 10]
    first, alone = clients_of(data)[0], load_client(data.model_copy(update={"clients": 0}), "art")
    assert np.array_equal(first.images[first.train], alone.images[np.sort(alone.train)])
    assert client_names(data, "photo") == ["art", *(f"sketch/{number}" for number in range(5))]
    check_partitions(data, "sketch")


def test_a_run_with_a_table_of_clients(tmp_path):
    """Each key may be an override of its own."""
    changes = ["data.fraction=0.05", "train.rounds=1", "data.clients.rot15=2", "data.clients.rot0=1"]
    run = carry_out(small_plan("fedavg", tmp_path, changes))
    clients = {line.split(",")[1] for line in (run / "clients.csv").read_text().splitlines()[1:]}
    assert clients == {"rot0", "rot15/0", "rot15/1", "rot30"}
    assert "rot15 = 2" in (run / "experiment.toml").read_text()


def test_fewer_clients_than_domains_have_whole_domains():
    """Five domains of 1,000 images on two clients: the first, third and fifth on one of them."""
    data = DIGITS.model_copy(update={"clients": 2})
    assert client_names(data, "rot75") == ["rot0", "rot15"]
    found = [
        np.bincount(client.domain_index[client.train], minlength=5).tolist() for client in clients_of(data, "rot75")
    ]
    assert found == [[900, 0, 900, 0, 900], [0, 900, 0, 900, 0]]


def test_a_run_with_a_number_of_clients(tmp_path):
    few = ["data.fraction=0.05", "train.rounds=1", "data.mix=0"]
    for count, names in ((2, ["rot0", "rot15"]), (5, ["rot0/0", "rot0/1", "rot15/0", "rot15/1", "rot30"])):
        run = carry_out(small_plan("irm", tmp_path / str(count), [*few, f"data.clients={count}"]))
        remarks = json.loads((run / "environment.json").read_text())["data_remarks"]
        clients = {line.split(",")[1] for line in (run / "clients.csv").read_text().splitlines()[1:]}
        assert clients >= set(names), clients
        assert any("every client has one domain" in text for text in remarks) == (count == 5)


@pytest.mark.parametrize(("settings", "words"), [
    (["data.clients=9", "data.clients_per_domain=2"], "both say how many clients there are"),
    (["data.clients=9", "run.runtime=deployment"], "data.clients deals images to the clients of a simulation"),
    (["data.clients.rot16=9"], "data.clients names 'rot16', which is no domain here; did you mean 'rot"),
    (["data.clients.rot15=0"], r"data.clients.rot15=0': data.clients.rot15: Input should be .* equal to 1 \(got 0\)"),
    (["data.clients=-1"], "data.clients: Input should be greater than or equal to 0, or"),
    (["data.clients.rot15=2", "data.clients_per_domain=2"], "both say how many clients there are"),
    (["data.clients=9", "data.partition=classes"], "data.partition = 'classes' deals single images"),
])  # fmt: skip
def test_numbers_of_clients_that_cannot_be_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        resolve(read_experiment("digits", [*settings, "run.target=rot75"]))


def test_too_many_clients_are_refused():
    with pytest.raises(UserError, match=r"has 1 training and 0 validation images.* or the number of clients"):
        check_partitions(DIGITS.model_copy(update={"clients": 4000}), "rot75")
