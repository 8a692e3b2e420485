"""NaN and Inf: ranges of values, where they went wrong, and the rules by which that is decided."""
