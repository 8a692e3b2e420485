"""Receptive and projective fields: which numbers of an input can matter to a unit, and which of an
output a unit can matter to.
"""
