"""Auxiliary images without labels that a server may use: any folder of pictures that belong to no client or target."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedsim.common.errors import UserError
from fedsim.common.files import of_home
from fedsim.data.benchmarks import benchmark
from fedsim.data.cache import cached_images, content_of, digest
from fedsim.data.folders import IMAGE_SUFFIXES, Listing, dataset_folder, images_of, list_domain
from fedsim.data.names import matching, same, subfolders
from fedsim.data.pixels import read_bytes
from fedsim.settings import DataSettings, cache_root, start_folder

LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as Pillow's greyscale


def auxiliary_images(folder: str, data: DataSettings, channels: int) -> np.ndarray:
    """All images of a folder and its subfolders, uint8 [N, channels, s, s] with s = `data.image_size`.

    They are decoded once, into the cache. Raises UserError for a folder that does not exist or has no image.
    """
    listing = auxiliary_listing(folder)
    images, _ = cached_images(listing, "auxiliary", listing.folder.name, data.image_size, cache_root(data))
    return images if channels == 3 else _grey(images)


def _grey(images: np.ndarray) -> np.ndarray:
    return np.round(np.einsum("nchw,c->nhw", images, LUMA)).astype(np.uint8)[:, None]


def auxiliary_listing(folder: str) -> Listing:
    """The images of a folder, in the order that a domain with these class folders would have."""
    root = start_folder() / of_home(folder)
    if not root.is_dir():
        raise UserError(f"no folder {root} with auxiliary images; name one that holds unlabelled images")
    loose = sorted(name.name for name in root.iterdir() if _is_image(name))
    groups = [images_of(root, name) for name in subfolders(root)]
    files = [*loose, *(name for group in groups for name in group)]
    if not files:
        raise UserError(f"{root} holds no image; auxiliary images are {', '.join(sorted(IMAGE_SUFFIXES))} files")
    sizes = [len(loose), *map(len, groups)] if loose else [len(group) for group in groups]
    return Listing(root, tuple(files), np.repeat(np.arange(len(sizes), dtype=np.int64), sizes))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".") and path.is_file()


def auxiliary_fingerprint(folder: str) -> dict[str, int | str]:
    """The number of images of a folder, and a hash of their names below it and their bytes."""
    listing = auxiliary_listing(folder)
    digests = [digest(read_bytes(listing.folder / name)) for name in listing.files]
    return {"images": len(digests), "content": content_of(listing, digests)}


def refuse_own_images(folder: str, data: DataSettings, known: Mapping[str, Mapping[str, int | str]]) -> None:
    """Raises UserError when auxiliary images are those of a client or of the target.

    Refused are the folder of a domain, and a folder in it or around it. So are a folder with any file that has the
    bytes of a domain's image, and a copy of a domain that a site holds (`known`: fingerprints of the sites' data).
    """
    listing = auxiliary_listing(folder)
    root = listing.folder.resolve()
    digests = [digest(read_bytes(listing.folder / name)) for name in listing.files]
    content = content_of(listing, digests)
    for client, own in known.items():
        if own["content"] == content:
            raise _refused(root, f"these are the images of {client!r}")
    own_images = dict(zip(digests, listing.files, strict=True))
    for domain, theirs in _domain_listings(data).items():
        place = theirs.folder.resolve()
        if root == place or root in place.parents or place in root.parents:
            raise _refused(root, f"the images of the domain {domain!r} are in {place}")
        for name in theirs.files:
            if (value := digest(read_bytes(theirs.folder / name))) in own_images:
                raise _refused(root, f"{own_images[value]} is {name} of the domain {domain!r}")


def _refused(root: Path, reason: str) -> UserError:
    return UserError(
        f"{root}: {reason}; auxiliary images must be neither a client's nor the target's: name another folder"
    )


def _domain_listings(data: DataSettings) -> dict[str, Listing]:
    """The files of all domains of the data set that are files on this machine; a server of a deployment may have
    none."""
    found = benchmark(data)
    if found.name != "folder" and found.reader != "fedsim.data.image_tree:ImageTree":
        return {}
    try:
        folder = dataset_folder(data, found)
    except UserError:
        return {}
    match = matching if found.folder else same
    return {domain: list_domain(data, found, domain)
            for domain in found.all_domains or found.domains if match(domain, subfolders(folder))}  # fmt: skip
