"""What the README's snippet reads: a bucket of objects."""

from typing import Any

NEEDS = ("s3",)


def before(page: dict[str, Any]) -> None:
    """Make it."""
    from docs import stand_ins  # noqa: PLC0415

    stand_ins.put(**{f"train/{number:03d}.bin": bytes(32) for number in range(64)})
