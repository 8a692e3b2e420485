"""Runs recorded operations again, and restores the state that running a model changes."""
