"""Memory for batches, and messages between processes. No torch, no event loop."""
