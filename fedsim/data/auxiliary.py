"""Auxiliary images without labels that a server may use: any folder of pictures that belong to no client or target."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from fedsim.common.errors import UserError
from fedsim.common.files import of_home
from fedsim.data.benchmarks import benchmark
from fedsim.data.cache import Entry, content_of, digests_of
from fedsim.data.folders import LISTED_SUFFIXES, Listing, images_of, is_image, listing_of
from fedsim.data.names import subfolders
from fedsim.data.reader import Reader, reader
from fedsim.settings import DataSettings, cache_root, start_folder

LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as Pillow's greyscale


def auxiliary_images(folder: str, data: DataSettings, channels: int) -> np.ndarray:
    """All images of a folder and its subfolders, uint8 [N, channels, s, s] with s = `data.image_size`.

    They are decoded once, into the cache. Raises UserError for a folder that does not exist or has no image.
    """
    listing = auxiliary_listing(folder)
    entry = Entry(listing, "auxiliary", listing.folder.name, data.image_size, cache_root(data))
    images, _, _ = entry.arrays()
    if channels == 3:
        return images
    grey = np.einsum("nchw,c->nhw", images, LUMA)
    return np.round(grey).astype(np.uint8)[:, None]


def auxiliary_listing(folder: str) -> Listing:
    """The images of a folder, in the order that a domain with these class folders would have."""
    root = start_folder() / of_home(folder)
    if not root.is_dir():
        raise UserError(f"no folder {root} with auxiliary images; name one that holds unlabelled images")
    loose = sorted(path.name for path in root.iterdir() if is_image(path.name) and path.is_file())
    groups = [images_of(root, name) for name in subfolders(root)]
    if loose:
        groups = [loose, *groups]
    if not any(groups):
        raise UserError(f"{root} holds no image; auxiliary images are {LISTED_SUFFIXES} files")
    return listing_of(root, groups)


def auxiliary_fingerprint(folder: str) -> dict[str, int | str]:
    """The number of images of a folder, and a hash of their names below it and their bytes."""
    listing = auxiliary_listing(folder)
    digests = digests_of(listing)
    return {"images": len(digests), "content": content_of(listing, digests)}


def refuse_own_images(folder: str, data: DataSettings, known: Mapping[str, Mapping[str, int | str]]) -> None:
    """Raises UserError when auxiliary images are those of a client or of the target.

    Refused is a folder with any file that has the bytes of an image of a domain, whatever the form of the data set. So
    is a copy of a domain that a site holds (`known`: fingerprints of the sites' data).
    """
    listing = auxiliary_listing(folder)
    root = listing.folder.resolve()
    digests = digests_of(listing)
    content = content_of(listing, digests)
    for client, fingerprint in known.items():
        if fingerprint["content"] == content:
            raise _refused(root, f"these are the images of {client!r}")
    files = dict(zip(digests, listing.files, strict=True))
    bench = benchmark(data)
    read = reader(data, bench)
    for domain in bench.domains:
        for row in _digests_here(read, domain):
            name = files.get(row.tobytes())
            if name:
                raise _refused(root, f"{name} is an image of the domain {domain!r}")


def _refused(root: Path, reason: str) -> UserError:
    return UserError(
        f"{root}: {reason}; auxiliary images must be neither a client's nor the target's: name another folder"
    )


def _digests_here(read: Reader, domain: str) -> Iterable[np.ndarray]:
    """Digests uint8 [16] of a domain's images; none where it has no files, or where another machine has them."""
    try:
        digests = read.digests(domain)
    except UserError:
        return ()
    return () if digests is None else digests
