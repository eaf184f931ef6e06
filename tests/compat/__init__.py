"""Real packages, each run twice: with torch's loader and with this one."""
