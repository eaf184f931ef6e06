"""The loader: options, epochs, state, sampling, ranks."""
