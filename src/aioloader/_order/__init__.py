"""The order of samples: samplers, permutations, mixtures, epochs, and ranks."""
