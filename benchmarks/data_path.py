"""Training images per second with our cached images, compared with torchvision's ImageFolder + DataLoader.

    python benchmarks/data_path.py --root ../shared/data/PACS --size 64

Images, augmentation (DomainBed's: random resized crop, flip, colour jitter, grayscale, normalization) and batch size
are the same on both sides. The first epoch decodes all images into the cache; a later epoch only opens the cache. The
second line is the cost of crops in original coordinates: the same images are used as squares, and as if each had 640 x
480 pixels. --no-torchvision leaves out ImageFolder. Rates are per second of processor time, so that other programs have
little influence.
"""

import argparse
import statistics
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
    started = time.process_time()
    for start in range(0, len(order), batch):
        data.batch(order[start : start + batch])
    return len(order) / (time.process_time() - started)


def opened(settings: DataSettings, domain: str) -> tuple[LocalData, float]:
    """(one client's data, the processor seconds that opening it took)."""
    started = time.process_time()
    data = LocalData(load_client(settings, domain), make_transforms(settings, 3), torch.device("cpu"))
    return data, time.process_time() - started


def as_squares_or_not(data: LocalData, batch: int, repeats: int = 5) -> tuple[float, float]:
    """Median images per second of square images, and of the same images as if they had 640 x 480 pixels."""
    wide = torch.tensor([[480, 640]], dtype=torch.int32).expand(len(data.images), 2)
    rates: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repeats):
        for squeezed in (False, True):
            data.sizes = wide if squeezed else None
            rates[squeezed].append(cached(data, batch))
    return statistics.median(rates[False]), statistics.median(rates[True])


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True, help="folder with the PACS domains")
    parser.add_argument("--domain", default="photo")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--torchvision", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def compare_epochs(options: argparse.Namespace, settings: DataSettings) -> float:
    """Print the first and a later epoch, and crops of squares and others; returns the median rate in images/s."""
    data, cold = opened(settings, options.domain)
    first = data.examples / cached(data, options.batch)
    warm = opened(settings, options.domain)[1]
    rate = statistics.median(cached(data, options.batch) for _ in range(3))
    squares, wide = as_squares_or_not(data, options.batch)
    print(
        f"{options.domain}, {data.examples} training images, processor seconds: first epoch {cold + first:.2f} "
        f"(decoding {cold:.2f}), warm epoch {warm + data.examples / rate:.2f} (opening {warm:.2f})"
    )
    print(
        f"crops: squares {squares:.0f} images/s, in the coordinates of 640 x 480 {wide:.0f}, ratio {wide / squares:.2f}"
    )
    return rate


def main() -> None:
    """Print the rates and their ratio for one domain."""
    options = arguments()
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
        ours = compare_epochs(options, settings)
    for workers in (0, 2) if options.torchvision else ():
        theirs = max(image_folder(options.root, options.domain, options.size, options.batch, workers) for _ in range(2))
        print(
            f"{options.size} px, {options.threads} thread(s): cached {ours:.0f} images/s, ImageFolder with {workers} "
            f"workers {theirs:.0f} images/s, ratio {ours / theirs:.1f}"
        )


if __name__ == "__main__":
    main()
