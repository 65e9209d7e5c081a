"""A client's local round on invented images, for tests of client parts."""

import numpy as np
import torch
from torch import nn

from clients.local_data import LocalData
from clients.parts import LocalRound
from clients.store import ClientStore
from fedsim.data import ClientData
from fedsim.data.augment import Normalization, Transforms
from fedsim.settings import TrainSettings


def colour_images(count: int, size: int = 16, seed: int = 0, offset: int = 60) -> np.ndarray:
    """Images uint8 [count, 3, size, size] of noise; `offset` sets their brightness."""
    noise = np.random.default_rng(seed).integers(0, 120, (count, 3, size, size))
    return (noise + offset).astype(np.uint8)


def small_data(images: np.ndarray, validation: int = 0, client: str = "a", augment=lambda x: x) -> LocalData:
    """The images as one client's data, the last `validation` of them held out; labels 0, 1, 2, 0, ..."""
    count = len(images)
    data = ClientData(
        client,
        images,
        np.arange(count) % 3,
        np.arange(count - validation),
        np.arange(count - validation, count),
        ("x", "y", "z"),
        (client,),
        np.zeros(count, np.int64),
    )
    return LocalData(data, Transforms(augment, Normalization()), torch.device("cpu"))


def small_round(data: LocalData, records: dict | None = None, net: nn.Module | None = None, **changes) -> LocalRound:
    """Round 1 of client `a`."""
    values = {
        "client": data.client,
        "net": net,
        "train": TrainSettings(),
        "classes": 3,
        "round": 1,
        "rounds": 2,
        "phase": "train",
        "seed": 0,
        "device": torch.device("cpu"),
        "store": ClientStore(None),
        "data": data,
        "records": records or {},
    }
    return LocalRound(**{**values, **changes})
