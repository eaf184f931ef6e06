"""The order of samples, with permutations, mixtures, epochs and ranks."""
