"""A torch Dataset of (tensor, target) becomes checked arrays, or one clear line."""

import re

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from fedsim.common.errors import UserError
from fedsim.data.tensor_sets import check_labels, name_classes, read_tensors

NAN = float("nan")


def test_a_tensor_dataset_is_read_in_order_and_as_it_is():
    x = torch.tensor([[0.5, 2.0], [-1.0, 300.0], [0.0, 1.0]], dtype=torch.float64)
    values, labels = read_tensors(TensorDataset(x, torch.tensor([1, 0, 1])), "a")
    assert (values.dtype, labels.dtype) == (np.float32, np.int64)
    assert values.tolist() == x.tolist()
    assert labels.tolist() == [1, 0, 1]


def test_uint8_is_not_divided_by_255_and_arrays_and_python_integers_are_read():
    items = [(np.array([[0, 255]], np.uint8), 2), (np.array([[7, 8]], np.uint8), np.int64(0))]
    values, labels = read_tensors(items, "a")
    assert values.tolist() == [[[0, 255]], [[7, 8]]]
    assert labels.tolist() == [2, 0]


class Broken(list):
    def __getitem__(self, index):
        raise OSError("the file is gone\nmore")


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(2), 0)])


ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "h: the Dataset is empty"),
        (Stream(), "h: Stream is no map-style Dataset"),
        ([ONE], "h, item 0 is a Tensor, not a pair"),
        ([(ONE, 0, 1)], "h, item 0 is a tuple of 3, not a pair"),
        ([(ONE, 0), (torch.ones(3), 0)], "h, item 1: its tensor has the shape [3], but item 0 has [2]"),
        ([(torch.tensor(1.0), 0)], "h, item 0: its tensor has the shape []"),
        ([(torch.ones(2, dtype=torch.int64), 0)], "h, item 0: its tensor is int64, neither float nor uint8"),
        ([([1.0, 2.0], 0)], "h, item 0: list is no tensor"),
        ([(np.array(["a"]), 0)], "h, item 0: ndarray is no tensor"),
        ([(ONE, 0), (torch.tensor([1.0, NAN]), 0)], "h, item 1: its tensor holds NaN or infinity"),
        ([(torch.tensor([1.0, float("inf")]), 0)], "h, item 0: its tensor holds NaN or infinity"),
        ([(ONE, 0.5)], "h, item 0: its target 0.5 is no integer"),
        ([(ONE, torch.tensor([0, 1]))], "h, item 0: its target tensor([0, 1]) is no integer"),
        ([(ONE, "cat")], "h, item 0: its target 'cat' is no integer"),
        (Broken([1]), "h, item 0 cannot be read (OSError: the file is gone)"),
    ],
)
def test_what_is_no_data_set_of_tensors_is_refused_in_one_line(dataset, message):
    with pytest.raises(UserError, match="^" + re.escape(message)) as error:
        read_tensors(dataset, "h")
    assert "\n" not in str(error.value)


def test_classes_are_named_by_the_labels_of_all_domains_together():
    assert name_classes({"a": np.array([0, 1]), "b": np.array([2, 2])}) == ("0", "1", "2")
    assert name_classes({"a": np.array([1, 2]), "b": np.array([3])}) == ("1", "2", "3")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 2], "a: the labels are 0, 2; they must be 0 to K-1 or 1 to K without a gap"),
        ([2, 3], "a: the labels are 2, 3; they must be 0 to K-1 or 1 to K without a gap"),
        ([-1, 0, 1], "a: there is the label -1"),
        ([0, 0], "a: the labels are 0; at least two classes are needed"),
    ],
)
def test_other_labels_are_refused(labels, message):
    with pytest.raises(UserError, match=message):
        name_classes({"a": np.array(labels)})


def test_labels_of_one_client_are_compared_with_the_classes_of_the_model():
    check_labels(np.array([0, 2]), 3, "h")
    with pytest.raises(UserError, match="h: there is the label 3, but 3 classes are 0 to 2; they seem to count from 1"):
        check_labels(np.array([1, 3]), 3, "h")
    with pytest.raises(UserError, match="h: there is the label 7, but 3 classes are 0 to 2; the model has no such"):
        check_labels(np.array([0, 7]), 3, "h")
