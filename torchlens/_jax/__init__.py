"""Runs a JAX function and records it in the form in which `_capture` records a PyTorch model.

Importing this package imports JAX. It is imported only once the user has imported JAX.
"""
