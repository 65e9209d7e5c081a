"""The notebooks of the documentation run from the first cell to the last, in a folder of their own."""

from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel")
nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel")
NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"
SAID = {
    "first-steps": ["| fedavg |", "| gperxan |"],
    "own-method": ["Writing confidence.py", "weight=0"],
}


@pytest.mark.parametrize("name", SAID)
def test_notebook(tmp_path, monkeypatch, name):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # what a reader sees comes from his own machine
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = str([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
    assert [words for words in SAID[name] if words not in said] == []


def test_every_notebook_is_tested():
    assert {file.stem for file in NOTEBOOKS.glob("*.ipynb")} == set(SAID)
