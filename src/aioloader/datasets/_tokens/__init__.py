"""Data for language models: the arrays of samples, and files of tokens."""
