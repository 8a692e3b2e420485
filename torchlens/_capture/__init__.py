"""Runs the model and records what happened. Depends on torch, but not on the history."""
