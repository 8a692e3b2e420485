"""Histories in files: saved and loaded, or written while a model runs."""
