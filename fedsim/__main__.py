"""`python -m fedsim`: the command line, for an environment whose scripts are not in PATH."""

from fedsim.commands.start import main

if __name__ == "__main__":
    main()
