"""The images of clients, server and pooled baseline: who has which; Rotated Digits and Rotated MNIST."""

import shutil
import time

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from fedsim.common.errors import UserError
from fedsim.data import client_names, domain_of, load_client, load_pooled, load_target
from fedsim.data.digits import digits_domain, resize, rotate
from fedsim.data.rotated_mnist import mnist_domain
from fedsim.data.splits import random_split, seed_hash
from fedsim.runtime import launch
from fedsim.settings import DataSettings
from fedsim.settings.experiment import read_experiment

DIGITS = DataSettings(dataset="digits", image_size=8)


def digits(**changes):
    return DIGITS.model_copy(update=changes)


def test_no_target_image_reaches_a_client_or_the_pool(tree_settings, tmp_path):
    """A client that was read once needs no other domain, and none of the target's images either."""
    data = tree_settings(domains=["art", "photo", "sketch"])
    target = {image.tobytes() for image in load_target(data, "sketch")[0]}
    pooled, own = load_pooled(data, "sketch"), load_client(data, "photo")
    for part in (pooled, own, load_client(data, "art")):
        assert not target & {image.tobytes() for image in part.images}
    assert pooled.domains == ("art", "photo")
    for other in ("art", "sketch"):
        shutil.rmtree(tmp_path / "images" / other)
    again = load_client(data, "photo")
    assert (again.train == own.train).all()
    assert (again.classes, again.class_counts().sum(), again.examples) == (("cat", "dog"), 7, 7)


def test_splits_of_a_client():
    own = load_client(DIGITS, "rot30")
    train, validation = random_split(1000, 0.1, seed_hash(0, 0))  # the first domain's: all show the same images
    assert (own.train == train).all()
    assert (own.validation == validation).all()
    assert (load_client(digits(domains=["rot30", "rot75"]), "rot30").train == own.train).all()
    assert own.examples == own.class_counts().sum() == 900
    assert (load_client(digits(split_seed=1), "rot30").train != own.train).any()
    data = digits(split="stratified", fraction=0.2)
    own = load_client(data, "rot0")
    assert own.class_counts().tolist() == [18] * 10
    assert len(own.validation) == 20
    images, labels, indices = load_target(data, "rot0")
    assert len(images) == 797
    rest = np.array([78, 82, 77, 83, 81, 82, 81, 79, 74, 80])  # 1,797 less a hundred of each class
    assert np.bincount(labels[indices]).tolist() == np.round(0.2 * rest).astype(int).tolist()


@pytest.mark.parametrize(("call", "said"), [
    (lambda: client_names(DataSettings(dataset="pacs"), "phto"), "did you mean 'photo'"),
    (lambda: client_names(DataSettings(dataset="pacs", domains=["photo"]), "photo"), "only domain"),
    (lambda: load_client(DIGITS, "rot0/1"), "the client is called 'rot0'"),
    *((lambda name=name: load_client(digits(clients_per_domain=2), name), "rot0/0 to rot0/1")
      for name in ("rot0", "rot0/2", "rot0/x")),
    (lambda: load_client(digits(clients_per_domain=500), "rot0/0"), "too few for 500 clients"),
])  # fmt: skip
def test_wrong_names_and_numbers(call, said):
    with pytest.raises(UserError, match=said):
        call()


def test_target_indices_all_or_in(tree_settings):
    assert load_target(DIGITS, "rot75")[2].tolist() == list(range(797))
    data = digits(test_split="in", holdout=0.2)
    assert (load_target(data, "rot75")[2] == random_split(797, 0.2, seed_hash(0, 0))[0]).all()
    data = tree_settings(test_split="in", holdout=0.3)
    assert (load_target(data, "photo")[2] == random_split(8, 0.3, seed_hash(0, 1))[0]).all()


@pytest.mark.parametrize("clients", [1, 2])
def test_pooled_holds_every_clients_split(tree_settings, clients):
    data = tree_settings(clients_per_domain=clients, holdout=0.3)
    pooled = load_pooled(data, "art")
    parts = [load_client(data, client) for client in client_names(data, "art")]
    assert pooled.examples == sum(part.examples for part in parts)
    assert len(pooled.images) == len(pooled.labels) == len(pooled.domain_index) == 16
    assert not set(pooled.train) & set(pooled.validation)
    for index, domain in enumerate(pooled.domains):
        mine = pooled.validation[pooled.domain_index[pooled.validation] == index]
        for kind in ("images", "labels"):
            own = [getattr(part, kind)[part.validation] for part in parts if domain_of(part.client) == domain]
            assert (getattr(pooled, kind)[mine] == np.concatenate(own)).all()


def test_a_partition_that_cannot_be_drawn_is_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "make_grid", lambda plan: pytest.fail("a grid was made"))
    words = ["data.clients_per_domain=60", "data.partition=dirichlet", "data.alpha=0.1", f"run.output={tmp_path}"]
    started = time.process_time()
    with pytest.raises(UserError, match=r"data.alpha = 0.1 leaves one of 60 clients with fewer than 3 of 1000 images"):
        launch.launch(read_experiment("digits", words))
    assert time.process_time() - started < 5  # once 298 s
    assert not list(tmp_path.iterdir())


def test_digits_are_a_thousand_balanced_images_and_their_rotations():
    images, labels = digits_domain(0, 28)
    assert (images.shape, images.dtype, images.max() > 200) == ((1000, 1, 28, 28), np.uint8, True)
    assert np.bincount(labels).tolist() == [100] * 10
    turned, turned_labels = digits_domain(45, 28)
    assert (labels == turned_labels).all()
    assert (turned == rotate(images, 45)).all()
    assert (resize(np.full((1, 1, 8, 8), 200, np.uint8), 13) == 200).all()
    from sklearn.datasets import load_digits

    images, labels = digits_domain(0, 8)
    digits = load_digits()
    others, other_labels = digits_domain(0, 8, apart=True)
    mine = sorted(zip([*labels, *other_labels], [image.tobytes() for image in (*images, *others)]))
    grey = np.round(digits.images * (255 / 16)).astype(np.uint8)
    assert mine == sorted(zip(digits.target, [image.tobytes() for image in grey]))


@pytest.mark.parametrize("angle", [15, 30, 45, 60, 75, -30])
def test_rotation_is_torchvisions(angle):
    images, _ = digits_domain(0, 28)
    theirs = TF.rotate(torch.from_numpy(images), -angle, InterpolationMode.BILINEAR, fill=[0.0])
    assert (rotate(images, angle) == theirs.numpy()).all()


def test_rotated_mnist_of_csac_and_the_disjoint_domains_of_domainbed(real_data):
    data = DataSettings(dataset="rotated-mnist", root=str(real_data / "MNIST"))  # or the folder that contains it
    upright, labels, _ = load_target(data, "M0")
    turned, turned_labels, _ = load_target(data, "M60")
    assert upright.shape == (1000, 1, 28, 28)
    assert np.bincount(labels).tolist() == [100] * 10
    assert (labels == turned_labels).all()
    assert (turned == rotate(np.array(upright), 60)).all()
    held_out = [load_client(data, name).validation for name in ("M0", "M15")]
    assert held_out[0].tolist() == held_out[1].tolist()
    assert len(held_out[0]) == 100
    disjoint = data.model_copy(update={"variant": "domainbed"})
    assert len({tuple(load_client(disjoint, name).validation) for name in ("M0", "M15")}) == 2
    other = load_target(data.model_copy(update={"split_seed": 1, "root": str(real_data)}), "M0")[0]
    assert (other != upright).any()
    domains = [mnist_domain(real_data, "domainbed", 0, angle, 28) for angle in (0, 15, 30, 45, 60, 75)]
    assert [len(images) for images, _ in domains] == [834, 834, 833, 833, 833, 833]
    total = np.sum([np.bincount(labels, minlength=10) for _, labels in domains], axis=0)
    assert total.tolist() == [500] * 10
