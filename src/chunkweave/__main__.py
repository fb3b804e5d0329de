"""`python -m chunkweave`: the command line, for environments whose scripts are not on the path."""

from chunkweave.cli.app import main

if __name__ == "__main__":
    main()
