"""The work of the commands, whose arguments `fedsim.commands.cli` reads."""
