"""Backward passes: hooks, gradients of entries."""
