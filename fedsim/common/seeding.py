"""Every random stream of a run, derived by a hash from (seed, purpose, client, round).

A stream depends only on its name. It is the same after resuming, with another order of clients, and when other streams
are added.
"""

import hashlib

import numpy as np
import torch


def stream_seed(seed: int, *name: str | int) -> int:
    """Seed in [0, 2^63) of the stream `name`, e.g. `stream_seed(0, "batches", "photo", 3)`."""
    text = "\x1f".join(str(part) for part in (seed, *name))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def numpy_rng(seed: int, *name: str | int) -> np.random.Generator:
    """NumPy generator of the stream `name`."""
    return np.random.default_rng(stream_seed(seed, *name))


def torch_generator(seed: int, *name: str | int) -> torch.Generator:
    """Torch generator of the stream `name`. It is on the CPU, so that its numbers do not depend on the device."""
    return torch.Generator().manual_seed(stream_seed(seed, *name))


def seed_library(seed: int, *name: str | int) -> None:
    """Seeds torch's global generators (CPU and CUDA), for everything that draws from them: dropout, augmentation.

    It does the same as `torch.manual_seed`. Without CUDA that function takes a millisecond each time, because it stores
    a stack trace for a later seeding of CUDA.
    """
    number = stream_seed(seed, *name)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
