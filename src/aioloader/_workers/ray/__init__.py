"""Ray actors as workers."""
