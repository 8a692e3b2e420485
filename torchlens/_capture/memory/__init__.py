"""Saved values and the memory they lie in."""
