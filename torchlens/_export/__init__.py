"""The graph as data for other programs."""
