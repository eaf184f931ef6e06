"""What a loader knows of itself."""
