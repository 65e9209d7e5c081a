"""Rotated Digits and Rotated MNIST: sizes, direction of rotation, and which images the domains share."""

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from fedsim.data import load_client, load_target
from fedsim.data.digits import digits_domain, resize, rotate
from fedsim.data.rotated_mnist import mnist_domain
from fedsim.settings import DataSettings


def test_digits_are_a_thousand_balanced_images_and_their_rotations():
    images, labels = digits_domain(0, 28)
    assert (images.shape, images.dtype, images.max() > 200) == ((1000, 1, 28, 28), np.uint8, True)
    assert np.bincount(labels).tolist() == [100] * 10
    turned, turned_labels = digits_domain(45, 28)
    assert (labels == turned_labels).all()
    assert (turned == rotate(images, 45)).all()
    assert (resize(np.full((1, 1, 8, 8), 200, np.uint8), 13) == 200).all()


def test_native_size_is_scikit_learns_own_values():
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


def test_rotated_mnist_csac(real_data):
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


def test_rotated_mnist_domainbed_deals_disjoint_domains(real_data):
    domains = [mnist_domain(real_data, "domainbed", 0, angle, 28) for angle in (0, 15, 30, 45, 60, 75)]
    assert [len(images) for images, _ in domains] == [834, 834, 833, 833, 833, 833]
    total = np.sum([np.bincount(labels, minlength=10) for _, labels in domains], axis=0)
    assert total.tolist() == [500] * 10
