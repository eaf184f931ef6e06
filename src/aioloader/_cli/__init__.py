"""The command line: ``aioloader pack``, ``index`` and ``bench``."""
