"""The console entry point. It answers Ctrl-C from the beginning, also while the command line is being imported."""

from fedsim.common.exit_codes import INTERRUPTED, answer_signals, complain, leave
from fedsim.common.garbage import starting


def main() -> None:
    """Run the command line, as `fedsim.commands.cli.main` does."""
    try:
        answer_signals()
        starting()
        from fedsim.commands.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        leave(complain(INTERRUPTED, 130))
    except SystemExit as end:
        leave(end.code)
