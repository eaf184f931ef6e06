"""Which sample next: index batches, permutations, reordering, retries, failures."""
