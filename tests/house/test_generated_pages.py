"""The pages that the documentation makes from the code: every part is there, with whole sentences and explained."""

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import FunctionType

import pytest

from fedsim.methods.docstrings import blocks, field_of, field_texts, layers_of
from fedsim.methods.registry import one_line, parts_by_slot
from fedsim.models.inserts.base import Insert
from fedsim.models.norms import BatchNorm
from fedsim.models.norms.base import Norm

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module", autouse=True)
def modules() -> Iterator[None]:
    sys.path.insert(0, str(DOCS))
    yield
    sys.path.remove(str(DOCS))


def kinds() -> dict[str, type]:
    return {name: kind for found in parts_by_slot().values() for name, kind in found.items()}


def docstrings() -> Iterator[tuple[str, str]]:
    from generate import API

    for kind in kinds().values():
        for each in (kind, *layers_of(kind)):
            yield each.__name__, inspect.getdoc(each) or ""
    for name in API:
        module = importlib.import_module(name)
        yield name, inspect.getdoc(module) or ""
        for each in vars(module).values():
            if getattr(each, "__module__", "") == name and isinstance(each, type | FunctionType):
                members = vars(each).items() if isinstance(each, type) else ()
                found = [one for key, one in members if isinstance(one, property | FunctionType) and key[0] != "_"]
                for one in (each, *found):
                    yield f"{name}.{each.__name__}", inspect.getdoc(one) or ""


def test_every_part_is_on_a_page_with_its_settings(tmp_path):
    from generate import write_pages

    write_pages(tmp_path)
    index = (tmp_path / "parts" / "index.md").read_text()
    text = "".join(file.read_text() for file in (tmp_path / "parts").glob("*.md"))
    assert re.search(r"^\| `jigsaw`<br>jigen \|( \w+ \|)+$", (tmp_path / "parts" / "pairs.md").read_text(), re.M)
    for name, kind in kinds().items():
        assert re.search(rf"^\| \[{name}\]\(\w+\.md#{name}\) \| .+ \|$", index, re.M), name
        assert f"\n## {name}\n" in text
        assert one_line(kind)
        assert all(f"`method.{name}.{field.name}`" in text for field in dataclasses.fields(kind))


def test_every_setting_of_a_part_is_explained():
    silent = [
        f"{name}.{key}"
        for name, kind in kinds().items()
        for key, text in field_texts(kind).items()
        if not text and not re.search(rf"\b{key}\b", inspect.getdoc(kind) or "")
    ]
    assert silent == []


def test_layers_have_their_formula_or_their_sequence():
    from part_pages import part_section

    for name, kind in kinds().items():
        if issubclass(kind, Norm | Insert) and kind is not BatchNorm:
            text = "\n".join(part_section(kind))
            assert re.search(r" [=*/] |->|~ | - ReLU|Linear\(", text), name


def test_no_sentence_is_broken_in_two():
    def is_whole(text: str) -> bool:
        return not text or text[-1] in ".:?)`" or bool(field_of(text)[0]) or " = " in text  # the last: a formula

    broken = [
        f"{name}: {body[-60:]}"
        for name, text in docstrings()
        for (kind, body), (following, _) in pairwise([*blocks(text), ("end", "")])
        if kind == "text" and following != "lines" and not is_whole(body)
    ]
    assert broken == []


def test_fields_are_found_by_their_names_alone():
    """A list of names of any length begins a field; words before a colon are part of a sentence."""
    text = "A sentence: it\nends here.\n\nweight: 12\nseverity, width, depth, alpha, all_operations: as there\nby `a`"
    bodies = [
        "A sentence: it ends here.",
        "weight: 12",
        "severity, width, depth, alpha, all_operations: as there by `a`",
    ]
    assert [body for _, body in blocks(text)] == bodies
