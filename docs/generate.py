"""Writes the pages that come from the code: methods, parts, their source, and the API's index."""

import shutil
from pathlib import Path

from method_pages import write_method_pages
from pair_page import pair_page
from part_pages import write_code_pages, write_part_pages

from fedsim.analysis.page import libraries

API = {
    "strategies.parts": "Contracts of the server's parts",
    "strategies.aggregate": "Averages of client models",
    "clients.parts": "Contracts of the client's parts",
    "clients.local_round": "What a client's part sees of its round",
    "clients.tools.networks": "Copies of networks, second passes and second optimizers for client parts",
    "clients.base": "One domain's client",
    "clients.tools.losses": "Losses",
    "strategies.tools.masking": "Masks and secrets of secure aggregation",
    "strategies.fuse.secure_mean": "Secure aggregation, the server's part",
    "clients.reports.masked_update": "Secure aggregation, the client's part",
    "fedsim.methods.recipe": "What a recipe is",
    "fedsim.models.backbones": "The catalog of backbones",
    "fedsim.models.layout": "What a backbone is: its row, stages and levels",
    "fedsim.models.norms.base": "The contract of a normalization",
    "fedsim.models.inserts.base": "The contract of an insert into the network",
    "fedsim.models.infer.base": "The contract of an inference rule",
    "fedsim.data.row": "What a data set is",
    "fedsim.data.reader": "The contract of a reader of a data set",
    "fedsim.settings.data": "Settings: data",
    "fedsim.settings.model": "Settings: model",
    "fedsim.settings.train": "Settings: train",
    "fedsim.settings.run": "Settings: run",
    "fedsim.settings.experiment": "Reading an experiment from a file",
    "fedsim.apps.strategy": "In a Flower app: the strategy",
    "fedsim.apps.own_client": "In a Flower app: the client",
    "fedsim.commands.notebook": "From Python: run, sweep, compare",
    "fedsim.records": "Reading results",
    "fedsim.records.selection": "Selection rules",
    "fedsim.records.callbacks": "Callbacks of a run",
}


def write_pages(folder: Path) -> None:
    """Fill `methods/`, `parts/`, `code/`, `api/` and `scripts/` below `folder` anew."""
    for name in ("methods", "parts", "code", "api", "scripts"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    scripts = libraries()
    (folder / "scripts" / "datatables.js").write_text(scripts["datatables"])
    (folder / "scripts" / "datatables.css").write_text(scripts["datatables-css"])
    write_method_pages(folder / "methods")
    write_part_pages(folder / "parts")
    write_code_pages(folder / "code")
    (folder / "parts" / "pairs.md").write_text(pair_page())
    for module, title in API.items():
        text = f"# {title}\n\n```{{eval-rst}}\n.. automodule:: {module}\n   :members:\n```\n"
        (folder / "api" / f"{module}.md").write_text(text)
    entries = "\n".join(API)
    (folder / "api" / "index.md").write_text(f"# API reference\n\n```{{toctree}}\n:maxdepth: 1\n\n{entries}\n```\n")
