"""What values, gradients and parameters tell of a model: checks while they exist, and the findings
that come of it.
"""
