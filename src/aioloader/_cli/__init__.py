"""The command line: ``aioloader pack`` and ``aioloader index``."""
