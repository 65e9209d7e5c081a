"""Makes the data set `drawings` from the npm packages in which five sets of emojis are published.

    npm install emoji-datasource-google@16.0.0 emoji-datasource-twitter@16.0.0 openmoji@17.0.0 \
        @lobehub/fluent-emoji-3d@1.1.0 unicode-emoji-json@0.9.0
    pip install resvg-py
    python docs/make_drawings.py node_modules FOLDER        # 64 pixels: STYLE/GROUP/NAME.png, and emoji.csv
    python docs/make_drawings.py --embed FOLDER             # 32 pixels: the sheets in fedsim/data/embedded/drawings

Emojis with a skin tone are left out, as are those that one of the five sets lacks. Every image is drawn on white.
"""

import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from fedsim.data.drawings import COLUMNS, EMBEDDED, SIDE, STYLES, class_of

FULL_SIDE = 64
GROUPS = {
    "Smileys & Emotion": "face", "People & Body": "people", "Animals & Nature": "nature", "Food & Drink": "food",
    "Travel & Places": "travel", "Activities": "activity", "Objects": "object", "Symbols": "symbol", "Flags": "flag",
}  # fmt: skip


class Emoji(NamedTuple):
    """A line of emoji.csv."""

    name: str
    group: str
    subgroup: str
    unicode: str


def emojis(packages: Path) -> Iterator[Emoji]:
    """All emojis without a skin tone, in the order of their names."""
    text = (packages / "unicode-emoji-json" / "data-by-emoji.json").read_text(encoding="utf-8")
    names = json.loads(text)
    text = (packages / "emoji-datasource-google" / "emoji.json").read_text(encoding="utf-8")
    subgroups = {each["unified"].lower(): each["subcategory"] for each in json.loads(text)}
    for characters, facts in sorted(names.items(), key=lambda item: item[1]["slug"]):
        code = "-".join(f"{ord(letter):04x}" for letter in characters)
        if code in subgroups:
            yield Emoji(facts["slug"], GROUPS[facts["group"]], subgroups[code], code)


def picture(packages: Path, style: str, code: str) -> Image.Image | None:
    """An emoji in one style; None where the style does not have it."""
    short = code.replace("-fe0f", "")
    for form in (code, short):
        file = {
            "fluent_3d": packages / "@lobehub" / "fluent-emoji-3d" / "assets" / f"{form}.webp",
            "noto": packages / "emoji-datasource-google" / "img" / "google" / "64" / f"{form}.png",
            "openmoji": packages / "openmoji" / "color" / "svg" / f"{form.upper()}.svg",
            "openmoji_black": packages / "openmoji" / "black" / "svg" / f"{form.upper()}.svg",
            "twemoji": packages / "emoji-datasource-twitter" / "img" / "twitter" / "64" / f"{form}.png",
        }[style]
        if file.is_file():
            return on_white(drawn(file))
    return None


def drawn(file: Path) -> Image.Image:
    """The image of a file; an SVG is drawn at twice the size that is needed."""
    if file.suffix != ".svg":
        return Image.open(file).convert("RGBA")
    from resvg_py import svg_to_bytes

    data = bytes(svg_to_bytes(svg_path=str(file), width=2 * FULL_SIDE, height=2 * FULL_SIDE))
    return Image.open(io.BytesIO(data)).convert("RGBA")


def on_white(image: Image.Image) -> Image.Image:
    """The image on a white ground, at 64 pixels."""
    ground = Image.new("RGBA", image.size, "white")
    ground.alpha_composite(image)
    return ground.convert("RGB").resize((FULL_SIDE, FULL_SIDE), Image.Resampling.LANCZOS)


def write_full(packages: Path, folder: Path) -> None:
    """Write the images of all emojis that every style has, and their list."""
    listed = []
    for emoji in emojis(packages):
        pictures = {style: picture(packages, style, emoji.unicode) for style in STYLES}
        complete = {style: image for style, image in pictures.items() if image is not None}
        if len(complete) < len(STYLES):
            continue
        listed.append(emoji)
        for style, image in complete.items():
            file = folder / style / emoji.group / f"{emoji.name}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            image.save(file, optimize=True)
    with (folder / "emoji.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Emoji._fields)
        writer.writerows(listed)
    print(f"{len(listed)} emojis in {len(STYLES)} styles are in {folder}")


def embed(folder: Path) -> None:
    """Write one sheet of small images for each style, without loss, and the list of their names and classes."""
    with (folder / "emoji.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if class_of(row["subgroup"])]
    EMBEDDED.mkdir(parents=True, exist_ok=True)
    for style in STYLES:
        lines = -(-len(rows) // COLUMNS)
        sheet = Image.new("RGB", (COLUMNS * SIDE, lines * SIDE), "white")
        for index, row in enumerate(rows):
            image = Image.open(folder / style / row["group"] / f"{row['name']}.png").convert("RGB")
            place = (index % COLUMNS * SIDE, index // COLUMNS * SIDE)
            sheet.paste(image.resize((SIDE, SIDE), Image.Resampling.BOX), place)
        sheet.save(EMBEDDED / f"{style}.webp", lossless=True, quality=100, method=6)
    with (EMBEDDED / "emoji.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, Emoji._fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(rows)} emojis in {len(STYLES)} styles are in {EMBEDDED}")


if __name__ == "__main__":
    if sys.argv[1] == "--embed":
        embed(Path(sys.argv[2]))
    else:
        write_full(Path(sys.argv[1]), Path(sys.argv[2]))
