"""Threads that the model starts."""
