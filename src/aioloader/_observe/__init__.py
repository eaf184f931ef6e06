"""Records, figures, reports and traces of a loader."""
