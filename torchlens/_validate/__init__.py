"""Proves a log against its model."""
