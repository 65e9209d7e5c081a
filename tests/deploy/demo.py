"""The demo federation of these tests: three source sites and one target site on this machine."""

import json
import os
import shutil
from pathlib import Path

from rich.console import Console, RenderableType

from fedsim.deploy.federation import Federation

TOML = """
name = "demo"
address = "127.0.0.1"
names = ["fl.example.org", "10.1.2.3"]

[[sites]]
name = "alpha"
domain = "rot0"

[[sites]]
name = "beta"
domain = "rot15"
port = 9095
data_dir = "/data/of beta"

[[sites]]
name = "gamma"
domain = "rot30"
port = 9096

[[sites]]
name = "delta"
domain = "rot45"
role = "target"
port = 9097
"""
DOMAINS = ["rot0", "rot15", "rot30", "rot45"]
NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")


def register(federation: Federation, **nodes: int) -> Path:
    """Register sites under node ids in the server's kit, as the SuperLink would; returns the kit."""
    kit = federation.kit("server")
    (kit / "state" / "nodes").mkdir(parents=True)
    (kit / "run").mkdir()
    for site, node in nodes.items():
        record = {"node": node, "key": (kit / "sites" / f"{site}.pub").read_text()}
        (kit / "state" / "nodes" / f"{site}.json").write_text(json.dumps(record))
    return kit


def text_of(shown: RenderableType, width: int = 400) -> str:
    """A table as a terminal of that width shows it."""
    with Path(os.devnull).open("w") as nowhere:
        paper = Console(width=width, record=True, file=nowhere)
        paper.print(shown)
    return paper.export_text()


def files_in(folder: Path) -> dict[str, bytes]:
    """Bytes of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(file: Path, old: str, new: str) -> None:
    """Replace a text that is in a file, once."""
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
