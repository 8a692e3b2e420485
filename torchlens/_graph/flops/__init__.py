"""Floating-point operations of a call, from the shapes of its arguments and result: a registry of
formulas.
"""
