"""The loader's arguments, options, samplers, runtime, feeds and state."""
