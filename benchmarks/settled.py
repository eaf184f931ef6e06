"""Imported last by torch's fork server: what was imported is garbage-collected once.

Its children inherit the collector's counters. Without this each of them may run a full
collection of 100 ms before its first batch, by an accident of what was imported.
"""

import gc

gc.collect()
gc.freeze()
