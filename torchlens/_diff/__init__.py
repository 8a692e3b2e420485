"""Compares two histories: where they diverge, and why."""
