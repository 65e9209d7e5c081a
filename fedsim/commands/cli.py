"""The command line of fedsim. Imports that take long are inside the commands, so that `fedsim --help` is quick."""

import sys
from pathlib import Path
from typing import Annotated

import click
import typer
from typer.completion import completion_init, get_completion_script

from fedsim.commands import options
from fedsim.commands.results import archive, compare, plot, report
from fedsim.commands.studies import search, study, sweep
from fedsim.common.about import VERSION
from fedsim.common.console import say
from fedsim.common.errors import UserError
from fedsim.common.exit_codes import answer_signals, guarded
from fedsim.deploy.cli import app as deploy
from fedsim.export.cli import evaluate, export, features, predict

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(deploy, name="deploy")
app.add_typer(study, name="study")
completion_init()  # the forms of the answers that the scripts of `fedsim completion` ask for


def main() -> None:
    """Run the command line and exit; the console's entry point is `fedsim.commands.start`, which calls this.

    Wrong input gives one line and exit code 2, a failed client its own traceback and exit code 1, and Ctrl-C exit code
    130.
    """
    answer_signals()
    sys.exit(guarded(_command))


def _command() -> int:
    try:
        code = app(standalone_mode=False) or 0  # without standalone mode, typer.Exit's code is returned
    except typer.Abort as abort:  # so Typer calls an EOFError, for example of a file that was cut
        raise (abort.__cause__ or abort) from None
    except click.UsageError as error:
        if error.format_message():
            raise
        code = 2  # a command without arguments, whose help has been printed
    if code == 130:  # Typer has handled Ctrl-C itself
        raise KeyboardInterrupt
    return code


@app.callback(invoke_without_command=True)
def overall(
    version: Annotated[bool, typer.Option("--version", help="print the version and the folder of the program")] = False,
) -> None:
    """Federated domain generalization: run, compare and deploy methods as recipes."""
    if version:
        typer.echo(f"fedsim {VERSION} ({Path(__file__).parents[2]})")
        raise typer.Exit


@app.command()
def run(
    config: options.Config = "digits",
    method: Annotated[str, typer.Option(help="row of `fedsim methods`, or a+b")] = "",
    target: Annotated[str, typer.Option(help="the unseen domain; no-target: none, all domains train")] = "",
    seed: Annotated[int | None, typer.Option(help="run seed (default: the experiment's, 0)")] = None,
    runtime: Annotated[str, typer.Option(help="inline, ray, flower or deployment")] = "",
    federation: Annotated[str, typer.Option(help="the deployment's federation file")] = "",
    output: options.Output = "",
    preset: options.Preset = "",
    callback: options.Callbacks = None,
    set_: options.Override = None,
) -> None:
    """Run one experiment: one method, one unseen domain, one seed. Run it again to resume it."""
    if "," in method:
        raise UserError(f"a run has one method; for several: fedsim sweep {config} --methods {method}")
    runtime = runtime or ("deployment" if federation else "")
    given = options.short_options(
        method=method, target=target, seed=seed, runtime=runtime, federation=federation, output=output,
        callback=callback,
    )  # fmt: skip
    from fedsim.settings.experiment import read_experiment, with_options

    experiment = read_experiment(config, with_options(set_ or (), given), preset)
    from fedsim.commands.runs import run_one

    run_one(experiment)


app.command()(sweep)
app.command()(compare)
app.command()(plot)
app.command()(report)
app.command()(archive)


@app.command()
def pictures(
    config: options.Config = "digits",
    method: Annotated[str, typer.Option(help="a method that changes images: ccst, fisc, elcfs, fedccrl")] = "ccst",
    target: Annotated[str, typer.Option(help="the unseen domain, of which no picture is drawn")] = "",
    output: Annotated[Path, typer.Option(help="folder of the pictures")] = Path("outputs/pictures"),
    rows: Annotated[int, typer.Option(min=1, help="images per grid")] = 6,
    preset: options.Preset = "",
    set_: options.Override = None,
) -> None:
    """Draw how a method changes images: contents, styles and results, or interpolations."""
    from fedsim.export.pictures import draw_pictures
    from fedsim.runs.plan import resolve
    from fedsim.settings.experiment import read_experiment, with_options

    overrides = with_options(set_ or (), options.short_options(method=method, target=target))
    for file in draw_pictures(resolve(read_experiment(config, overrides, preset)), output, rows):
        say(str(file))


@app.command()
def methods(
    name: Annotated[str, typer.Argument(help="a method, to see its parts and settings")] = "",
    everything: Annotated[bool, typer.Option("--all", help="with cost, source and what leaves the clients")] = False,
    group: Annotated[str, typer.Option(help="the same for one group of the list, e.g. 'clients and server'")] = "",
    changes: Annotated[
        str, typer.Option(help="the same for those that change these slots or sides (fuse,server)")
    ] = "",
    parts: Annotated[bool, typer.Option("--parts", help="list every part by slot, with one line each")] = False,
    data: Annotated[
        str, typer.Option(help="an experiment: also show the method's bytes per round on its data and network")
    ] = "",
    preset: options.Preset = "",
    set_: options.Override = None,
) -> None:
    """List the methods by what they change, or all parts by slot, or show one recipe with all its settings."""
    from fedsim.commands.methods import show_method, show_methods, show_names, show_parts

    if bool(name) + bool(changes) + bool(group) + everything + parts > 1:
        raise UserError("fedsim methods takes a method, --all, --group, --changes or --parts, only one of them")
    if (data or preset or set_) and not (name and data):
        raise UserError("bytes are shown for one method on one experiment: fedsim methods NAME --data CONFIG")
    if parts:
        show_parts()
    elif name:
        show_method(name, data, preset, set_ or [])
    else:
        show_methods(changes, group) if changes or group or everything else show_names()


@app.command("check-method")
def check_method(
    method: Annotated[str, typer.Argument(help="module:name of your own, a row of `fedsim methods`, or a+b")],
    set_: options.Override = None,
) -> None:
    """Check the properties that every method must have on a small federation; exit code 1 when one does not hold."""
    from fedsim.commands.methods import show_findings

    raise typer.Exit(0 if show_findings(method, set_ or []) else 1)


@app.command("new-method")
def new_method(
    name: Annotated[str, typer.Argument(help="name of the module and of the method in it")],
    folder: Annotated[Path, typer.Option(help="folder of the two files")] = Path(),
    slot: Annotated[str, typer.Option(help="slot of the part: terms, objective, update, fuse, banks, ...")] = "terms",
) -> None:
    """Write a commented module with a part for a slot and a row, and a test that passes; both are ready to edit."""
    from fedsim.commands.methods import start_method

    start_method(name, folder, slot)


@app.command()
def datasets(
    name: Annotated[str, typer.Argument(help="a data set, to see its facts; or a folder or table, to inspect it")] = "",
    grid: Annotated[Path | None, typer.Option(help="PNG file for an image per domain and class")] = None,
    set_: options.Override = None,
) -> None:
    """List the data sets, show one of them, or inspect a folder DOMAIN/CLASS/IMAGE or a table of your own."""
    from fedsim.commands.data import show_datasets, show_inspection

    if grid and not (name and Path(name).exists()):
        raise UserError("--grid draws the images of a folder or table of your own: give its path too")
    if name and (set_ or Path(name).exists()):
        show_inspection(Path(name), grid, set_ or [])
    else:
        show_datasets(name)


for command in (search, evaluate, predict, export, features):
    app.command()(command)


@app.command()
def completion(shell: Annotated[str, typer.Argument(help="bash, zsh, fish or powershell")] = "bash") -> None:
    """Print the script that completes commands and options: fedsim completion bash >> ~/.bashrc"""
    shells = ("bash", "zsh", "fish", "powershell")
    if shell not in shells:
        raise UserError(f"no completion for {shell!r}; known: {', '.join(shells)}")
    typer.echo(get_completion_script(prog_name="fedsim", complete_var="_FEDSIM_COMPLETE", shell=shell))
