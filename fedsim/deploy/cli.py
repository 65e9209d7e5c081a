"""`fedsim deploy`: provisioning of a federation. Heavy imports stay inside the commands."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Provision a federation on separate machines, and check it.")

FederationFile = Annotated[Path, typer.Argument(help="the federation's TOML file")]


@app.command()
def init(
    federation: FederationFile = Path("federation.toml"),
    force: Annotated[bool, typer.Option("--force", help="renew all kits, keys and certificates")] = False,
    add: Annotated[bool, typer.Option("--add", help="write the kits of new sites only, with the same CA")] = False,
) -> None:
    """Write one kit per machine: certificates, keys, configuration, scripts."""
    from fedsim.console import console
    from fedsim.deploy.federation import read_federation
    from fedsim.deploy.kits import init as write_kits

    for kit in write_kits(read_federation(federation), force, add):
        console.print(str(kit), soft_wrap=True, highlight=False)


@app.command()
def register(federation: FederationFile = Path("federation.toml")) -> None:
    """Let exactly the keys in the server kit's sites/ take part (its start.sh calls this)."""
    from fedsim.console import console
    from fedsim.deploy.control import register as register_keys
    from fedsim.deploy.federation import read_federation

    nodes = register_keys(read_federation(federation))
    console.print(f"registered: {', '.join(nodes) or 'no site'}", soft_wrap=True, highlight=False)
