"""Collectives, sharded parameters."""
