"""Images that the unseen domain shares with source domains, byte for byte: the model is then tested on what it saw."""

from dataclasses import asdict, dataclass
from typing import Any

from fedsim.common.errors import UserError
from fedsim.data.benchmarks import benchmark, resolve_domain
from fedsim.data.loading import source_domains
from fedsim.data.reader import reader
from fedsim.data.row import Benchmark
from fedsim.settings import DataSettings

MOST_SHARED = 0.1  # of the unseen domain's images; with more of them a run is refused


@dataclass(frozen=True)
class SharedImages:
    """How many of the unseen domain's `images` are in any source domain (`shared`), and in which ones."""

    target: str
    images: int
    shared: int
    sources: dict[str, int]

    def record(self) -> dict[str, Any]:
        """What environment.json holds; empty when nothing is shared."""
        return asdict(self) if self.shared else {}

    def text(self) -> str:
        """`74 of the 75 images of photo (98.7 %) are also in sketch (74), byte for byte`; empty without any."""
        if not self.shared:
            return ""
        where = ", ".join(f"{domain} ({count:,})" for domain, count in self.sources.items())
        return (
            f"{self.shared:,} of the {self.images:,} images of {self.target} ({100 * self.shared / self.images:.1f} %) "
            f"are also in {where}, byte for byte"
        )

    def refuse(self) -> None:
        """UserError when the share is above MOST_SHARED."""
        if self.shared > MOST_SHARED * self.images:
            raise UserError(
                f"{self.text()}: the unseen domain would be tested on training images. At most {MOST_SHARED:.0%} may "
                "be; remove the copies (fedsim datasets PATH names them), or leave a domain out by data.domains"
            )


def shared_images(data: DataSettings, target: str, found: Benchmark | None = None) -> SharedImages:
    """Counts the unseen domain's images whose bytes a source domain has, too, whatever their names and labels are.

    Nothing is counted where domains have no image files of their own, as with rotations that show the same images.
    """
    found = found or benchmark(data)
    unseen, read = resolve_domain(found, target), reader(data, found)
    own = None if found.same_images or found.test_apart else read.digests(unseen)
    if own is None:
        return SharedImages(unseen, 0, 0, {})
    wanted = [row.tobytes() for row in own]
    copies: dict[str, set[bytes]] = {}
    for domain in source_domains(data, unseen, found):
        own = read.digests(domain)
        seen = set(wanted).intersection(row.tobytes() for row in own) if own is not None else set()
        if seen:
            copies[domain] = seen
    anywhere = set().union(*copies.values())
    sources = {domain: sum(one in seen for one in wanted) for domain, seen in copies.items()}
    return SharedImages(unseen, len(wanted), sum(one in anywhere for one in wanted), sources)
