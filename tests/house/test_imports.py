"""Modules import only modules of their own level or of lower levels, even inside functions."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

# The levels from the command line down; a module may import modules of its own level and of all
# levels below it. The longest prefix of a module's name decides its level.
LEVELS = (
    ("fedsim.commands.start", "fedsim.commands.cli", "fedsim.__main__"),
    ("fedsim.commands", "fedsim.deploy.cli"),
    ("fedsim.sweep", "fedsim.commands.contract"),
    ("fedsim.runtime", "fedsim.deploy"),
    ("fedsim.server_app", "fedsim.client_app", "fedsim.export", "fedsim.export.pictures", "fedsim.export.features"),
    ("fedsim.run",),
    ("fedsim.methods.assembly", "fedsim.methods.variants", "fedsim.methods.listing"),
    ("fedsim.methods.registry", "fedsim.methods.combinations", "fedsim.methods.part_settings"),
    ("fedsim.methods.compatibility",),
    ("fedsim.methods", "fedsim.methods.styles", "fedsim.methods.texts"),
    ("fedsim.methods.recipe",),
    ("clients",),
    ("strategies",),
    ("fedsim.models", "fedsim.data", "fedsim.results"),
    (
        "fedsim.parts.part",
        "fedsim.common.console",
        "fedsim.common.lists",
        "fedsim.common.edge",
        "fedsim.commands.new_method",
    ),
    (
        "fedsim.settings.experiment",
        "fedsim.settings",
        "fedsim.settings.sections",
        "fedsim.tensors.arrays",
        "fedsim.tensors.kinds",
        "fedsim.tensors.records",
        "fedsim.common.seeding",
    ),
    ("fedsim.settings.plugins",),
    (
        "fedsim.common.errors",
        "fedsim.common.cores",
        "fedsim.common.about",
        "fedsim.common.tasks",
        "fedsim.common.files",
        "fedsim.common.moved",
        "fedsim.flower",
        "fedsim.parts.facts",
    ),
)
FLOWER = (
    "fedsim.server_app", "fedsim.client_app", "fedsim.flower", "fedsim.runtime", "fedsim.deploy", "fedsim.run",
    "fedsim.tensors.arrays", "fedsim.tensors.records",
    "strategies.base", "strategies.wire", "clients.base",
)  # fmt: skip


def modules(root: Path) -> dict[str, Path]:
    """Every module of the three packages, by name."""
    found = {}
    for package in ("fedsim", "clients", "strategies"):
        for file in (root / package).rglob("*.py"):
            parts = file.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(file: Path, known: dict[str, Path]) -> Iterator[str]:
    """The names of all that a file imports: modules of the tree by their full name, others by their package's name.

    Imports that only a type checker reads are left out.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    unread = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in unread:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in full]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name if name in known else name.partition(".")[0] for name in names)


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def level(name: str) -> int:
    """Number of a module's level, counted from the command line."""
    homes = [(len(prefix), number) for number, level in enumerate(LEVELS) for prefix in level if under(name, prefix)]
    assert homes, f"{name} is in no level; add it to LEVELS"
    return max(homes)[1]


def test_imports_run_from_the_command_line_down_to_the_settings():
    known = modules(ROOT)
    upwards = [
        f"{name} imports {other}"
        for name, file in known.items()
        if name not in ("fedsim", "clients", "strategies")
        for other in imported(file, known)
        if other in known and other not in ("fedsim", "clients", "strategies") and level(other) < level(name)
    ]
    assert upwards == []


def test_flower_stays_at_the_edges():
    known = modules(ROOT)
    inside = [
        name
        for name, file in known.items()
        if not any(under(name, prefix) for prefix in FLOWER) and "flwr" in imported(file, known)
    ]
    assert inside == []


def test_the_walk_sees_imports_inside_functions(tmp_path):
    (tmp_path / "fedsim").mkdir()
    (tmp_path / "fedsim" / "__init__.py").write_text("")
    (tmp_path / "fedsim" / "data.py").write_text("def f():\n    from fedsim import runtime\n    import torch.nn\n")
    (tmp_path / "fedsim" / "runtime.py").write_text("import fedsim.data\n")
    known = modules(tmp_path)
    assert list(imported(known["fedsim.data"], known)) == ["fedsim.runtime", "torch"]
    assert list(imported(known["fedsim.runtime"], known)) == ["fedsim.data"]


def test_no_module_hides_one_of_python():
    assert {name.split(".")[0] for name in modules(ROOT)}.isdisjoint(sys.stdlib_module_names)
