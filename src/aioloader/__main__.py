"""``python -m aioloader``: the command line."""

import sys

from aioloader._cli.main import main

if __name__ == "__main__":
    sys.exit(main())
