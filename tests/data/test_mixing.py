"""Clients of mixed domains: how many images of each domain a client gets, and that no image is used twice."""

import numpy as np
import pytest

from fedsim.analysis.published import setting
from fedsim.common.errors import UserError
from fedsim.data import benchmark, check_partitions, client_names, load_client, load_pooled
from fedsim.data.mixing import _shares
from fedsim.data.reader import reader
from fedsim.data.splits import dirichlet_deal
from fedsim.runs.plan import resolve
from fedsim.settings import DataSettings
from fedsim.settings.experiment import read_experiment

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
