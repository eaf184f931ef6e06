"""Format numbers as text: durations, speed-ups and aligned tables."""

from collections.abc import Sequence


def seconds_text(seconds: float) -> str:
    """Return a duration as text with three digits, such as ``"12.3 ms"``."""
    if not seconds:
        return "0 s"
    # The next unit starts where three digits would round up to it.
    for limit, scale, unit in ((0.9995e-3, 1e6, "us"), (0.9995, 1e3, "ms")):
        if seconds < limit:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds)} s"


def times_text(gain: float) -> str:
    """Return a speed-up in percent as a factor, such as ``"1.39 times"``."""
    factor = 1 + gain / 100
    decimals = 2 if factor < 1.995 else 1 if factor < 9.95 else 0
    return f"{factor:,.{decimals}f} times"


def _three_digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{decimals}f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table's lines; the first column is left-aligned, the others right."""
    columns = list(zip(heads, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in (heads, *rows)
    ]
