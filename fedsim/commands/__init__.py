"""The work of the commands, whose arguments `fedsim.cli` reads."""
