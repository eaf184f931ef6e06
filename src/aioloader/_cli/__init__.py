"""The command line: ``aioloader pack``, ``index``, ``tokenize``, ``bench``."""
