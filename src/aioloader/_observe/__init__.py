"""Observe a loader: statistics, reports, progress, metrics and traces."""
