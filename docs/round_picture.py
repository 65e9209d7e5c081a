"""Draws the five steps of a round, with the slots of a method where they act, as an SVG.

    python docs/round_picture.py      # writes docs/figures/round.svg, with all slots

The page of each method has this picture with the slots lit in which the method has a part of its own. Every slot of
`fedsim.methods.recipe.SLOTS` has a place here, which a test holds.
"""

from collections.abc import Collection, Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("figures") / "round.svg"
WIDTH, HEIGHT = 532, 476
PILL = 92  # width of a slot's name


class Slot(NamedTuple):
    """Where a slot is drawn, by the left upper corner of its name, whose part it is, and its caption on the right."""

    x: int
    y: int
    side: str
    caption: str = ""


SERVER, CLIENT, MODEL = "server", "client", "model"
PLACES = {
    "weights": Slot(14, 46, SERVER, "who counts how"),
    "fuse": Slot(14, 76, SERVER, "into one model"),
    "banks": Slot(14, 106, SERVER, "beyond models"),
    "visits": Slot(14, 136, SERVER, "of the unseen"),
    "refine": Slot(14, 166, SERVER, "a last change"),
    "share": Slot(236, 46, SERVER),
    "compress": Slot(236, 76, SERVER),
    "reports": Slot(236, 222, CLIENT),
    "batches": Slot(346, 46, CLIENT, "which data"),
    "augment": Slot(346, 76, CLIENT, "changes it"),
    "objective": Slot(346, 106, CLIENT, "the loss"),
    "terms": Slot(346, 136, CLIENT, "more loss"),
    "update": Slot(346, 166, CLIENT, "each step"),
    "companions": Slot(346, 196, CLIENT, "more nets"),
    "step": Slot(346, 226, CLIENT, "whole step"),
    "norm": Slot(14, 236, MODEL, "normalization"),
    "inserts": Slot(14, 266, MODEL, "added layers"),
    "infer": Slot(14, 350, MODEL, "how the model predicts there"),
    "unlabelled": Slot(14, 380, CLIENT, "how that machine answers a visit, without labels"),
}
STYLE = """
svg{font-family:-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:13px}
.box{fill:#fff;stroke:#8c959f}.unseen{fill:#fff;stroke:#8c959f;stroke-dasharray:6 4;stroke-width:1.5}
.title{font-size:16px;font-weight:700;fill:#1f2328}.text{fill:#1f2328}.caption{fill:#59636e}
.name{font-family:ui-monospace,Consolas,'DejaVu Sans Mono',monospace;fill:#1f2328}
.server{fill:#d6e9f8;stroke:#0072b2}.client{fill:#fbe3d0;stroke:#d55e00}.model{fill:#d3efe5;stroke:#009e73}
.off{fill:none;stroke:#d0d7de}.off+.name{fill:#818b98}
.arrow{fill:none;stroke:#59636e;stroke-width:2}.head{fill:#59636e}
@media(prefers-color-scheme:dark){
.box,.unseen{fill:#0d1117;stroke:#6e7681}.title,.text,.name{fill:#e6edf3}.caption{fill:#9198a1}
.server{fill:#0b3550}.client{fill:#4d2608}.model{fill:#0a3d2f}
.off{fill:none;stroke:#3d444d}.off+.name{fill:#7d8590}.arrow{stroke:#9198a1}.head{fill:#9198a1}}
"""


def box(x: int, y: int, width: int, height: int, kind: str) -> str:
    """A rectangle with round corners."""
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="7"/>'


def text(x: int, y: int, words: str, kind: str, anchor: str = "start") -> str:
    """A line of text; y is its base line."""
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def arrow(path: str) -> str:
    """A line with a head at its end."""
    return f'<path class="arrow" d="{path}" marker-end="url(#head)"/>'


def slots(lit: Collection[str]) -> Iterator[str]:
    """Every slot at its place: coloured where it is lit, and in grey elsewhere."""
    for name, slot in PLACES.items():
        yield box(slot.x, slot.y, PILL, 24, slot.side if name in lit else "off")
        yield text(slot.x + PILL // 2, slot.y + 17, name, "name", "middle")
        yield text(slot.x + PILL + 6, slot.y + 17, slot.caption, "caption")


def scenery() -> Iterator[str]:
    """The machines of a federation, and what goes from one to the other."""
    yield box(6, 10, 218, 190, "box")
    yield text(14, 34, "4  the server averages", "title")
    for behind in (8, 4, 0):  # several clients
        yield box(338 + behind, 10 + behind, 178, 250, "box")
    yield text(346, 34, "2  clients train", "title")
    yield arrow("M 226 30 H 330")
    yield text(281, 22, "1  the model", "title", "middle")
    yield text(281, 118, "which tensors", "caption", "middle")
    yield text(281, 134, "go, and in", "caption", "middle")
    yield text(281, 150, "what form", "caption", "middle")
    yield arrow("M 336 174 H 232")
    yield text(281, 192, "3  updates", "title", "middle")
    yield arrow("M 281 221 V 201")
    yield text(281, 261, "measurements", "caption", "middle")
    yield box(6, 208, 218, 90, "box")
    yield text(14, 229, "model", "title")
    yield arrow("M 115 298 V 310")
    yield box(6, 312, 518, 100, "unseen")
    yield text(14, 338, "5  test: unseen domain", "title")
    yield text(250, 338, "no client has it, it selects nothing", "caption")
    yield text(6, 436, "Each client has a domain of its own. A word in a box is a slot: a method fills", "text")
    yield text(6, 456, "a few of them with parts of its own, and the others have FedAvg's parts.", "text")


def picture(lit: Collection[str], title: str) -> str:
    """The SVG, with the names of these slots in colour.

    title: what a reader with a screen reader hears
    """
    head = '<marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
    marker = f'<defs>{head}<path class="head" d="M0 0 8 4 0 8z"/></marker></defs>'
    drawn = "\n".join([*scenery(), *slots(lit)])
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return f"{start}<title>{escape(title)}</title><style>{STYLE}</style>{marker}\n{drawn}\n</svg>\n"


if __name__ == "__main__":
    FILE.write_text(picture(PLACES, "One round, and the slots of a method"))
