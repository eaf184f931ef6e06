"""The cases, a module for each package."""
