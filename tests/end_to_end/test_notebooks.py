"""The notebooks of the documentation run from the first cell to the last, in a folder of their own."""

import json
import sys
from pathlib import Path

import pytest

shells = pytest.importorskip("IPython.core.interactiveshell", reason="needs ipykernel")
config = pytest.importorskip("traitlets.config")
CONFIG = config.Config({"HistoryManager": {"enabled": False}})
NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"
SAID = {
    "first-steps": ["| fedavg |", "| gperxan |"],
    "own-datasets": ["fedavg ", "feddg-ga ", "fedbn "],
    "own-method": ["Writing confidence.py", "weight=0"],
}


@pytest.mark.parametrize("name", SAID)
def test_notebook(tmp_path, monkeypatch, capsys, name):
    """In this process, which has imported PyTorch, and on fewer images."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)  # what a reader sees comes from his own machine
    shell = shells.InteractiveShell(config=CONFIG, user_module=type(sys)("notebook"))
    try:
        for cell in (cell for cell in cells if cell["cell_type"] == "code"):
            source = "".join(cell["source"]).replace("rounds=4", "rounds=1")
            source = source.replace('"rounds": 4', '"rounds": 1').replace("fraction=0.3", "fraction=0.1")
            shell.run_cell(source).raise_error()
    finally:
        shell.restore_sys_module_state()
    said = capsys.readouterr().out
    assert [words for words in SAID[name] if words not in said] == []


def test_every_notebook_is_tested():
    assert {file.stem for file in NOTEBOOKS.glob("*.ipynb")} == set(SAID)
