"""Activations of a whole data set: run, stored, read again, summarised."""
