"""Tests of the device stage; a package, for ``benchmarks/device.py`` has its name."""
