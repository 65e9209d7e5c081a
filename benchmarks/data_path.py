"""Training images per second of the cached data path beside torchvision's ImageFolder + DataLoader.

    python benchmarks/data_path.py --root ../shared/data/PACS --size 64

Same images, same augmentation (DomainBed's: random resized crop, flip, colour jitter, grayscale, normalisation), same
batch size. `first pass` includes decoding everything once into the cache.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from clients.local_data import LocalData
from fedsim.data import client_names, load_client
from fedsim.data.augment import make_transforms
from fedsim.settings import DataSettings

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def image_folder(root: Path, domain: str, size: int, batch: int, workers: int) -> float:
    """Images per second of ImageFolder + DataLoader with DomainBed's transforms."""
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(size, scale=(0.7, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(0.3, 0.3, 0.3, 0.3),
            transforms.RandomGrayscale(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    loader = DataLoader(datasets.ImageFolder(str(root / domain), transform), batch, shuffle=True, num_workers=workers)
    started = time.perf_counter()
    count = sum(len(labels) for _, labels in loader)
    return count / (time.perf_counter() - started)


def cached(data: LocalData, batch: int) -> float:
    """Images per second of one epoch through LocalData."""
    order = np.random.default_rng(0).permutation(data.examples)
    started = time.perf_counter()
    for start in range(0, len(order), batch):
        data.batch(order[start : start + batch])
    return len(order) / (time.perf_counter() - started)


def main() -> None:
    """Print the rates and their ratio for one domain."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True, help="folder with the PACS domains")
    parser.add_argument("--domain", default="photo")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as cache:
        settings = DataSettings(
            dataset="pacs",
            root=str(options.root),
            image_size=options.size,
            augment="domainbed",
            normalize="imagenet",
            cache=cache,
        )
        other = next(name for name in ("sketch", "cartoon") if name != options.domain)
        assert options.domain in client_names(settings, other)
        started = time.perf_counter()
        data = LocalData(load_client(settings, options.domain), make_transforms(settings, 3), torch.device("cpu"))
        print(f"first pass, decoding {options.domain} into the cache: {time.perf_counter() - started:.1f} s")
        ours = max(cached(data, options.batch) for _ in range(3))
    for workers in (0, 2):
        theirs = max(image_folder(options.root, options.domain, options.size, options.batch, workers) for _ in range(2))
        print(
            f"{options.size} px, {options.threads} thread(s): cached {ours:.0f} images/s, ImageFolder with {workers} "
            f"workers {theirs:.0f} images/s, ratio {ours / theirs:.1f}"
        )


if __name__ == "__main__":
    main()
