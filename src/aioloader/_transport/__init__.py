"""Batch memory and inter-process messages; imports neither torch nor asyncio."""
