"""How a batch gets its memory. No torch, no event loop."""
