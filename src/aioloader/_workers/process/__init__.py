"""Worker processes, and the code that starts, supervises and replaces them."""
