"""The data set of benchmarks with many clients (benchmarks/many_digits.py)."""

from pathlib import Path

import numpy as np

from fedsim.data import load_client
from fedsim.settings import DataSettings

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_its_repeated_images_are_a_reader_s_images(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("MANY_DIGITS", "2500")
    data = DataSettings(dataset="many_digits:ManyDigits", clients_per_domain=2, split="random")
    clients = [load_client(data, f"rot0/{number}") for number in range(2)]
    first = clients[0]
    assert sum(client.examples + len(client.validation) for client in clients) == 2500
    assert first.images[np.array([1, 1001])].shape == (2, 1, 28, 28)
    assert np.array_equal(*first.images[np.array([1, 1001])])
