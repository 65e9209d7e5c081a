"""What the commands of the command line do; `fedsim.cli` reads their arguments."""
