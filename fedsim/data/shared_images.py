"""Images that are there twice: in the unseen domain and a source domain, in two source domains, or in two classes.

Others are in training and validation of one domain, where the selection sees what was trained on.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fedsim.common.errors import UserError
from fedsim.data.benchmarks import benchmark, resolve_target
from fedsim.data.loading import held_out, source_domains, split_of_domain
from fedsim.data.reader import Reader, reader
from fedsim.data.row import Benchmark
from fedsim.settings import DataSettings

Pairs = dict[str, tuple[int, int]]  # {domain: (copies, all images)}
MOST_SHARED = 0.1  # of the unseen domain's images; with more of them a run is refused
NEAR = 3  # of 255, by which every part of an image may differ from that of the same picture in another encoding


@dataclass(frozen=True)
class SharedImages:
    """How many of the unseen domain's `images` are in any other domain that is used (`shared`), and in which ones.

    That is a source domain, or the one of `run.validation_domain`, which selects the round.

    classes: {domain: (images whose file is in another class of the domain too, all)}.
    between: {two of these domains: (images of the smaller one that are in the other, its images)}, from a tenth on.
    validation: {source domain: (validation images that look like a training image of their class, all)}.
    unit: what one example is called; examples that are no images may be equal by chance, so that none is refused.
    """

    target: str
    images: int
    shared: int
    sources: dict[str, int]
    classes: Pairs = field(default_factory=dict)
    between: Pairs = field(default_factory=dict)
    validation: Pairs = field(default_factory=dict)
    unit: str = "images"

    def record(self) -> dict[str, Any]:
        """What environment.json holds; empty when nothing is shared."""
        values = asdict(self)
        if not self.shared:
            for name in ("target", "images", "shared", "sources"):
                del values[name]
        facts = {name: value for name, value in values.items() if value not in ({}, "images")}
        return {} if facts.keys() == {"unit"} else facts

    def notes(self) -> list[str]:
        """What a run says of copies."""
        texts = copy_texts(self.record())
        if not self.shared:
            return texts
        first = f"{self.text()}; the accuracy on these says nothing about an unseen domain"
        return [first, *texts]

    def text(self) -> str:
        """`74 of the 75 images of photo (98.7 %) are also in sketch (74), byte for byte`; empty without any."""
        if not self.shared:
            return ""
        copies = [f"{domain} ({count:,})" for domain, count in self.sources.items()]
        where = ", ".join(copies)
        images = f"{_some_of(self.shared, self.images)} {self.unit} of {self.target}"
        percent = 100 * self.shared / self.images
        return f"{images} ({percent:.1f} %) are also in {where}, {_exactly(self.unit)}"

    def refuse(self) -> None:
        """UserError when the share is above MOST_SHARED."""
        is_large = self.shared > MOST_SHARED * self.images
        if self.unit == "images" and is_large:
            raise UserError(
                f"{self.text()}: the unseen domain would be tested on images that train or select the model. At most "
                f"{MOST_SHARED:.0%} may be; remove the copies (fedsim datasets PATH names them), or leave a domain out "
                "by data.domains"
            )


def copy_texts(record: Mapping[str, Any]) -> list[str]:
    """A sentence for each domain with copies in two classes, each two with copies, and each that validates on them."""
    unit = record.get("unit", "images")
    exactly = _exactly(unit)
    texts = []
    for domain, (copies, images) in record.get("classes", {}).items():
        some = _some_of(copies, images)
        texts.append(f"{some} {unit} of {domain} are also in another class, {exactly}")
    for domains, (copies, images) in record.get("between", {}).items():
        share = f"{copies / images:.1%} of the smaller domain"
        texts.append(f"{domains} share {copies:,} {unit}, {share}, {exactly}")
    for domain, (copies, images) in record.get("validation", {}).items():
        some = _some_of(copies, images)
        texts.append(f"{some} validation images of {domain} look like a training image of their class")
    return texts


def _some_of(copies: int, images: int) -> str:
    return f"{copies:,} of the {images:,}"


def _exactly(unit: str) -> str:
    """How two equal examples are equal, in words."""
    return "byte for byte" if unit == "images" else "value for value"


def shared_images(data: DataSettings, target: str, bench: Benchmark | None = None) -> SharedImages:
    """Counts the unseen domain's images whose bytes another domain of the run has, whatever their names and labels are.

    Nothing is counted where domains have no image files of their own, as with rotations that show the same images.
    """
    bench = bench or benchmark(data)
    unseen = resolve_target(bench, target)
    read = reader(data, bench)
    sources = source_domains(data, unseen, bench)
    selecting = held_out(data, bench)
    others = [*sources, selecting] if selecting else sources
    used = [unseen, *others] if unseen in bench.domains else others
    files: dict[str, list[bytes]] = {}
    if not (bench.same_images or bench.test_apart):
        files = {domain: _files_of(read, domain) for domain in used}
    if not any(files.values()):
        return SharedImages(unseen, images=0, shared=0, sources={}, unit=bench.unit)
    tested = files.get(unseen, [])
    in_two_classes = {}
    for domain, rows in files.items():
        in_two_classes[domain] = _in_two_classes(rows, read.labels(domain))
    present = {domain: set(files[domain]) for domain in others}
    copies, shared = _copies_of(tested, present)
    alike = {domain: _alike(read, domain) for domain in sources}
    return SharedImages(
        unseen,
        images=len(tested),
        shared=shared,
        sources=copies,
        classes=_with_copies(in_two_classes),
        between=_between(present),
        validation=_with_copies(alike),
        unit=bench.unit,
    )


def _files_of(read: Reader, domain: str) -> list[bytes]:
    """The digest of each image of a domain; none where it has no files."""
    digests = read.digests(domain)
    return [] if digests is None else [row.tobytes() for row in digests]


def _with_copies(pairs: Pairs) -> Pairs:
    """The pairs (copies, all) of the domains that have any copy."""
    return {domain: pair for domain, pair in pairs.items() if pair[0]}


def _copies_of(
    tested: Sequence[bytes],
    files: Mapping[str, set[bytes]],
) -> tuple[dict[str, int], int]:
    """(how many tested images each domain has too, how many any of them has)."""
    where: dict[str, int] = {}
    anywhere: set[bytes] = set()
    for domain, present in files.items():
        shared = present.intersection(tested)
        if shared:
            where[domain] = sum(one in shared for one in tested)
            anywhere |= shared
    return where, sum(one in anywhere for one in tested)


def _in_two_classes(files: Sequence[bytes], labels: np.ndarray) -> tuple[int, int]:
    """(images whose file is there with another label too, all images)."""
    pairs = set(zip(files, labels.tolist()))
    kinds = Counter(file for file, _ in pairs)
    copies = sum(kinds[file] > 1 for file in files)
    return copies, len(files)


def _between(files: Mapping[str, set[bytes]]) -> Pairs:
    """{two domains: (files that both have, files of the smaller one)} of those that share more than MOST_SHARED."""
    pairs = {}
    for one, other in itertools.combinations(files, 2):
        first, second = files[one], files[other]
        shared = len(first & second)
        smaller = min(len(first), len(second))
        if shared > MOST_SHARED * smaller:
            pairs[f"{one} and {other}"] = shared, smaller
    return pairs


def _alike(read: Reader, domain: str) -> tuple[int, int]:
    """(validation images of a domain that look like a training image of their class, all of them)."""
    looks = None if read.data.is_dealt else read.looks(domain)  # mixed clients split what they hold by themselves
    if looks is None:
        return 0, 0
    labels = read.labels(domain)
    train, validation = split_of_domain(read, domain, labels)
    copies = 0
    for label in np.unique(labels):
        of_class = labels == label
        held = validation[of_class[validation]]
        trained = train[of_class[train]]
        copies += near_copies(looks[held], looks[trained])
    return copies, len(validation)


def near_copies(images: np.ndarray, others: np.ndarray) -> int:
    """How many rows uint8 [N,D] have a row of the others [M,D] that differs nowhere by more than NEAR."""
    order = np.argsort(others.mean(axis=1))
    others = others[order].astype(np.int16)
    means = others.mean(axis=1)
    margins = [-NEAR - 1e-6, NEAR + 1e-6]
    of_images = images.mean(axis=1)
    places = np.searchsorted(means, of_images[:, None] + margins)  # no other row may be near
    copies = 0
    for image, (low, high) in zip(images, places):
        differences = np.abs(others[low:high] - image)
        is_near = (differences <= NEAR).all(axis=1)
        copies += bool(is_near.any())
    return copies
