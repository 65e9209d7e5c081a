"""What a reader of a user's own gives is checked for type, axes, channels and labels before anything uses it."""

import re

import numpy as np
import pytest

from fedsim.common.errors import UserError
from fedsim.data import Benchmark, load_client, load_target
from fedsim.data.reader import Reader
from fedsim.settings import DataSettings

GIVEN: dict[str, tuple[np.ndarray, np.ndarray]] = {}
LABELS = np.arange(20) % 2


class Own(Reader):
    """Gives what a test has put down."""

    benchmark = Benchmark("own", "Own images", ("a", "b"), ("no", "yes"), 1)

    def images(self, domain, apart=False):
        return GIVEN["images"]


class Rows(Own):
    """Rows of three numbers."""

    benchmark = Benchmark("rows", "Own rows", ("a", "b"), ("no", "yes"), 1, shape=(3,), numeric=3)


IMAGES = np.zeros((20, 1, 8, 8), np.uint8)


@pytest.mark.parametrize(
    ("reader", "images", "labels", "message"),
    [
        (Own, np.zeros((20, 1, 8, 8), np.float32), LABELS, "images are float32 [20, 1, 8, 8], not uint8 from 0 to 255"),
        (Own, np.zeros((20, 9), np.float64), LABELS, "images are float64 [20, 9], not uint8"),
        (Own, np.zeros((20, 8, 8, 1), np.uint8), LABELS, "images have the shape [20, 8, 8, 1], not [N, 1, s, s]"),
        (Own, np.zeros((20, 3, 8, 8), np.uint8), LABELS, "images have the shape [20, 3, 8, 8], not [N, 1, s, s]"),
        (Own, np.zeros((20, 1, 8, 9), np.uint8), LABELS, "images have the shape [20, 1, 8, 9], not [N, 1, s, s]"),
        (Own, IMAGES, LABELS[:19], "there are 20 examples and labels of the shape [19]"),
        (Own, IMAGES, LABELS + 1, "labels are int64 from 1 to 2, not the numbers 0 to 1 of the classes"),
        (Own, IMAGES, LABELS.astype(float), "labels are float64 from 0.0 to 1.0, not the numbers 0 to 1"),
        (Rows, np.zeros((20, 3)), LABELS, "examples are float64 [20, 3], not float32 [N, 3]"),
        (Rows, np.zeros((20, 4), np.float32), LABELS, "examples are float32 [20, 4], not float32 [N, 3]"),
    ],
)
def test_what_a_reader_gives_is_checked(reader, images, labels, message):
    GIVEN["images"] = images, labels
    data = DataSettings(dataset=f"{__name__}:{reader.__name__}")
    for load in (lambda: load_client(data, "a", "b"), lambda: load_target(data, "b")):
        with pytest.raises(UserError, match=re.escape(message)) as error:
            load()
        assert "\n" not in str(error.value)


def test_right_images_and_rows_are_read():
    GIVEN["images"] = IMAGES, LABELS
    assert load_client(DataSettings(dataset=f"{__name__}:Own"), "a", "b").images.dtype == np.uint8
    GIVEN["images"] = np.ones((20, 3), np.float32), LABELS
    assert load_target(DataSettings(dataset=f"{__name__}:Rows"), "b")[0].shape == (20, 3)


@pytest.mark.parametrize("kind", [np.uint8, np.int32])
def test_labels_of_another_width_count_as_int64(kind):
    """The labels were once read as bytes of int64, so that the clients of a domain shared an eighth or a half of it."""
    GIVEN["images"] = np.zeros((40, 1, 8, 8), np.uint8), (np.arange(40) // 20).astype(kind)
    data = DataSettings(dataset=f"{__name__}:Own", clients_per_domain=2)
    clients = [load_client(data, name, "b") for name in ("a/0", "a/1")]
    held = np.concatenate([np.concatenate([client.train, client.validation]) for client in clients])
    assert sorted(held.tolist()) == list(range(40))
    assert [client.labels.dtype for client in clients] == [np.int64, np.int64]
