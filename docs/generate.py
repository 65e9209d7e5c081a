"""Writes the pages that come from the code: one per method and per slot of parts, and the API's index."""

import shutil
from pathlib import Path

from pair_page import pair_page
from part_pages import part_section, write_part_pages

from fedsim.commands.methods import first_try
from fedsim.methods.recipe import SLOTS, Recipe, parts_of
from fedsim.methods.table import METHODS
from fedsim.parts.part import part_name

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
    "fedsim.models.backbones": "Backbones",
    "fedsim.models.layout": "Stages and levels of a backbone",
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
    "fedsim.results": "Reading results",
    "fedsim.results.selection": "Selection rules",
    "fedsim.results.callbacks": "Callbacks of a run",
}

NOT_BUILT = {  # by the name that their rows would have
    "stablefdg": "StableFDG (Park et al., NeurIPS 2023)",
    "fedccrl": "FedCCRL (Wang et al., 2024)",
    "fisc": "FISC or PARDON (Nguyen et al., ICDCS 2025)",
    "promptfl": "PromptFL (Guo et al., 2023)",
    "fedapt": "FedAPT (Su et al., AAAI 2024)",
    "plan": "PLAN (Gong et al., 2024)",
}


def write_pages(folder: Path) -> None:
    """Fill `methods/`, `parts/` and `api/` below `folder` anew."""
    for name in ("methods", "parts", "api"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    for name, recipe in METHODS.items():
        (folder / "methods" / f"{name}.md").write_text(method_page(name, recipe))
    (folder / "methods" / "index.md").write_text(methods_index())
    write_part_pages(folder / "parts")
    (folder / "parts" / "pairs.md").write_text(pair_page())
    for module, title in API.items():
        text = f"# {title}\n\n```{{eval-rst}}\n.. automodule:: {module}\n   :members:\n```\n"
        (folder / "api" / f"{module}.md").write_text(text)
    entries = "\n".join(API)
    (folder / "api" / "index.md").write_text(f"# API reference\n\n```{{toctree}}\n:maxdepth: 1\n\n{entries}\n```\n")


def own_parts(recipe: Recipe) -> list[tuple[str, object]]:
    """The parts in which a recipe differs from FedAvg's."""
    standard = {repr(part) for _, part in parts_of(Recipe())}
    return [(slot, part) for slot, part in parts_of(recipe) if repr(part) not in standard]


def methods_index() -> str:
    """The page that lists all methods with what they change."""
    missing = ", ".join(title for name, title in NOT_BUILT.items() if name not in METHODS)
    lines = ["# Methods", ""]
    if missing:
        lines += [f"Published methods for federated domain generalization that are not built: {missing}.", ""]
    lines += ["| method | what it changes | paper |", "|---|---|---|"]
    for name, recipe in METHODS.items():
        changes = ", ".join(f"{slot}: `{part_name(part)}`" for slot, part in own_parts(recipe))
        changes = changes or ("pools all source data" if recipe.pooled else "nothing: it is the reference")
        lines.append(f"| [{name}]({name}.md) | {changes} | {recipe.paper} |")
    entries = "\n".join(METHODS)
    return "\n".join(lines) + f"\n\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"


def method_page(name: str, recipe: Recipe) -> str:
    """One method: paper, commands, disclosure, and every part with its formula and settings."""
    lines = [f"# {name}", "", f"Paper: {recipe.paper}." if recipe.paper else "", ""]
    lines += ["```bash", f"{first_try(name, recipe)} --target rot75", f"fedsim methods {name}", "```", ""]
    lines += [f"**What leaves the clients:** {recipe.disclosure()}.", ""]
    parts = own_parts(recipe)
    if not parts:
        lines += ["Every part of this recipe is the standard one.", ""]
    for slot, part in sorted(parts, key=lambda pair: list(SLOTS).index(pair[0])):
        lines += part_section(type(part), part, f"{slot}: {part_name(part)}")
    return "\n".join(lines)
