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
        console.print(str(kit), soft_wrap=True, markup=False, highlight=False)


@app.command()
def register(federation: FederationFile = Path("federation.toml")) -> None:
    """Let exactly the keys in the server kit's sites/ take part (its start.sh calls this)."""
    from fedsim.console import console
    from fedsim.deploy.control import register as register_keys
    from fedsim.deploy.federation import read_federation

    nodes = register_keys(read_federation(federation))
    console.print(f"registered: {', '.join(nodes) or 'no site'}", soft_wrap=True, markup=False, highlight=False)


@app.command()
def check(
    config: Annotated[
        str, typer.Argument(help="experiment that the sites' data must fit; empty: data is not looked at")
    ] = "",
    federation: Annotated[Path, typer.Option(help="the federation's TOML file")] = Path("federation.toml"),
    target: Annotated[str, typer.Option(help="the unseen domain")] = "",
    preset: Annotated[str, typer.Option(help="named settings of the experiment file")] = "",
    wait: Annotated[float, typer.Option(min=1, help="seconds that a site has to answer")] = 120.0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="override, e.g. data.image_size=64")] = None,
) -> None:
    """Tell which sites are online, their versions, and whether their data fits the experiment. Exit code 2 if not."""
    from fedsim.console import console
    from fedsim.deploy.check import check as check_sites
    from fedsim.deploy.check import table
    from fedsim.deploy.federation import read_federation
    from fedsim.experiment import read_experiment

    description = read_federation(federation)
    overrides = [*(set_ or ()), *([f"run.target={target}"] if target else [])]
    experiment = read_experiment(config, overrides, preset) if config else None
    findings, missing = check_sites(description, experiment, wait)
    console.print(table(description, findings, experiment.name if experiment else "sites"))
    bad = [f"{finding.site.name}: {finding.problems[0]}" for finding in findings if finding.problems]
    for line in [*bad, *missing]:
        console.print(line, style="red", soft_wrap=True, markup=False, highlight=False)
    raise typer.Exit(2 if bad or missing else 0)


@app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def superlink(context: typer.Context, kit: Path) -> None:
    """Run Flower's SuperLink with the gate before it (the server kit's start.sh calls this)."""
    from fedsim.deploy.superlink import serve

    serve(kit.resolve(), context.args)


@app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def supernode(context: typer.Context, kit: Path) -> None:
    """Run Flower's SuperNode as a site's kit needs it (supervise.sh calls this)."""
    import os

    from fedsim.deploy.supernode import serve

    code = serve(kit.resolve(), context.args)
    os._exit(code)  # Flower's other threads would keep the process


@app.command(hidden=True)
def client(kit: Path, parent: Annotated[int, typer.Option(help="process that it ends with")] = 0) -> None:
    """Keep one client process for all messages of a site (supervise.sh calls this)."""
    from fedsim.deploy.warm_client import serve

    serve(kit.resolve(), parent)
