"""Records, statistics, reports and traces of a loader."""
