"""Import optional dependencies on demand; errors name the extra that installs them."""

import importlib
from typing import Any

from aioloader.errors import UNRELEASED


def imported(module: str, extra: str, why: str) -> Any:
    """Return a module of an optional dependency.

    Args:
        module: The module's name.
        extra: The extra of aioloader that installs the module.
        why: Start of the error message, such as ``"from_arrow needs pyarrow"``.

    Raises:
        ImportError: If the module is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise ImportError(
            f'{why}: pip install "aioloader[{extra}]{UNRELEASED}"'
        ) from exc
