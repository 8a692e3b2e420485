"""The run's folder: writing it."""
