"""Run the command line, as ``python -m aioloader``."""

import sys

from aioloader._cli.main import main

if __name__ == "__main__":
    sys.exit(main())
