"""The reader of an image tree domain/class/image, and of what has a listing like one."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePath

import numpy as np

from fedsim.common.errors import UserError
from fedsim.data.cache import Arrays, Entry
from fedsim.data.cached_digests import file_digests, image_looks
from fedsim.data.findings import Finding
from fedsim.data.folders import Listing, dataset_folder, list_domain, other_files
from fedsim.data.levels import split_domains
from fedsim.data.lists import WORDS, list_file, listed, reads_lists
from fedsim.data.pixel_findings import pixel_findings
from fedsim.data.reader import Images, Reader, content_hash, numbers_of_groups, with_repeats
from fedsim.data.row import Benchmark
from fedsim.settings import DataSettings, cache_root, data_root

SERIES = re.compile(r"(.*\d.*?)[\W_]+[^\W_]{1,4}")  # a name whose first part has a number, and a short last part


class ImageTree(Reader):
    """Reads an image tree domain/class/image through the cache. Other trees and tables give another `listing`."""

    own_files = True
    takes_lists = True

    def __init__(self, data: DataSettings, bench: Benchmark) -> None:
        super().__init__(data, bench)
        self._open: dict[str, Arrays] = {}
        self._known: dict[str, dict[str, str]] = {}
        self._entries: dict[str, Entry] = {}

    def find(self) -> None:
        """The folder with the domains must be there."""
        dataset_folder(self.data, self.found)

    def listing(self, domain: str) -> Listing:
        """Files and labels of a domain."""
        return list_domain(self.data, self.found, domain)

    def images(self, domain: str, apart: bool = False) -> Images:
        """Images and labels of a domain, decoded on first use."""
        return self._cached(domain)[:2]

    def sizes(self, domain: str) -> np.ndarray:
        """Heights and widths of the files' images."""
        return self._cached(domain)[2]

    def _cached(self, domain: str) -> Arrays:
        """Images, labels and sizes, looked up once."""
        if domain not in self._open:
            self._open[domain] = self._entry(domain).arrays()
        return self._open[domain]

    def _entry(self, domain: str) -> Entry:
        """A domain's place in the cache, whose files are looked at once."""
        if domain not in self._entries:
            self._entries[domain] = Entry(
                self.listing(domain),
                dataset=self.found.name,
                domain=domain,
                side=self.data.image_size,
                cache=cache_root(self.data),
            )
        return self._entries[domain]

    def labels(self, domain: str) -> np.ndarray:
        """The labels of the existing files; no file is opened."""
        return self.listing(domain).labels

    def fingerprint(self, domain: str) -> str:
        """Hash of the files' names, labels and bytes: from the cache, else by reading the files."""
        content = self._hashes(domain)["content"]
        beside = self._lists(domain) if reads_lists(self.data) else []
        groups = self.groups(domain)
        if groups is not None:
            beside.append(groups.tobytes())
        return content_hash(content.encode(), *beside) if beside else content

    def groups(self, domain: str) -> np.ndarray | None:
        """With data.group = "folder" the numbers int64 [N] of the first folders below the class.

        Folders of one name in several classes of a domain are one group. UserError for an image without such a folder.
        """
        if self.data.group != "folder":
            return super().groups(domain)
        listing = self.listing(domain)
        folders = [folder_below_class(file, listing.depth) for file in listing.files]
        if "" in folders:
            file = listing.folder / listing.files[folders.index("")]
            raise UserError(
                f"data.group = 'folder': {file} lies in no folder below its class; put it into the folder "
                "of its group, or leave out data.group"
            )
        return numbers_of_groups(folders)

    def findings(self) -> list[Finding]:
        """Images in folders below their class that are no group, files that are not read, and splits as domains."""
        listings = {domain: self.listing(domain) for domain in self.found.domains}
        findings = [*self._ungrouped(listings), *other_files(listings)]
        if self.found.name == "folder":
            if not self.data.group:
                findings += numbered_series(listings)
            remedy = "make one folder for each domain, and leave its split to data.split"
            findings += split_domains(self.found.domains, data_root(self.data), remedy)
        return findings

    def missing_text(self, domain: str) -> str:
        """Says which files of a domain are not there; empty for a tree, whose files were found in its folders."""
        return ""

    def _ungrouped(self, listings: Mapping[str, Listing]) -> list[Finding]:
        """A finding where images lie in folders below their class, any of these has two images, and none is a group."""
        if self.data.group:
            return []
        folders = {}
        for domain, listing in listings.items():
            names = with_repeats(folder_below_class(file, listing.depth) for file in listing.files)
            if names:
                folders[domain] = names
        if not folders:
            return []
        domains = ", ".join(folders)
        count = sum(map(len, folders.values()))
        first = min(map(min, folders.values()))
        text = (
            f"images of {domains} lie in {count:,} folders below their classes, such as {first!r}, and are "
            "drawn one by one"
        )
        remedy = "if such a folder is a patient or a sequence, data.group = 'folder' keeps its images together"
        return [Finding("groups", domains, count, text, remedy)]

    def file_findings(self) -> list[Finding]:
        """What the images of the used domains lose when they are decoded."""
        findings = []
        for domain in self.found.domains:
            findings += pixel_findings(domain, self._entry(domain).seen())
        return findings

    def digests(self, domain: str) -> np.ndarray:
        """Digests of the files' bytes, from the cache or by reading the files."""
        return file_digests(self._entry(domain))

    def looks(self, domain: str) -> np.ndarray:
        """Small means of the decoded images, from the cache or by computing them."""
        return image_looks(self._entry(domain))

    def nameless(self, domain: str) -> str:
        """Hash of the files' labels and bytes, in any order and without names."""
        return self._hashes(domain)["nameless"]

    def _hashes(self, domain: str) -> dict[str, str]:
        """The hashes of a domain's files, looked up or computed once."""
        if domain not in self._known:
            self._known[domain] = self._entry(domain).hashes()
        return self._known[domain]

    def _lists(self, domain: str) -> list[bytes]:
        """What says which images train, validate and are tested, where that is no part of the listing."""
        used = [list_file(self.data, domain, part) for part in WORDS]
        return [file.read_bytes() for file in used if file is not None]

    def listed(self, domain: str, part: str) -> np.ndarray | None:
        """Indices of the images that a list in `data.lists` names."""
        domains = self.found.all_domains or self.found.domains
        return listed(self.data, domain, part, self.listing(domain), domains)


def numbered_series(listings: Mapping[str, Listing]) -> list[Finding]:
    """A finding for each domain whose files are called NUMBERED_NUMBER, several for one first part, as P03_1, P03_2.

    Where all files have one first part, or each has another one, it says nothing about them.
    """
    findings = []
    for domain, listing in listings.items():
        series: Counter[tuple[str, str]] = Counter()  # files by folder and first part
        for file in map(PurePath, listing.files):
            matched = SERIES.fullmatch(file.stem)
            if matched:
                series[str(file.parent), matched[1]] += 1
        beginnings = sorted({beginning for _, beginning in series})
        images = len(listing.files)
        has_others = series.total() < images
        has_few_each = images < 2 * len(series)
        if len(beginnings) < 2 or has_others or has_few_each:
            continue
        text = (
            f"the names of the {images:,} images of {domain} have {len(beginnings):,} beginnings, such as "
            f"{beginnings[0]!r}, and the images are drawn one by one"
        )
        remedy = (
            "if a beginning is a patient or a sequence, put its images into a folder below the class (data.group = "
            "'folder') or name it in a table (data.columns.group)"
        )
        findings.append(Finding("groups", domain, len(beginnings), text, remedy))
    return findings


def folder_below_class(file: str, depth: int = 1) -> str:
    """The first folder below the class in the path CLASS/FOLDER/.../IMAGE; empty for CLASS/IMAGE.

    depth: how many folders the path has up to the class, with the class itself
    """
    parts = PurePath(file).parts
    return parts[depth] if len(parts) > depth + 1 else ""
