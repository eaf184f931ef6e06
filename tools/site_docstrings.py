"""An extension of griffe, which reads docstrings for the site's reference."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Treats ``Example:`` sections as griffe's ``Examples:``."""

    def on_object(self, *, obj: griffe.Object, **_others: Any) -> None:
        """Rename the section of one docstring."""
        if obj.docstring is not None:
            found = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
            obj.docstring.value = found
