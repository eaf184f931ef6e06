"""Blocks; moves to ``_order.blocks`` when all parts are here."""

from aioloader._order.blocks import Bad, Block, Columns, cut, join, pick

__all__ = ["Bad", "Block", "Columns", "cut", "join", "pick"]
