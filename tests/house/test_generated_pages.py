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

from fedsim.common.tasks import TASKS
from fedsim.methods.docstrings import blocks, field_of, field_texts, layers_of
from fedsim.methods.groups import ideas, ideas_of, papers, papers_of, printed_name
from fedsim.methods.recipe import SLOTS
from fedsim.methods.registry import one_line, parts_by_slot
from fedsim.methods.table import METHODS
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


@pytest.fixture(scope="module")
def pages(modules, tmp_path_factory) -> Path:
    from generate import write_pages

    folder = tmp_path_factory.mktemp("docs")
    write_pages(folder)
    return folder


def test_every_part_is_on_a_page_with_its_settings(pages):
    index = (pages / "parts" / "index.md").read_text()
    text = "".join(file.read_text() for file in (pages / "parts").glob("*.md"))
    assert re.search(r"^\| `jigsaw`<br>jigen \|( \w+ \|)+$", (pages / "parts" / "pairs.md").read_text(), re.M)
    for name, kind in kinds().items():
        assert re.search(rf"^\| \[{name}\]\(\w+\.md#{name}\) \| .+ \|$", index, re.M), name
        assert f"\n## {name}\n" in text
        assert one_line(kind)
        own = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert all(f"\n| `{field.name}` | `" in own for field in dataclasses.fields(kind)), name


def test_every_setting_of_a_part_is_explained():
    silent = [f"{name}.{key}" for name, kind in kinds().items() for key, text in field_texts(kind).items() if not text]
    assert silent == []


def test_a_method_has_its_paper_recipe_results_and_source(pages):
    cited = set()
    for name, recipe in METHODS.items():
        text = (pages / "methods" / f"{name}.md").read_text()
        cited |= (found := {paper.citation for paper in papers_of(recipe.paper)})
        assert len(found) == (name != "deepall"), name
        assert all(f"[{paper.title}]({paper.link})" in text for paper in papers_of(recipe.paper))
        linked = re.findall(
            r"^\| \[\w+\]\S+ \| \[(\w+)\]\(#\w+\)<br>\[source\]\(\.\./(code/\S+)\) \| .+ \|$", text, re.M
        )
        assert [part for part, _ in linked if f"\n## {part}\n" not in text] == []
        assert all((pages / file).is_file() for _, file in linked)
        assert linked
        assert "{math}" in text, name
    assert cited == {paper.citation for paper in papers()}
    text = (pages / "methods" / "gperxan.md").read_text()
    assert "[Digits](../tables/digits.md#digits):\n\n| rank | method |" in text
    second = "[Digit masks (segmentation), table 2](../tables/segmentation.md#digit-masks-segmentation):"
    assert second in (pages / "methods" / "elcfs.md").read_text()
    assert re.search(r"^\| 18 \| gperxan \|.*\n\| 35 \| FedAvg \|", text, re.M)
    assert "of the paper is a stage: its checkpoint with" in text


def test_the_table_of_methods_says_what_leaves_the_clients(pages):
    lines = [line.split(" | ") for line in (pages / "methods" / "table.txt").read_text().splitlines()[2:]]
    rows = {cells[0].split("]")[0].removeprefix("| ["): cells[1:] for cells in lines}
    assert rows.keys() == METHODS.keys()
    assert rows["scaffold"][2:] == ["1.03", "1.65", ", ".join(TASKS), "91.4 |"]
    leaves = {name: rows[name][1] for name in ("fedavg", "fedbn", "afl", "fpl", "copa", "csac", "deepall")}
    more = "updates, and statistics, features or single models"
    assert list(leaves.values()) == ["model updates"] * 2 + ["updates and single numbers"] + [more] * 3 + [
        "all raw data"
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "theta <- theta + sum_k p_k delta_k / a_k, with",
            r"$\theta\leftarrow \theta+\sum _{k}\frac{p_{k}\delta _{k}}{a_{k}}$, with",
        ),
        ("(mu/2) ||w - w^t||^2 over all", r"$\frac{\mu }{2 }\left\Vert w-w^{t}\right\Vert ^{2 }$ over all"),
        (
            "H of x_p(i), a word - and mean_k of it",
            "H of $x_{p\\left(i\\right)}$, a word - and $\\operatorname{mean} _{k}$ of it",
        ),
        ("sqrt(unbiased variance + eps) > 1e-7", r"$\sqrt{\mathrm{unbiased}\ \mathrm{variance} +\epsilon }>10^{-7}$"),
        (
            "KL(p || m), theta^ and |S|/N = 1",
            r"$\operatorname{KL}\left(p\,\Vert\,m\right)$, $\hat{\theta }$ and $\frac{\left\vert S\right\vert }{N}=1$",
        ),
        (
            "as mean (1 - D(h'))^2 of -E log CE_c(z) + a x(s), gamma 1",
            r"as $\operatorname{mean}\left(1-D\left(h'\right)\right)^{2}$ of "
            r"$-E\log\operatorname{CE}_{c}\left(z\right)+ax\left(s\right)$, $\gamma$ 1",
        ),
        ("label_first = true and batch-norm (a, b)", "label_first = true and batch-norm (a, b)"),
        (
            "g <- sum_k s_k / sum_k b_k and sum_k s_k / sum_j b_j",
            r"$g\leftarrow \frac{\sum _{k}s_{k}}{\sum _{k}b_{k}}$ and $\frac{\sum _{k}s_{k}}{\sum _{j}b_{j}}$",
        ),
        ("f_k [B, d] or f_k[i]", r"$f_{k}\,\left[B,\ d\right]$ or $f_{k}\left[i\right]$"),
        (
            'd_loss = "max" (beta_t = 1/n at the n-th)',
            r'd_loss = "max" ($\beta _{t}=\frac{1 }{n}$ at the n-th)',
        ),
        ("argmax_k z . c_k", r"$\operatorname{argmax} _{k}z\cdot c_{k}$"),
    ],
)
def test_formulas_are_found_among_words(text, shown):
    from typeset import mathml, typeset

    found = typeset(text, str)
    joined = re.sub(r"\{math\}`([^`]*)`", r"$\1$", found).replace("$$", "")
    assert joined.replace(" ", "") == shown.replace(" ", "")
    assert all(mathml(latex).startswith("<math") for latex in re.findall(r"`([^`]*)`", found))


def test_layers_have_their_formula_or_their_sequence():
    from part_pages import part_section

    for name, kind in kinds().items():
        if issubclass(kind, Norm | Insert) and kind is not BatchNorm:
            text = "\n".join(part_section(kind))
            assert re.search(r"\{math\}| - ReLU", text), name


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


def test_the_picture_of_a_round_has_every_slot_and_lights_up_those_of_a_method():
    from method_pages import own_parts
    from round_picture import FILE, PLACES, picture

    assert sorted(PLACES) == sorted(SLOTS)
    assert FILE.read_text() == picture(PLACES, "One round, and the slots of a method")
    lit = {slot for slot, _ in own_parts(METHODS["gperxan"])}
    assert lit == {"norm", "share", "terms"}
    drawn = picture(lit, "gperxan")
    places = re.findall(r'<rect class="(\w+)"[^>]*/>\n<text class="name"[^>]*>(\w+)<', drawn)
    assert {name: kind for kind, name in places if kind != "off"} == {
        "norm": "model",
        "share": "server",
        "terms": "client",
    }
    assert len(places) == len(SLOTS)


def test_every_method_has_its_idea_in_one_short_sentence():
    assert list(ideas()) == list(METHODS)
    for name, idea in ideas().items():
        assert len(idea.split()) <= 20, name
        assert idea.endswith("."), name
        assert ". " not in idea, name
    assert printed_name("fedprox+feddg-ga+outside") == "FedProx + FedDG-GA + outside"
    assert all(re.sub(r"\W", "", printed_name(name)).lower() == re.sub(r"\W", "", name) for name in METHODS)
    assert ideas_of("fedprox+feddg-ga+outside") == [ideas()["fedprox"], ideas()["feddg-ga"]]


@pytest.mark.parametrize(
    ("latex", "spaces"),
    [
        (r"\mathrm{momentum} m_{t}", 1),
        (r"1-\mathrm{ema}", 0),
        (r"\mathrm{lr} _{t}m", 0),
        (r"n\mathrm{limit}", 1),
        (r"w_{v}\mathrm{var} _{\mathrm{IN} }", 1),
        (r"s\cos \left(f\right)", 1),
        (r"2E\log p", 2),
        (r"\mathrm{Beta} \left(\alpha \right)", 0),
    ],
)
def test_a_word_and_the_symbols_beside_it_do_not_run_together(latex, spaces):
    from typeset import mathml

    assert mathml(latex).count("<mspace") == spaces
