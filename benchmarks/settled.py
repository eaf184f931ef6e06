"""Imported last by torch's fork server: collects the garbage of the imports once.

Its children inherit the collector's counters. Without this each of them may run a full
collection of 100 ms before its first batch, depending on what was imported.
"""

import gc

gc.collect()
gc.freeze()
