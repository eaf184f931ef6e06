"""Optional dependencies: imported when they are needed, named with their extra."""

import importlib
from typing import Any

from aioloader.errors import UNRELEASED


def imported(module: str, extra: str, why: str) -> Any:
    """Return a module of an optional dependency.

    Args:
        module: Its name.
        extra: The extra of aioloader that installs it.
        why: What needs it, and its name: ``"from_arrow needs pyarrow"``.

    Raises:
        ImportError: If it is not installed; says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise ImportError(
            f'{why}: pip install "aioloader[{extra}]{UNRELEASED}"'
        ) from exc
