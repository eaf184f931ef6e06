"""Shared foundations: threads, forks, waits, failures, records, warnings."""
