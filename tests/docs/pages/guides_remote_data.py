"""A bucket of objects and lines, and a folder of pictures."""

from typing import Any

NEEDS = ("s3",)


def before(page: dict[str, Any]) -> None:
    """Fill them."""
    from docs import stand_ins  # noqa: PLC0415

    objects = {f"train/{number:03d}.bin": bytes(range(32)) for number in range(32)}
    lines = {f"lines-{number}.txt": b"line\n" * 100 for number in range(2)}
    stand_ins.put(**objects, **lines)
    stand_ins.write_photos()
