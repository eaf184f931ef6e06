"""Tables of Arrow: Parquet, Arrow and CSV files, and the data of other libraries."""

import importlib
from typing import Any

from aioloader.errors import UNRELEASED


def imported(module: str, why: str) -> Any:
    """Import a module that needs pyarrow, which takes long.

    Args:
        module: Its name.
        why: Who needs it, and a verb: ``"from_arrow needs"``.

    Raises:
        ImportError: If pyarrow is not installed.
    """
    try:
        importlib.import_module("pyarrow")
        return importlib.import_module(module)
    except ImportError as exc:
        raise ImportError(
            f'{why} pyarrow: pip install "aioloader[arrow]{UNRELEASED}"'
        ) from exc
