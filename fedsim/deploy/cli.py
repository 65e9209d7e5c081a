"""The command `fedsim deploy`: provisioning of a federation. Imports that take long are inside the commands."""

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
    from fedsim.common.console import say
    from fedsim.deploy.federation import read_federation
    from fedsim.deploy.kits import init as write_kits

    for kit in write_kits(read_federation(federation), force, add):
        say(str(kit))


@app.command()
def register(
    federation: FederationFile = Path("federation.toml"),
    site: Annotated[str, typer.Option(help="a site that has made its own key")] = "",
    key: Annotated[Path | None, typer.Option(help="the file with that site's public key")] = None,
) -> None:
    """Register exactly the keys in the server kit's sites/ (its start.sh calls this); --site adds the key of a site."""
    from fedsim.common.console import say
    from fedsim.deploy.control import add_public_key
    from fedsim.deploy.control import register as register_keys
    from fedsim.deploy.federation import read_federation

    description = read_federation(federation)
    if site:
        add_public_key(description, site, key)
    nodes = register_keys(description)
    say(f"registered: {', '.join(nodes) or 'no site'}")


@app.command(name="key", hidden=True)
def make_key(site: str, private: Path, public: Path) -> None:
    """Make a site's own key (a site's start.sh calls this when its kit has none)."""
    from fedsim.deploy.certificates import write_site_key

    write_site_key(site, private, public)


@app.command()
def renew(
    federation: FederationFile = Path("federation.toml"),
    days: Annotated[int, typer.Option(help="validity, up to 3650; 0: as in the federation file")] = 0,
) -> None:
    """Replace the server's certificate. Keys and kits do not change, and running sites continue."""
    from datetime import UTC, datetime, timedelta

    from fedsim.common.console import say
    from fedsim.deploy.federation import read_federation
    from fedsim.deploy.renewal import renew as renew_certificate

    description = read_federation(federation)
    until = renew_certificate(description, days)
    end = datetime.now(UTC) + timedelta(days=(days or description.days) - 1)
    cut = " and no longer, because the CA's certificate ends then" if until < end else ""
    say(f"the server's certificate is valid until {until:%Y-%m-%d}{cut}")


@app.command()
def sign(
    bundle: Annotated[Path, typer.Argument(help="folder of a Flower app")],
    federation: Annotated[Path, typer.Option(help="the federation's TOML file")] = Path("federation.toml"),
) -> None:
    """Sign an app bundle with the operator's key, for sites that pin what they run."""
    from fedsim.common.console import say
    from fedsim.deploy.bundles import sign as sign_bundle
    from fedsim.deploy.federation import read_federation

    digest, signature = sign_bundle(bundle, read_federation(federation).kit("operator") / "apps.key")
    file = Path(f"{digest}.sig")
    file.write_text(f"{signature}\n")
    say(f"{file}: give it to the sites, which copy it to apps/ in their kits")


@app.command()
def status(
    federation: FederationFile = Path("federation.toml"),
    watch: Annotated[bool, typer.Option("--watch", help="show it again every two seconds, until Ctrl-C")] = False,
) -> None:
    """Show every site: online since when, last contact, clock, bytes, round of the run, last refusal."""
    import time

    from rich.live import Live

    from fedsim.common.console import console
    from fedsim.deploy.federation import read_federation
    from fedsim.deploy.status import status_table

    description = read_federation(federation)
    if not watch:
        console.print(status_table(description))
        return
    with Live(status_table(description), console=console) as live:
        while True:
            time.sleep(2)
            live.update(status_table(description))


@app.command()
def check(
    config: Annotated[
        str, typer.Argument(help="experiment that the sites' data must fit; empty, or the federation's file: no data")
    ] = "",
    federation: Annotated[Path, typer.Option(help="the federation's TOML file")] = Path("federation.toml"),
    target: Annotated[str, typer.Option(help="the unseen domain")] = "",
    preset: Annotated[str, typer.Option(help="named settings of the experiment file")] = "",
    wait: Annotated[float, typer.Option(min=1, help="seconds that a site has to answer")] = 120.0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="override, e.g. data.image_size=64")] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="run the code of modules outside fedsim that the experiment names")
    ] = False,
    statistics: Annotated[
        int, typer.Option(min=0, help="also ask for means, deviations and missing values, but no number of fewer rows")
    ] = 0,
) -> None:
    """Show which sites are online, their versions, and whether their data fits the experiment. Exit code 2 if it does
    not."""
    from fedsim.common.console import console
    from fedsim.deploy.check import check as check_sites
    from fedsim.deploy.check import show, show_statistics
    from fedsim.deploy.federation import is_federation, read_federation
    from fedsim.methods.registry import refuse_outside
    from fedsim.settings.experiment import read_experiment

    if config and is_federation(config):  # as `register` takes it
        federation, config = Path(config), ""
    description = read_federation(federation)
    overrides = [*(set_ or ()), *([f"run.target={target}"] if target else [])]
    experiment = read_experiment(config, overrides, preset) if config else None
    if experiment:
        refuse_outside(experiment, config, trust)
    try:
        findings, missing = check_sites(description, experiment, wait, statistics)
    except KeyboardInterrupt:
        console.print("interrupted; the check has ended, call it again", style="red")
        raise typer.Exit(130) from None
    show_statistics(findings)
    fits = show(description, findings, missing, experiment.name if experiment else "sites")
    raise typer.Exit(0 if fits else 2)


@app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def superlink(context: typer.Context, kit: Annotated[Path, typer.Argument(help="folder of the server's kit")]) -> None:
    """Run Flower's SuperLink behind the gate (start.sh of the server's kit calls this)."""
    from fedsim.deploy.superlink import serve

    serve(kit.resolve(), context.args)


@app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def supernode(context: typer.Context, kit: Annotated[Path, typer.Argument(help="folder of the site's kit")]) -> None:
    """Run Flower's SuperNode as the kit of a site needs it (supervise.sh calls this)."""
    import os

    from fedsim.deploy.supernode import serve

    code = serve(kit.resolve(), context.args)
    os._exit(code)  # Flower's other threads would keep the process alive


@app.command(hidden=True)
def client(
    folder: Annotated[Path, typer.Argument(help="folder in which the site's SuperNode finds this process")],
    parent: Annotated[int, typer.Option(help="id of a process; the client ends when that process ends")] = 0,
    caller: Annotated[int | None, typer.Option(help="id of the user whose tasks it does, when it has its own")] = None,
) -> None:
    """Keep one client process for all messages of a site (supervise.sh calls this)."""
    from fedsim.deploy.warm_client import serve

    serve(folder.resolve(), parent, caller)
