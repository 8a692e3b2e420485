"""Runs a JAX function and writes down what happened, in the form that `capture/` does for PyTorch.

Importing this package imports JAX. It is imported only once the user has imported JAX.
"""
