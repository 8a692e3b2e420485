"""The structure of a model in a file, and how a model differs from it."""
