"""The inspection of a folder of images: counts, sizes, modes, and every problem."""

import shutil

import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedsim.commands.cli import app
from fedsim.common.errors import UserError
from fedsim.data.inspect import inspect


@pytest.fixture
def tree(tmp_path):
    root, shades = tmp_path / "data", iter(range(0, 250, 14))

    def image(path, mode="RGB", size=(12, 10)):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shade = next(shades)
        picture = Image.new(mode, size, (shade, 0, 0) if mode == "RGB" else shade)
        picture.putpixel((0, 0), (255, 255, 255) if mode == "RGB" else 255)  # no image has one shade alone
        picture.save(root / path)

    for name in ("cat", "dog"):
        for index in range(3):
            image(f"[bold]/{name}/{index}.png")
            image(f"Zürich/{name}/{index}.png", "L" if name == "dog" else "RGB", (20, 30))
    image("[bold]/fish/0.png")
    image("[bold]/loose.png")
    image("Zürich/cat/cut.png", size=(64, 64))
    (root / "Zürich/cat/cut.png").write_bytes((root / "Zürich/cat/cut.png").read_bytes()[:-30])
    (root / "Zürich/cat/empty.png").write_bytes(b"")
    for source, copy in (("cat/0", "[bold]/dog/same"), ("cat/1", "Zürich/cat/same"), ("dog/1", "[bold]/dog/again")):
        shutil.copy(root / f"[bold]/{source}.png", root / f"{copy}.png")
    return root


def test_what_is_there_and_what_is_wrong(tree):
    found = inspect(tree)
    assert found.counts.loc[["Zürich", "[bold]"], ["cat", "dog", "fish"]].to_numpy().tolist() == [[6, 3, 0], [3, 5, 1]]
    domains = found.domains.set_index("domain")
    assert domains.loc["[bold]", ["width", "height", "modes"]].tolist() == ["12", "10", "RGB 9"]
    assert domains.loc["Zürich", ["width", "modes"]].tolist() == ["12-20", "RGB 4, L 3"]
    text = "\n".join(found.problems)
    assert len(found.problems) == 7
    for words in ("cut.png (", "empty.png (", "Zürich has no image of fish", "loose.png is in no class",
                  "same.png are the same image in two classes, cat and dog", "are the same image in two domains",
                  "1 images occur more than once"):  # fmt: skip
        assert words in text


def test_the_verb_prints_names_as_they_are_and_draws_a_cell_per_domain_and_class(tree, tmp_path):
    file = tmp_path / "pictures" / "grid.png"
    result = CliRunner().invoke(app, ["datasets", str(tree), "--grid", str(file)])
    assert result.exit_code == 0, result.output
    assert {"[bold]", "Zürich"} <= set(result.output.split())
    with Image.open(file) as image:
        assert image.width > image.height > 100
        assert len(set(image.convert("RGB").getdata())) > 10


def test_a_table_is_inspected_too(tree):
    rows = [(f"[bold]/{name}/{index}.png", name, "one") for name in ("cat", "dog") for index in range(3)]
    pd.DataFrame(rows, columns=["file", "label", "site"]).to_csv(tree / "t.csv", index=False)
    words = ["datasets", str(tree / "t.csv")]
    assert "name it with data.columns." in str(CliRunner().invoke(app, words).exception)
    words += ["--set", "data.columns.path=file", "--set", "data.columns.domain=site"]
    assert "no problem was found" in CliRunner().invoke(app, words).output


@pytest.mark.parametrize(("path", "override", "said"), [
    ("t.csv", "data.image_size=64", "only data.classes, data.columns, data.domains, data.levels and data.task"),
    ("t.csv", "data.columns.paht=file", "no column 'paht'; did you mean 'path'"),
    (".", "data.columns.path=file", "is a folder, which has no columns"),
    ("nowhere", "data.domains=['one']", "are for a folder or table, and there is none at 'nowhere'"),
])  # fmt: skip
def test_settings_without_effect_on_the_inspection_are_refused(tree, path, override, said):
    (tree / "t.csv").write_text("path,label,domain\n")
    place = "nowhere" if path == "nowhere" else str(tree / path)
    result = CliRunner().invoke(app, ["datasets", place, "--set", override])
    assert isinstance(result.exception, UserError)
    assert said in str(result.exception)
