"""Runs a JAX function and writes down what happened, in the form that `capture/` does for PyTorch.

Importing this room imports JAX; nobody enters it who has not imported JAX already.
"""
